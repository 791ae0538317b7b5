"""Serve epochs by OneTrainer's own data loader: python serve_onetrainer.py ONETRAINER MGDS OUT SERVED SETTINGS.

Run in an interpreter of its own. Data loader, cache, bucketing, batches and collate are the trainer's. A model that
is asked for anything is an error: an image or a caption would be encoded again. Packages that this does not need, but
that its modules import, are stand-ins. Writes an ``.npz`` with the batches, and a line of JSON to stdout. SETTINGS is
JSON: ``loader`` (module and class), ``epochs``, ``text`` (false: it tokenizes captions), and ``config``.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from contextlib import nullcontext
from unittest.mock import MagicMock

import numpy as np

#: Stand-ins though torch imports them.
_STANDINS = ("torch.utils.tensorboard",)


class _Anything(type):
    """A class with every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name):
    return _Anything(name, (), {"__init__": lambda self, *_, **__: None})


class _Standin(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last one: of packages that are not installed, and that the trainer itself imports."""

    def __init__(self, folders):
        self._folders = folders

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        is_standin = name in _STANDINS or isinstance(sys.modules.get(name.partition(".")[0]), _Standin)
        is_missing = frame.f_code.co_filename.startswith(self._folders) and not _is_installed(name)
        if not is_standin and not is_missing:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Standin(spec.name)

    def exec_module(self, module):
        pass


def _is_installed(name):
    others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    return any(finder.find_spec(name.partition(".")[0], None) for finder in others if hasattr(finder, "find_spec"))


def install(*folders):
    """Make the modules of the trainer importable."""
    import transformers.utils

    transformers.utils.is_torchvision_available()  # remembered: it must not find the stand-in
    sys.meta_path.insert(0, _Finder(folders))
    sys.path[:0] = folders


class Refused:
    """A model that must not be used."""

    def __call__(self, *_, **__):
        raise AssertionError("the trainer encodes again")

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        raise AssertionError(f"the trainer encodes again: {name}")


class Vae(Refused):
    """One that encodes blank images only, as an inpainting model needs them at the start of every epoch."""

    def encode(self, images):
        import torch

        assert not images.any(), "the trainer encodes again"
        latents = torch.zeros(1, 4, images.shape[2] // 8, images.shape[3] // 8)
        return types.SimpleNamespace(latent_dist=types.SimpleNamespace(mode=lambda: latents))


class Tokenizer:
    """Tokens of a caption: its length, as the caption itself is compared."""

    model_max_length = 77

    def __init__(self, *, refused):
        self._refused = refused

    def __call__(self, text, **_):
        import torch

        assert not self._refused, "the trainer tokenizes again"
        ids = torch.full((1, 77), len(text))
        return types.SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids))


def model_of(config, *, text):
    """Everything that a data loader asks of a model."""
    model = MagicMock()
    model.vae, model.text_encoder = Vae(), Refused()
    model.text_encoder_1 = model.text_encoder_2 = model.text_encoder_3 = Refused()
    for name in ("tokenizer", "tokenizer_1", "tokenizer_2", "tokenizer_3"):
        setattr(model, name, Tokenizer(refused=text))
    for name in ("", "_1", "_2", "_3"):
        setattr(model, f"add_text_encoder{name}_embeddings_to_prompt", lambda prompt: prompt)
    model.autocast_context = model.vae_autocast_context = model.text_encoder_2_autocast_context = nullcontext()
    model.train_dtype = model.vae_train_dtype = model.text_encoder_2_train_dtype = config.train_dtype
    model.text_encoder_3_train_dtype = config.train_dtype
    if not config.model_type.has_mask_input():  # else it loads the VAE for blank images
        model.materialize_only = Refused()
    return model


def main():
    trainer, mgds, out, served_path, settings = sys.argv[1:]
    settings = json.loads(settings)
    import torch

    install(trainer, mgds)
    from modules.util.config.TrainConfig import TrainConfig
    from modules.util.TrainProgress import TrainProgress

    config = TrainConfig.default_values().from_dict(
        {
            "__version": 11,
            "concept_file_name": f"{out}/concepts.json",
            "cache_dir": f"{out}/cache",
            "clear_cache_before_training": False,
            "train_device": "cpu",
            "temp_device": "cpu",
            "dataloader_threads": 1,
            **settings["config"],
        }
    )
    for part in (config.text_encoder, config.text_encoder_2, config.text_encoder_3):
        part.train = not settings["text"]
    module, name = settings["loader"]
    loader_class = getattr(importlib.import_module(f"modules.dataLoader.{module}"), name)
    setup = MagicMock()
    setup.prepare_text_caching = Refused()
    model = model_of(config, text=settings["text"])
    loader = loader_class(torch.device("cpu"), torch.device("cpu"), config, model, setup, TrainProgress())
    served, batches, lengths = {}, [], []
    for epoch in range(settings["epochs"]):
        loader.get_data_set().start_next_epoch()
        lengths.append(loader.get_data_set().approximate_length())
        batches.append(0)
        for batch in loader.get_data_loader():
            batches[-1] += 1
            for row, path in enumerate(batch["image_path"]):
                for key, values in batch.items():
                    served[f"{epoch}/{path}@{key}"] = _values(values, row)
    np.savez(served_path, **served)
    sys.stdout.write("\n" + json.dumps({"batches": batches, "lengths": lengths}) + "\n")


def _values(values, row):
    import torch

    if isinstance(values, torch.Tensor):
        return values[row].float().numpy()
    if isinstance(values[0], torch.Tensor):  # a tuple of numbers, collated one by one
        return np.array([value[row].item() for value in values])
    return np.array(values[row])


if __name__ == "__main__":
    main()
