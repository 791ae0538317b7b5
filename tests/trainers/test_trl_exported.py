"""TRL's SFTTrainer on exported folders, without this package during training."""

import ast
import re

import pytest
import torch
from datasets import load_from_disk
from tiny_tokens import LENGTH, Account, a_tokenizer, seen_llama, sft_config
from trl import SFTConfig, SFTTrainer

from latentcache.export.settings import ExportSettings
from latentcache.export.tokens import TokenExport

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def a_trainer(fifty, kind, folder, **more):
    view = fifty.rows(**{kind: LENGTH})
    cache, out = fifty.snapshots[0].paths.root, folder / kind
    settings = ExportSettings(cache=cache, out=out, trainer="trl", **{kind: LENGTH})
    TokenExport(settings).run()
    config = sft_config(folder / "out", padding_free=kind == "pack", max_length=None, **more)
    account = Account()
    rows = load_from_disk(str(out))["train"]
    trainer = SFTTrainer(
        seen_llama(), args=config, train_dataset=rows, processing_class=a_tokenizer(), callbacks=[account]
    )
    return trainer, account, view


@pytest.mark.parametrize("kind", ["pad", "pack"])
def test_rows_give_the_loss_of_their_documents(fifty, tmp_path, kind):
    """Cross-document attention or attended padding would change the loss."""
    trainer, account, view = a_trainer(fifty, kind, tmp_path, num_train_epochs=2)
    rows = list(range(len(view)))
    batch = trainer.data_collator([trainer.train_dataset[row] for row in rows])
    trainer.model.eval()
    with torch.no_grad():
        together = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
        losses, tokens = [], 0
        for row in fifty.rows(pad=LENGTH):
            ids = row["input_ids"][row["attention_mask"] == 1]
            logits = trainer.model(input_ids=ids[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            tokens += len(ids) - 1
    assert float(together) == pytest.approx(float(sum(losses)) / tokens, rel=1e-5)

    trainer.model.batches.clear()
    trainer.train()
    steps = view.loader(batch_size=4).steps(2)
    assert (trainer.state.global_step, trainer.state.max_steps) == (steps, steps)
    assert account.epochs == pytest.approx([2 * step / steps for step in range(1, steps + 1)])
    seen = [tuple(row) for batch in trainer.model.batches for row in torch.tensor(batch).reshape(-1, LENGTH).tolist()]
    assert sorted(seen) == sorted(2 * [tuple(row) for row in view.batch(rows)["input_ids"].tolist()])


def as_printed(run, fifty, folder, **changes):
    """Create a trainer with the settings that ``latentcache export --pack --for trl`` prints."""
    out = folder / "packed"
    done = run("export", fifty.snapshots[0].paths.root, out, "--pack", LENGTH, "--for", "trl")
    assert done.status == 0, done.err
    (words,) = re.findall(r"SFTConfig\((.*)\)$", done.out.strip())
    printed = ast.parse(f"f({words})", mode="eval").body.keywords
    settings = {one.arg: ast.literal_eval(one.value) for one in printed} | changes
    config = SFTConfig(output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[], **settings)
    rows = load_from_disk(str(out))["train"]
    return SFTTrainer(seen_llama(), args=config, train_dataset=rows, processing_class=a_tokenizer())


def changed_by_the_first_document(trainer):
    """Return (L,) bool: tokens whose logits change with the first document of the row."""
    row = next(row for row in trainer.train_dataset if len(row["seq_lengths"]) > 2)
    first = row["seq_lengths"][0]
    other = {**row, "input_ids": [(one + 1) % 256 for one in row["input_ids"][:first]] + row["input_ids"][first:]}
    model, logits = trainer.model.eval(), []
    with torch.no_grad():
        for one in (row, other):
            batch = trainer._prepare_inputs(trainer.data_collator([one]))
            logits.append(model(**{**batch, "use_cache": False}).logits[0])
    changed = (logits[0] != logits[1]).any(dim=1)
    assert changed[:first].any()
    return changed[first:]


def test_with_the_printed_settings_documents_are_separate(run, fifty, tmp_path):
    assert not changed_by_the_first_document(as_printed(run, fifty, tmp_path)).any()


def test_without_padding_free_documents_attend_to_each_other(run, fifty, tmp_path):
    assert changed_by_the_first_document(as_printed(run, fifty, tmp_path, padding_free=False)).any()
