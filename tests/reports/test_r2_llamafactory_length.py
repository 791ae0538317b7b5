"""LLaMA-Factory: epochs are wrong in streaming mode, because the length is unknown.

Here ``len`` is exact before anything is read, on every rank and for every policy, and the real Trainer counts the
epochs of a stream of rows right. The tests fail if the length is estimated as entries divided by batch size, because
no bucket here divides evenly.
"""

import os

import pytest
import small_tokens
from small_cache import of_three_sizes
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from latentcache import open_cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = pytest.mark.filterwarnings("ignore:bucket .* in an epoch to fill a batch")


def test_lengths_are_exact_not_estimated(tmp_path):
    """Thirteen entries in buckets of five, four and four: batches of 3 are not 5 steps, each bucket rounds up."""
    cache = open_cache(of_three_sizes(tmp_path, 13))
    assert -(-13 // 3) == 5
    assert len(cache.loader(batch_size=3)) == 6
    assert len(cache.loader(batch_size=3, remainder="drop")) == 3


def test_the_trainer_counts_the_epochs_of_a_stream(tmp_path):
    """Fifty rows in batches of four: thirteen steps."""
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "text {number}"}}\n' for number in range(50)))
    small_tokens.build(tmp_path / "texts.jsonl", tmp_path / "cache")
    loader = open_cache(tmp_path / "cache").rows(pad=16).loader(batch_size=4)
    sizes = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=1))
    settings = {"output_dir": str(tmp_path), "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(**settings, use_cpu=True, per_device_train_batch_size=4, max_steps=20)
    trainer = Trainer(model, arguments)
    trainer.get_train_dataloader = lambda: DataLoader(loader, batch_size=None)
    trainer.train()
    assert trainer.state.num_train_epochs == 2
    assert trainer.state.epoch == pytest.approx(20 / 13)
