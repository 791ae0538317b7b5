"""Builds the compiled reader of a wheel; a machine without a C compiler gets a wheel without it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):
    """Runs ``make native`` before a wheel is packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; the wheel is then one of this system, for any Python."""
        if version == "editable":
            return
        try:
            subprocess.run(["make", "-s", "native"], cwd=self.root, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"latentcache is packed without its compiled reader: {error}\n")
            return
        from packaging.tags import sys_tags

        library = "latentcache/store/gather/_gather.so"
        platform = next(sys_tags()).platform
        build_data["tag"] = f"py3-none-{oldest(platform, (Path(self.root) / library).read_bytes())}"
        build_data["pure_python"] = False
        build_data["force_include"][str(Path(self.root) / library)] = library


def oldest(platform: str, library: bytes) -> str:
    """The platform tag for the oldest glibc that has every symbol version the library asks for.

    Symbol versions are plain strings in an ELF file, such as ``GLIBC_2.14``. Pip knows no tag below glibc 2.5, and
    2.17 for processors other than x86-64. Platforms without glibc keep their tag.
    """
    found = re.fullmatch(r"manylinux_\d+_\d+_(\w+)|linux_(\w+)", platform)
    if found is None:
        return platform
    machine = found[1] or found[2]
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    major, minor = max([*versions, (2, 5) if machine == "x86_64" else (2, 17)])
    return f"manylinux_{major}_{minor}_{machine}"
