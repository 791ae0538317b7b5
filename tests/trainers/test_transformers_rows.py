"""The Trainer of transformers on token views: steps and epochs exact, map-style and as a stream, and packed rows."""

import math

import pytest
from accelerate.data_loader import BatchSamplerShard
from tiny_tokens import LENGTH, Account, arguments, seen_llama
from torch.utils.data import BatchSampler, RandomSampler
from transformers import Trainer


def train(folder, data, collator, *, model=None, resume=None, **more):
    account = Account()
    model = model or seen_llama()
    trainer = Trainer(
        model, arguments(folder, **more), train_dataset=data, data_collator=collator, callbacks=[account]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, account


def test_a_stream_with_a_length(fifty, tmp_path):
    view = fifty.rows(pad=LENGTH)
    loader = view.loader(batch_size=4)
    trainer, account = train(tmp_path, loader.iterable(rows=True), view.collator(), num_train_epochs=2)
    steps = loader.steps(2)
    assert (trainer.state.global_step, trainer.state.max_steps, trainer.state.num_train_epochs) == (steps, steps, 2)
    assert account.epochs == pytest.approx([loader.epoch_at(step) for step in range(1, steps + 1)])
    expected = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        expected += [batch["input_ids"].tolist() for batch in loader]
    assert trainer.model.batches == expected


def test_a_stream_goes_on_where_a_checkpoint_was_made(fifty, tmp_path):
    view = fifty.rows(pad=LENGTH)
    words = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 17}
    whole, _ = train(tmp_path, view.loader(batch_size=4).iterable(rows=True), view.collator(), **words)
    resumed, account = train(
        tmp_path,
        view.loader(batch_size=4).iterable(rows=True),
        view.collator(),
        resume=str(tmp_path / "checkpoint-17"),
        **words,
    )
    assert resumed.state.global_step == whole.state.global_step == 26
    assert resumed.model.batches == whole.model.batches[17:]
    assert account.epochs[-1] == 2


def test_steps_on_several_ranks_are_those_of_accelerate(fifty):
    view = fifty.rows(pad=LENGTH)
    for drop_last in (False, True):
        for batch_size in (1, 3, 4, 7):
            sampler = BatchSampler(RandomSampler(range(len(view))), batch_size, drop_last)
            for world_size in (1, 2, 3):
                shard = BatchSamplerShard(sampler, num_processes=world_size, process_index=0)
                words = {"batch_size": batch_size, "world_size": world_size, "drop_last": drop_last}
                assert view.steps(1, **words) == len(shard)
                assert view.steps(2.5, grad_accum=3, **words) == math.ceil(2.5 * max(-(-len(shard) // 3), 1))
