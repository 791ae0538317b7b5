"""Stand-ins for packages that the modules of sd-scripts import and that nothing here calls."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

_NAMES = ("torchvision", "bitsandbytes", "albumentations", "einops", "ftfy", "library.lpw_stable_diffusion",
          "library.sdxl_lpw_stable_diffusion")  # fmt: skip


class _Standin(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        wanted = name in _NAMES or name.partition(".")[0] in _NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec):
        return _Standin(spec.name)

    def exec_module(self, module):
        pass


def install(checkout):
    """Make the modules of a checkout importable."""
    import transformers.utils

    transformers.utils.is_torchvision_available()  # remembered: it must not find the stand-in
    for module in ("pytorch_utils", "modeling_utils", "models.auto", "models.clip", "models.t5", "models.gemma2"):
        importlib.import_module(f"transformers.{module}")
    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, checkout)
