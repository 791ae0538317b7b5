"""The Trainer of transformers on token rows: exact steps and epochs."""

import pytest
from tiny_tokens import LENGTH, Account, arguments, seen_llama
from transformers import Trainer


def test_steps_and_epochs_are_exact(fifty, tmp_path):
    loader = fifty.rows(pad=LENGTH).loader(batch_size=4)
    account = Account()
    trainer = Trainer(seen_llama(), arguments(tmp_path, num_train_epochs=2), callbacks=[account])
    trainer.get_train_dataloader = lambda: loader
    trainer.train()
    steps = loader.steps(2)
    assert (trainer.state.global_step, trainer.state.max_steps, trainer.state.num_train_epochs) == (steps, steps, 2)
    assert account.epochs == pytest.approx([step / len(loader) for step in range(1, steps + 1)])
    expected = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        expected += [batch["input_ids"].tolist() for batch in loader]
    assert trainer.model.batches == expected
