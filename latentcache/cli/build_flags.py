"""The flags of ``build`` that no other command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[Path, typer.Argument(metavar="DATA", help="A folder of pictures.", readable=False)]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The cache (DATA.latentcache).", show_default=False)]
Device = Annotated[
    str,
    typer.Option(
        "--device", help="auto (all CUDA devices, else cpu)|cpu|cuda|cuda:0,cuda:1|cpu*2: a worker for each."
    ),
]
NoFold = Annotated[bool, typer.Option("--no-fold", help="Keep the 3D convolutions of video VAEs.")]
Compile = Annotated[str, typer.Option("--compile", help="auto (off today)|on|off: torch.compile.")]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Pictures per encoder call (found by timing).", show_default=False),
]
DecodeThreads = Annotated[
    int | None,
    typer.Option(
        "--decode-threads", min=1, help="Of each worker. Default: its share of the cores.", show_default=False
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        "--host-memory",
        min=1,
        help="Bytes for pictures, or large records, in work, of all workers together (RAM / 4, at most 4 GiB).",
        show_default=False,
    ),
]
MaxPixels = Annotated[int, typer.Option("--max-pixels", min=1, help="Larger pictures are refused.")]
Stream = Annotated[
    bool,
    typer.Option("--stream", help="Let training begin before the end: open_cache(CACHE, follow=True), open_tokens."),
]
CommitEvery = Annotated[
    int | None,
    typer.Option("--commit-every", min=1, help="Entries per commit, at most.", show_default=False),
]
Events = Annotated[
    Path | None, typer.Option("--events", help="Append a JSON line per durable commit.", show_default=False)
]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Look at refused files again.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Stop after the plan.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No plan, no progress.")]
