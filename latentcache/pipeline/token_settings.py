"""What a build of tokens is asked to do, as plain values. Costs nothing to import.

Every value is checked when it is made, so a contradiction is said before a file is looked at. What was not said
follows the cache, where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import UsageError
from latentcache.pipeline.settings import at_least, beside
from latentcache.sources.record_format import RECORD_RULE
from latentcache.sources.share import Share
from latentcache.token_recipe import LOSSES


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """One build of tokens; None means "not said"."""

    data: Path
    """A file of records, or a folder of them."""
    out: Path | None = None
    """The cache; ``DATA.latentcache`` beside the data where it is not given."""
    datasets: tuple[str, ...] = ()
    """Names in a ``dataset_info.json``; all of them by default."""
    text_lines: bool = False
    """Whether each line of a text file is a document."""
    share: str | None = None
    """``i/n``: of the records, the i-th of n shares, from 0; ``0/1`` is all of them."""
    take_from: tuple[Path, ...] = ()
    """Other caches whose finished documents are taken over in place of being made."""
    tokenizer: str | None = None
    """A ``tokenizer.json``, a folder with one, or ``stub[:delay_ms=N]``."""
    chat_template: Path | None = None
    template_options: tuple[tuple[str, str], ...] | None = None
    """(name, JSON) of what the template is given beside a conversation."""
    loss: str | None = None
    """``all`` or ``assistant``."""
    add_bos: bool | None = None
    add_eos: bool | None = None
    control_tokens: bool | None = None
    """Whether control strings in content become control tokens."""
    workers: int | None = None
    """Processes that tokenise; 0 is this one."""
    host_memory: int | None = None
    """Bytes for records that are larger than a unit of work, of all workers together."""
    commit_every: int | None = None
    """Blocks per commit, at most; a commit comes at 16 MiB or 2 s anyway."""
    stream: bool = False
    """Say what the cache will hold and seal shards as it goes, so that readers may follow."""
    events: Path | None = None
    allow_failed: str = "0"
    retry_failed: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.loss is not None and self.loss not in LOSSES:
            raise UsageError(f"--loss {self.loss!r} is not known", fix=f"--loss {'|'.join(LOSSES)}")
        _ = self.part
        at_least(0, workers=self.workers)
        at_least(1, commit_every=self.commit_every, host_memory=self.host_memory)

    @property
    def cache(self) -> Path:
        """Where the cache is."""
        return self.out or beside(self.data)

    @property
    def part(self) -> Share | None:
        """The share that is made; None for all records.

        Raises:
            UsageError: There is no such share.
        """
        found = None if self.share is None else Share.parse(self.share)
        return None if found is None or found.of == 1 else found


def options_json(settings: TokenSettings) -> dict[str, Any]:
    """How DATA is read, as JSON values: other options make other records of the same files."""
    said = {"datasets": list(settings.datasets), "text_lines": settings.text_lines, "rule": RECORD_RULE}
    return said | ({"share": str(settings.part)} if settings.part else {})
