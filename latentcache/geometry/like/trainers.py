"""The trainers that ``--like`` and ``--for`` know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from latentcache.geometry.like.aitoolkit import AiToolkit, is_job
from latentcache.geometry.like.kohya import KohyaTrainer
from latentcache.geometry.like.musubi import Musubi, is_musubi
from latentcache.geometry.like.onetrainer import OneTrainer
from latentcache.geometry.like.simpletuner import SimpleTuner
from latentcache.geometry.like.trainer import Trainer, read_file

#: By name.
TRAINERS: Mapping[str, Trainer] = {
    trainer.name: trainer for trainer in (KohyaTrainer(), OneTrainer(), SimpleTuner(), Musubi(), AiToolkit())
}


def trainer_of(path: Path, like: str | None) -> Trainer:
    """The trainer whose settings file this is: the named one, else by the file; raises UsageError."""
    if like is not None and like in TRAINERS:
        return TRAINERS[like]
    value = read_file(path)
    if is_job(value):
        return TRAINERS["ai-toolkit"]
    if isinstance(value, dict) and is_musubi(value):
        return TRAINERS["musubi"]
    if path.suffix == ".toml":
        return TRAINERS["kohya"]
    names_backends = isinstance(value, dict) and value.keys() & {"data_backend_config", "--data_backend_config"}
    return TRAINERS["simpletuner" if isinstance(value, list) or names_backends else "onetrainer"]
