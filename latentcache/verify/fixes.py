"""Name the command that mends a finding, with the options that were given."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from latentcache.value import Value
from latentcache.verify.findings import PROBLEMS, Finding


class Commands(Value):
    """The words of the command line that a check was given; a printed command carries on with them."""

    common: str = ""
    """Flags that every later command needs too: ``--field package.module:Kind``."""
    recipe: str = ""
    """Recipe flags as given."""
    run: str = ""
    """Flags of a run: ``--device cpu``."""
    allow_failed: str | None = None
    """``--allow-failed`` as given; None: as the snapshot has it."""


class Fixes(Value):
    """Makes the commands for one cache.

    ``root`` is where the data is (None: not looked for), ``named_data`` tells if ``--data`` was given,
    ``allow_failed`` is what the build tolerated, ``reencode`` are the flags that draw the same samples again.
    """

    commands: Commands
    cache: Path
    root: Path | None
    named_data: bool = False
    allow_failed: str = "0"
    reencode: str = ""

    def __call__(self, finding: Finding) -> Finding:
        """The finding with its command; a finding that needs none stays as it is."""
        if finding.category not in PROBLEMS or finding.fix:
            return finding
        return replace(finding, fix=self._command(finding))

    def build(self) -> str:
        """The build that makes the cache true for its data."""
        words, root = self.commands, "DATA" if self.root is None else shlex.quote(str(self.root))
        allowed = self.allow_failed if words.allow_failed is None else words.allow_failed
        tolerated = f"--allow-failed {shlex.quote(allowed)}" if allowed != "0" else ""
        flags = tolerated, words.common, words.recipe, words.run
        return _joined("latentcache build", root, "--out", shlex.quote(str(self.cache)), *flags)

    def _verify(self, *flags: str) -> str:
        data = f"--data {shlex.quote(str(self.root))}" if self.named_data and self.root is not None else ""
        return _joined("latentcache verify", shlex.quote(str(self.cache)), data, *flags)

    def _command(self, finding: Finding) -> str:
        words = self.commands
        again = self.reencode, words.common, words.recipe
        match finding.category, finding.reason:
            case "unverifiable", "permission":
                place = self.cache if finding.file or self.root is None else self.root
                return f"chmod -R u+rX {shlex.quote(str(place))}"
            case "unverifiable", "not-encoded":
                return self._verify(*again, "--device cpu")
            case "unverifiable", _:
                return self._verify(words.common)
            case "drift", _:
                return f"{self._verify(*again, words.run)} --repair --yes; {self.build()}"
            case "corrupt", _:
                return f"{self._verify(words.common, '--repair --yes')}; {self.build()}"
        return self.build()


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
