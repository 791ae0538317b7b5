"""LLaMA-Factory: epochs of a token stream are wrong, because its length is unknown.

The real Trainer gives the wrong number for a stream without a length, and the right one for the same batches with
a length. The test fails if the stream has no length.
"""

import os
import sys

import pytest
import small_tokens
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from latentcache import open_cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class WithoutLength(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """Fifty rows in batches of four: thirteen steps."""
    folder = tmp_path_factory.mktemp("stream")
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "text {number}"}}\n' for number in range(50)))
    small_tokens.build(folder / "texts.jsonl", folder / "cache")
    return open_cache(folder / "cache").rows(pad=16).loader(batch_size=4)


def train(batches, folder):
    """Return the state of a Trainer after twenty steps."""
    sizes = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=1))
    settings = {"output_dir": str(folder), "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(**settings, use_cpu=True, per_device_train_batch_size=4, max_steps=20)
    trainer = Trainer(model, arguments)
    trainer.get_train_dataloader = lambda: DataLoader(batches, batch_size=None)
    trainer.train()
    return trainer.state


def test_a_stream_without_a_length_counts_wrong(loader, tmp_path):
    state = train(WithoutLength(loader), tmp_path)
    assert state.num_train_epochs == sys.maxsize
    assert state.epoch != pytest.approx(20 / 13)


def test_the_same_batches_with_their_length_count_right(loader, tmp_path):
    state = train(loader.iterable(), tmp_path)
    assert state.num_train_epochs == 2
    assert state.epoch == pytest.approx(20 / 13) == pytest.approx(loader.epoch_at(20))
