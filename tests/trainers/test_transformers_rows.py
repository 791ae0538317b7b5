"""The Trainer of transformers on token views: steps and epochs exact, map-style and as a stream, and packed rows."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from tiny_tokens import LENGTH, Account, arguments, seen_llama, tiny_llama
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import Trainer


def train(folder, data, collator, *, model=None, resume=None, **more):
    account = Account()
    model = model or seen_llama()
    trainer = Trainer(
        model, arguments(folder, **more), train_dataset=data, data_collator=collator, callbacks=[account]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, account


def test_a_view_as_a_data_set(fifty, tmp_path):
    view = fifty.rows(pad=LENGTH)
    trainer, account = train(tmp_path, view, view.collator(), num_train_epochs=2, gradient_accumulation_steps=3)
    steps = view.steps(2, batch_size=4, grad_accum=3)
    assert (len(view), trainer.state.global_step, trainer.state.max_steps) == (50, steps, steps)
    assert account.epochs[-1] == 2
    rows = [tuple(row) for batch in trainer.model.batches for row in batch]
    assert len(rows) == 100
    assert len(set(rows)) == 50


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


def test_packed_rows_train_as_their_documents_alone(fifty, tmp_path):
    """The logits of every document in a packed row are those it has alone; in the plain form they would not be."""
    view, model = fifty.rows(pack=LENGTH), tiny_llama().eval()
    batch = view.batch(range(4))
    alone = fifty.rows(pad=LENGTH)
    with torch.no_grad():
        good = model(**view.collator("transformers")(view.__getitems__(range(4)))).logits
        mixed = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                      position_ids=batch["position_ids"]).logits  # fmt: skip
        flat = model(**view.collator("flat")(view.__getitems__(range(4)))).logits.reshape(good.shape)
        differ = 0
        (plan,) = view.row_plans
        for row in range(4):
            column = 0
            for piece in plan.pieces(row):
                count = int(plan.length[piece])
                ids = alone.batch([int(plan.document[piece])])["input_ids"][:, :count]
                expected = model(input_ids=ids).logits[0]
                part = slice(column, column + count)
                assert torch.allclose(good[row, part], expected, atol=1e-5)
                assert torch.allclose(flat[row, part], expected, atol=1e-5)
                differ += not torch.allclose(mixed[row, part], expected, atol=1e-3)
                column += count
    assert differ > 0


def test_a_plain_dataloader_takes_the_batch_as_it_is(fifty):
    view = fifty.rows(pad=LENGTH)
    loader = DataLoader(view, batch_size=4, shuffle=True, collate_fn=view.collator())
    assert len(loader) == 13
    model = tiny_llama()
    for batch in loader:
        loss = model(**batch).loss
    assert torch.isfinite(loss)
