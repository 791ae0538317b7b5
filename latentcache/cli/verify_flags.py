"""The flags of ``verify`` that no other command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Cache = Annotated[
    Path, typer.Argument(metavar="CACHE", help="A cache, or a folder that export made.", readable=False)
]
Data = Annotated[Path | None, typer.Option("--data", help="The data folder, if it moved.", show_default=False)]
Full = Annotated[bool, typer.Option("--full", help="Read every payload and every source.")]
Repair = Annotated[
    bool, typer.Option("--repair", help="Take out what is corrupt, after --full; a build makes it again.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Repair without asking.")]
DropStale = Annotated[bool, typer.Option("--drop-stale", help="Let --repair take out stale entries too.")]
RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="FILE",
        help="Would a build by this recipe (JSON of build, info or a manifest) reuse it?",
        show_default=False,
    ),
]
Sample = Annotated[
    str | None,
    typer.Option(
        "--sample",
        metavar="PART",
        help="Read only n/t (the n-th of t slices), x% or N samples.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the samples that are drawn.")]
MaxDuration = Annotated[
    float | None,
    typer.Option("--max-duration", metavar="SECONDS", min=0, help="Stop reading then.", show_default=False),
]
Reencode = Annotated[
    int | None,
    typer.Option(
        "--reencode",
        metavar="N",
        min=1,
        help="Encode N samples again and compare (needs the model).",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option("--device", help="Of --reencode: auto|cpu|cuda|cuda:N")]
Untrusted = Annotated[
    bool, typer.Option("--untrusted", help="The cache is from elsewhere: believe nothing, follow nothing.")
]
