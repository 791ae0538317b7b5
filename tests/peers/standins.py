"""Stand-ins for packages that the modules of a trainer import and that nothing here calls."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

#: Packages and modules; with each all that is in it.
_NAMES = ("torchvision", "bitsandbytes", "albumentations", "einops", "ftfy", "library.lpw_stable_diffusion",
          "library.sdxl_lpw_stable_diffusion")  # fmt: skip
#: Imported before, because they ask for packages that have stand-ins.
_MODULES = tuple(
    f"transformers.{name}"
    for name in ("pytorch_utils", "modeling_utils", "models.auto", "models.clip", "models.t5", "models.gemma2")
)


class _Standin(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        wanted = any(name == standin or name.startswith(f"{standin}.") for standin in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec):
        return _Standin(spec.name)

    def exec_module(self, module):
        pass


class Refused:
    """A model that must not be used."""

    device, dtype = "cpu", None

    def to(self, *_, **__):
        return self

    def __getattr__(self, name):
        raise AssertionError(f"the trainer encodes again: {name}")


def install(checkout, names=(), modules=()):
    """Make the modules of a checkout importable; ``names`` have stand-ins too, ``modules`` are imported before."""
    import transformers.utils

    transformers.utils.is_torchvision_available()  # remembered: it must not find the stand-in
    for module in (*_MODULES, *modules):
        importlib.import_module(module)
    sys.meta_path.insert(0, _Finder((*_NAMES, *names)))
    sys.path.insert(0, checkout)
