"""Builds the optional library of a wheel; a machine without a C compiler gets a wheel without it."""

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
            sys.stderr.write(f"latentcache is packed without its compiled library: {error}\n")
            return
        from packaging.tags import sys_tags

        build_data["tag"] = f"py3-none-{next(sys_tags()).platform}"
        build_data["pure_python"] = False
        library = "latentcache/store/gather/_gather.so"
        build_data["force_include"][str(Path(self.root) / library)] = library
