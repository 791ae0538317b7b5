"""Toy kinds that follow orders in their inputs: fixed entries from files, ragged blocks from text.

The first word of an input is its value. The others are orders: ``crash-prepare``, ``hang-encode``,
``fail-encode``, ``memory-prepare``, ``sleep-encode``, ``once-encode`` ...
"""

# ruff: noqa: RUF012, C901
from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import DeviceError, EncoderError, UnusableSampleError
from latentcache.fields.protocol import (
    Failure,
    FieldKind,
    FieldRecipe,
    FieldSpec,
    Group,
    Job,
    Made,
    Output,
    Prepared,
    Producer,
    ProducerContext,
    WorkSize,
)
from latentcache.identity.content import content_hash

SIDE = 8


class SquareRecipe(FieldRecipe):
    id_name = "square"
    spec = FieldSpec(dtype="float32", dims=("h", "w"), variants=2)


class WordRecipe(FieldRecipe):
    id_name = "word"
    spec = FieldSpec(dtype="uint16", dims=("tokens",), ragged=True, collate="pack")


class Squares(FieldKind):
    """One (8, 8) entry per variant of a file; content is known after reading."""

    name, kind, inputs, recipe = "squares", 201, ("image",), SquareRecipe
    producer = "tests.pipeline.workers.toy_kinds:ToyProducer"
    columns = {"first": ("<u4", ())}
    work = WorkSize(unit_cost=1 << 20, cost_bytes=4, batch_items=8)
    groups = (Group(label="8x8", shape=(SIDE, SIDE), dims=(1, SIDE, SIDE)),)


class Words(FieldKind):
    """A ragged row per text, packed in blocks; content is known before reading."""

    name, kind, inputs, packing, device, recipe = "words", 202, ("record",), "block", "cpu", WordRecipe
    producer = "tests.pipeline.workers.toy_kinds:ToyProducer"
    ragged_columns = {"marks": ("<u4", ())}
    work = WorkSize(unit_cost=1 << 20, unit_jobs=16, cost_bytes=64, worker_cost=1 << 12, batch_items=8)
    groups = (Group(label="", shape=(-1,)),)


class Lines(Words):
    """Ragged rows of jobs that are not prepared."""

    name, kind = "lines", 203
    producer = "tests.pipeline.workers.toy_kinds:LineProducer"


class ToyProducer(Producer):
    def __init__(self, producer: Mapping[str, Any], recipe: FieldRecipe, context: ProducerContext) -> None:
        super().__init__(producer, recipe, context)
        self.marks = Path(producer["marks"])
        self.dead = producer.get("dead", 1 << 30)
        """Items after which every encoder dies."""
        self.alive = self.dead + producer.get("trouble", 1 << 30)
        """Items after which they live again."""
        self.noise = {"devices": [context.device], "largest": 0.5}
        if producer.get("open") == "fail":
            raise EncoderError("the toy cannot be opened")
        if producer.get("open") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        others = self.log("open", context.device)
        if producer.get("open") == "one-device" and others:
            os.kill(os.getpid(), signal.SIGKILL)

    def log(self, stage: str, word: str) -> int:
        """Record a step in a file; return how often it was recorded before."""
        path = self.marks / f"{stage}-{word.replace('/', '_')}"
        with path.open("ab", buffering=0) as file:  # the position after an append is exact, whoever else writes
            file.write(b".")
            return file.tell() - 1

    def act(self, stage: str, words: Sequence[str]) -> Failure | None:
        before = self.log(stage, words[0])
        if stage == "encode" and self.dead <= self.log("any", "item") < self.alive:
            signal.raise_signal(signal.SIGSEGV)  # of this thread: through the process, it would go on
        for order in words[1:]:
            action, _, target = order.partition("-")
            if target != stage:
                continue
            if action == "crash" or (action == "once" and not before):
                signal.raise_signal(signal.SIGSEGV)  # of this thread: through the process, it would go on
            elif action == "stoponce" and not before:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif action == "hang" or (action == "hangonce" and not before):
                time.sleep(600)
            elif action == "print":
                for _ in range(100):
                    os.write(2, b"x" * 999_999 + b"\n")
            elif action == "sleep":
                time.sleep(0.05)
            elif action == "fail":
                return Failure(reason="bad-toy", detail=words[0])
            elif action == "unusable":
                raise UnusableSampleError("cannot be used", slug="truncated", fix="replace it")
            elif action == "memory":
                raise MemoryError
            elif action == "bug":
                raise ZeroDivisionError("a bug")
            elif action == "lostalways" or (action == "lost" and not before):
                raise DeviceError("the device failed")
        return None

    def prepare(self, job: Job, data: Mapping[str, bytes]) -> Sequence[Prepared] | Failure:
        words = data["image"].decode().split() if data else job.inputs["record"]["text"].split()
        failure = self.act("prepare", words)
        if failure is not None:
            return failure
        same = content_hash(words[0].encode()) if data else b""
        return [
            Prepared(output=output, value=words, same=same and flipped(same, output), num_bytes=64 * len(words[0]))
            for output in job.outputs
        ]

    def encode(self, batch: Sequence[Prepared]) -> Sequence[Made | Failure]:
        return [self.act("encode", item.value) or self.made(item) for item in batch]

    def made(self, one: Prepared) -> Made:
        return self.made_of(one.value[0].encode(), one.output.variant)

    def made_of(self, word: bytes, variant: int = 0) -> Made:
        if self.recipe.spec.ragged:
            array = np.frombuffer(word, dtype=np.uint8).astype(np.uint16)
            return Made(array=array, columns={"marks": np.arange(len(word) % 3, dtype=np.uint32)})
        values = np.frombuffer((word * SIDE * SIDE)[: SIDE * SIDE], dtype=np.uint8).astype(np.float32) + variant
        return Made(array=values.reshape(SIDE, SIDE), columns={"first": word[0]})


class LineProducer(ToyProducer):
    prepare = Producer.prepare

    def encode(self, batch: Sequence[Prepared]) -> list[Made | Failure]:
        words = [item.value.inputs["record"]["text"].split() for item in batch]
        self.log("make", str(len(words)))
        return [self.act("make", line) or self.made_of(line[0].encode()) for line in words]


def flipped(same: bytes, output: Output) -> bytes:
    return bytes([output.variant]) + same[1:]


def answer(number: int, device: str = "") -> dict[str, Any]:
    if number < 0:
        raise EncoderError("a negative number", fix="give another one")
    if number == 60:
        time.sleep(600)
    if number == 61:
        os.kill(os.getpid(), signal.SIGSTOP)
    if number > 99:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": number + 1, "device": device, "torch": "torch" in sys.modules}
