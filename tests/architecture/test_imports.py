import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from package_source import PACKAGE, ROOT

LINTER = Path(sys.executable).with_name("lint-imports")
#: File, a line that breaks a contract, and the contract.
VIOLATIONS = [
    ("geometry/sizes.py", "import latentcache.fields.protocol", "imports point down"),
    ("fields/protocol.py", "import torch", "fields and plans are arithmetic"),
    ("pipeline/settings.py", "import transformers", "only encoders know models"),
    ("sources/formats/files.py", "import torch", "bytes are bytes"),
    ("errors.py", "import rich.table", "only the command line talks to a terminal"),
]


def lint(folder, *command):
    """Run the linter, or another command, on the package in ``folder``; return exit status and output."""
    command = command or (LINTER, "--no-logo", "--no-cache")
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_all_contracts_are_kept():
    status, output = lint(ROOT)
    assert status == 0, output


def test_violations_break_their_contracts(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "latentcache", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line, _ in VIOLATIONS:
        with (tmp_path / "latentcache" / file).open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")
    _, output = lint(tmp_path)
    assert [contract for *_, contract in VIOLATIONS if f"{contract} BROKEN" not in output] == []


@pytest.mark.parametrize("guard", ["def late():", "if TYPE_CHECKING:"])
def test_a_circle_is_found(tmp_path, guard):
    circles = (sys.executable, ROOT / "tools/check_circles.py")
    assert lint(ROOT, *circles) == (0, "imports: no circle\n")
    shutil.copytree(PACKAGE, tmp_path / "latentcache", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "latentcache/value.py").open("a", encoding="utf-8") as stream:
        stream.write(f"\n{guard}\n    from latentcache.fields.protocol import FieldKind\n")
    status, output = lint(tmp_path, *circles)
    assert status == 1
    assert "latentcache.value" in output
    assert "latentcache.fields.protocol" in output
