"""The trainers that ``--like`` and ``--for`` know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from latentcache.errors import UsageError
from latentcache.geometry.like.kohya import KohyaTrainer
from latentcache.geometry.like.onetrainer import OneTrainer
from latentcache.geometry.like.simpletuner import SimpleTuner
from latentcache.geometry.like.trainer import Trainer

#: By name.
TRAINERS: Mapping[str, Trainer] = {trainer.name: trainer for trainer in (KohyaTrainer(), OneTrainer(), SimpleTuner())}


def trainer_of(path: Path, like: str | None) -> Trainer:
    """The trainer whose settings file this is: the named one, else by the file; raises UsageError."""
    if like is not None and like in TRAINERS:
        return TRAINERS[like]
    for trainer in TRAINERS.values():
        if trainer.reads(path):
            return trainer
    raise UsageError(
        f"{path}: is no settings file of a trainer that is known",
        where=str(path),
        fix=f"--like {'|'.join(TRAINERS)} says whose file it is",
    )
