"""TRL's SFTTrainer on token views, and its padding-free collator compared with ours."""

import datasets
import pytest
import torch
from tiny_tokens import LENGTH, Account, a_tokenizer, seen_llama, sft_config
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def train(view, folder, form):
    index = datasets.Dataset.from_dict({"row": range(len(view))}).with_transform(view.transform)
    config = sft_config(folder, num_train_epochs=2, remove_unused_columns=False)
    account = Account()
    given = {"train_dataset": index, "data_collator": view.collator(form), "processing_class": a_tokenizer()}
    trainer = SFTTrainer(seen_llama(), args=config, callbacks=[account], **given)
    trainer.train()
    return trainer, account


@pytest.mark.parametrize(("kind", "form"), [("pad", "plain"), ("pack", "flat")])
def test_steps_and_epochs_are_exact(fifty, tmp_path, kind, form):
    view = fifty.rows(**{kind: LENGTH})
    trainer, account = train(view, tmp_path, form)
    steps = view.loader(batch_size=4).steps(2)
    assert (trainer.state.global_step, trainer.state.max_steps) == (steps, steps)
    assert account.epochs[-1] == 2
    seen = {tuple(row) for batch in trainer.model.batches for row in torch.tensor(batch).reshape(-1, LENGTH).tolist()}
    assert seen == {tuple(row) for row in view.batch(range(len(view)))["input_ids"].tolist()}


def test_padding_free_rows_equal_trl(fifty):
    """Without padding all names, types and values are equal."""
    view = fifty.rows(chunk=LENGTH, cross_document=False, last_chunk="drop")
    ours = view.collator("flat")(view.__getitems__([0, 1, 2]))
    batch, part = view.batch([0, 1, 2]), view.parts[0].plan
    rows = [{name: batch[name][row].tolist() for name in ("input_ids", "labels")} for row in range(3)]
    for number, row in enumerate(rows):
        row["seq_lengths"] = [int(part.length[piece]) for piece in part.pieces(number)]
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    assert ours.pop("use_cache") is False
    assert set(ours) == set(collator)
    for name, value in collator.items():
        if isinstance(value, torch.Tensor):
            assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape)
            assert torch.equal(ours[name], value)
        else:
            assert ours[name] == value
