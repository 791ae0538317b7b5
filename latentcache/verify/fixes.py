"""Name the command that mends a finding, with the options that were given."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from latentcache.value import Value
from latentcache.verify.findings import PROBLEMS, Finding


class Commands(Value):
    """Makes commands for one cache from the words of the command line that its check was given."""

    common: str = ""
    """Flags that every later command needs too: ``--field package.module:Kind``."""
    recipe: str = ""
    """Recipe flags as given."""
    run: str = ""
    """Flags of a run: ``--device cpu``."""
    allow_failed: str | None = None
    """``--allow-failed`` as given; None: as the snapshot has it. The parts below are those of the check."""
    cache: Path = Path()
    root: Path | None = None
    """The data; None: not looked for."""
    data: str = ""
    """``--data`` as given."""
    reencode: str = ""
    """Flags that draw the same samples again."""

    def __call__(self, finding: Finding) -> Finding:
        """The finding with its command; a finding that needs none stays as it is."""
        needed = finding.category in PROBLEMS and not finding.fix
        return replace(finding, fix=self._command(finding)) if needed else finding

    def _command(self, finding: Finding) -> str:
        again = self.reencode, self.common, self.recipe
        build = self.build()
        match finding.category, finding.reason:
            case "unverifiable", "permission":
                place = self.cache if finding.file or self.root is None else self.root
                return f"chmod -R u+rX {shlex.quote(str(place))}"
            case "unverifiable", "not-encoded":
                return self._verify(*again, "--device cpu")
            case "unverifiable", _:
                return self._verify(self.common)
            case "drift", _:
                return f"{self._verify(*again, self.run, '--repair --yes')}; {build}"
            case "corrupt", _:
                return f"{self._verify(self.common, '--repair --yes')}; {build}"
        return build

    def build(self) -> str:
        """The build that makes the cache true for its data."""
        root = "DATA" if self.root is None else shlex.quote(str(self.root))
        allowed = f"--allow-failed {shlex.quote(self.allow_failed)}" if self.allow_failed not in (None, "0") else ""
        flags = allowed, self.common, self.recipe, self.run
        return _joined("latentcache build", root, "--out", shlex.quote(str(self.cache)), *flags)

    def _verify(self, *flags: str) -> str:
        return _joined("latentcache verify", shlex.quote(str(self.cache)), self.data, *flags)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
