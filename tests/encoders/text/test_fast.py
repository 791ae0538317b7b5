import functools
import json
import sys

import numpy as np
import pytest
from described import opened_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import CHATML_TOKENS, LLAMA3_SPLIT, LLAMA3_TOKENS, QWEN2_SPLIT, byte_level, save, unigram
from tokenizers import AddedToken, normalizers

from latentcache.encoders.text import fast as fast_module
from latentcache.encoders.text.fast import TiktokenEngine, UnfitTokenizerError, fast_tokenizer
from latentcache.encoders.text.tokenizer import ReferenceEngine
from latentcache.sources.records import text_record

KINDS = {
    "gpt2": lambda: byte_level(),
    "llama3": lambda: byte_level(LLAMA3_SPLIT, special=LLAMA3_TOKENS, first=False, ignore_merges=True),
    "qwen2": lambda: byte_level(QWEN2_SPLIT, special=CHATML_TOKENS, first=False, nfc=True),
}
ALPHABET = st.one_of(
    st.characters(exclude_categories=("Cs",)),
    st.sampled_from(" \n\t\r'sStT12 \u00a0\u0301\u3000<|>\u200d\U0001f600"),
)
TEXTS = st.one_of(
    st.text(ALPHABET, max_size=60),
    st.lists(st.sampled_from([" ", "  ", "\n", "'s", "'LL", "word", "123456", *CHATML_TOKENS, *LLAMA3_TOKENS])).map(
        "".join
    ),
)


def ids_of(engine, text):
    ((ids, _),) = engine.encode([text], [None])
    return ids.tolist()


@functools.cache
def engines(kind):
    tokenizer = KINDS[kind]().to_str()
    return ReferenceEngine(tokenizer, "uint16"), TiktokenEngine(json.loads(tokenizer), "uint16")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, data=st.data())
def test_ids_and_spans_equal_the_reference(kind, text, data):
    reference, fast = engines(kind)
    if not fast.takes(text):
        assert kind == "qwen2"
        return
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
    spans = list(zip(places[::2], places[1::2], strict=False))
    ((ids, runs),) = fast.encode([text], [spans])
    ((wanted, wanted_runs),) = reference.encode([text], [spans])
    assert ids.tolist() == wanted.tolist()
    assert runs.tolist() == wanted_runs.tolist()
    assert ids_of(fast, text) == wanted.tolist()
    assert ids.dtype == np.uint16


def test_unnormalized_text_uses_the_reference():
    _, fast = engines("qwen2")
    assert fast.takes("é")
    assert not fast.takes("e\u0301")


@pytest.mark.parametrize("blank", [" ", "\n", " \n"])
def test_long_whitespace_uses_the_reference(blank):
    reference, fast = engines("gpt2")
    assert not fast.takes("a" * 70_000 + blank * 1_000_000 + "b")
    long = "a" + blank * 49_000 + "b"
    assert fast.takes(long)
    assert ids_of(fast, long) == ids_of(reference, long)


def json_of(tokenizer):
    return json.loads(tokenizer.to_str())


def edited(change, **options):
    tokenizer = json_of(byte_level(**options))
    change(tokenizer)
    return tokenizer


def with_added(*tokens, **flags):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(token, **flags) for token in tokens])
    return json_of(tokenizer)


def with_normalizer(normalizer):
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    return json_of(tokenizer)


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (lambda: json_of(unigram()), "Unigram"),
        (lambda: edited(lambda t: t["model"]["merges"].reverse()), "no earlier merge|apart|other pairs"),
        (lambda: edited(lambda t: t["pre_tokenizer"].update(add_prefix_space=True)), "splitting"),
        (lambda: json_of(byte_level(r"\p{N}+|\P{N}+")), "splitting"),
        (lambda: with_normalizer(normalizers.Lowercase()), "Lowercase"),
        (lambda: with_added("<a>", lstrip=True), "its neighbors"),
        (lambda: with_added("<a>", "<a>b"), "begins with"),
        (lambda: edited(lambda t: t["model"]["vocab"].pop("Ā")), "1 of 256"),
        (lambda: edited(lambda t: t["model"].update(dropout=0.1)), "dropout"),
        (lambda: edited(lambda t: t["model"]["vocab"].update(extra=5000), ignore_merges=True), "no merge"),
    ],
)
def test_unsupported_tokenizers_give_a_reason(tokenizer, words):
    with pytest.raises(UnfitTokenizerError, match=words):
        TiktokenEngine(tokenizer(), "uint16")


def test_an_unreachable_token_is_found():
    """b and c merge first, so the pair (ab, c) is never used; tiktoken would merge a and bc."""
    tokenizer = json_of(byte_level(special=(), vocab_size=256))
    vocab = tokenizer["model"]["vocab"]
    for merged in ("bc", "ab", "abc"):
        vocab[merged] = len(vocab)
    tokenizer["model"]["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    with pytest.raises(UnfitTokenizerError, match="other pairs"):
        TiktokenEngine(tokenizer, "uint16")
    tokenizer["model"]["merges"] = [["a", "b"], ["b", "c"], ["ab", "c"]]
    reference = ReferenceEngine(json.dumps(tokenizer), "uint16")
    assert ids_of(TiktokenEngine(tokenizer, "uint16"), "abcb") == ids_of(reference, "abcb")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = save(byte_level(), tmp_path_factory.mktemp("bpe"), roles={"eos_token": "<|endoftext|>"})
    return opened_tokenizer(folder)


def test_equal_ids_for_every_character_enable_tiktoken(reference):
    checked = fast_tokenizer(reference, [text_record("a", 1, "hello <|endoftext|>")])
    (document,) = checked.tokenize([text_record("a", 1, "hello")])
    assert document.array[-1] == reference.recipe.eos_id


def test_a_difference_in_the_data_disables_tiktoken(reference, monkeypatch):
    monkeypatch.setattr(fast_module, "_RANGES", ())
    # This regex splits text with digits differently from the tokenizer.
    wrong = fast_module._GPT2.replace(r"\p{N}+", r"\p{N}")
    monkeypatch.setattr(fast_module, "_GPT2", wrong)
    monkeypatch.setattr(fast_module, "KNOWN_SPLITS", {wrong})
    assert not isinstance(fast_tokenizer(reference, [text_record("a", 1, "words only")]), str)
    words = " ".join(str(n) for n in range(100))
    checked = fast_tokenizer(reference, [text_record("a", 1, "fine"), text_record("b.jsonl", 7, words)])
    assert "b.jsonl:7" in checked


def test_without_tiktoken_the_reference_is_used(reference, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert "latentcache[tokens]" in fast_tokenizer(reference, [])


def test_records_over_a_megabyte_skip_the_reference(reference, monkeypatch):
    """The reference would use hundreds of bytes per character."""
    lengths = []
    monkeypatch.setattr(fast_module, "_RANGES", ())
    monkeypatch.setattr(fast_module, "_is_same", lambda one, other: lengths.append(len(one.array)) or True)
    fast_tokenizer(reference, [text_record("a", 1, "x" * 2_000_000), text_record("a", 2, "a b c")])
    assert max(lengths) < 10
