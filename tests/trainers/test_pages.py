from pathlib import Path

import pytest
from datasets import load_from_disk
from test_trl import a_tokenizer
from tiny_tokens import build_fifty, tiny_llama


@pytest.fixture
def texts(tmp_path, monkeypatch):
    build_fifty(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_tokens(texts, run_howto):
    names = run_howto("tokens")
    assert names["streaming"].state.global_step == names["packed"].loader(batch_size=4).steps(2)
    assert names["padded"].tokens == names["cache"].tokens


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_trl(texts, run_howto):
    names = run_howto("language-models", "TRL", consoles=True, model=tiny_llama(), tokenizer=a_tokenizer())
    assert names["trainer"].state.epoch == names["exported"].state.epoch == 2


def test_the_page_of_formats_without_labels(texts, run_howto):
    run_howto("language-models", "Megatron, nanotron and llm-foundry", consoles=True)
    assert sorted(path.name for path in Path("indexed").iterdir()) == [
        "latentcache.files", "latentcache.json", "train.bin", "train.idx", "validation.bin", "validation.idx",
    ]  # fmt: skip


@pytest.mark.parametrize("trainer", ["LLaMA-Factory", "Unsloth", "axolotl"])
def test_pages_of_trainers_that_are_not_installed(texts, run_howto, trainer):
    """The commands print the output of the page."""
    run_howto("language-models", trainer, consoles=True)
    assert load_from_disk("rows")["train"].column_names == ["input_ids", "attention_mask", "labels"]
