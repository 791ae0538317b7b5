"""The pages about tokens, run as programs."""

import pytest
from test_tokens_trl import a_tokenizer
from tiny_tokens import build_fifty, tiny_llama


@pytest.fixture
def texts(tmp_path, monkeypatch):
    build_fifty(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_tokens(texts, run_howto):
    names = run_howto("train-on-tokens")
    assert names["streaming"].state.global_step == names["packed"].loader(batch_size=4).steps(2)
    assert names["padded"].tokens == names["cache"].tokens


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_trl(texts, run_howto):
    names = run_howto("train-with-trl", model=tiny_llama(), tokenizer=a_tokenizer())
    assert names["trainer"].state.epoch == 2
