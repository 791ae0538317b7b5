import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import byte_level, unigram
from tokenizers import Tokenizer

from latentcache.encoders.text.special import CLOSE, MARK, OPEN, SpecialTokens, guarded

ADDED = [
    {"id": 7, "content": "<|end|>", "special": True},
    {"id": 8, "content": "<|end|>>", "special": True},
    {"id": 9, "content": "<tool>", "special": False},
]
CONTROL = SpecialTokens({"added_tokens": ADDED})


def test_special_tokens_match_longest_first():
    assert CONTROL.ids == {"<|end|>": 7, "<|end|>>": 8}
    assert CONTROL.count("<|end|> <|end|>> <tool> <|end|") == 2
    assert SpecialTokens({"added_tokens": []}).count("anything") == 0


def test_only_template_text_is_renamed():
    written = f"<|end|>{CONTROL.mark('a<|end|>b')}<|end|>>"
    assert CONTROL.rewrite(written, [])[0] == f"{OPEN}7{CLOSE}a<|end|>b{OPEN}8{CLOSE}"


def test_split_marks_are_removed():
    assert CONTROL.rewrite(f"a{MARK}b{MARK}c", [])[0] == "abc"


@given(
    st.lists(st.sampled_from(["<|end|>", "a", "<|end|>>", "é", f"{MARK}<|end|>{MARK}", " "]), max_size=12), st.data()
)
def test_positions_move_with_the_text(pieces, data):
    text = "".join(pieces)
    borders = [len("".join(pieces[:n])) for n in range(len(pieces) + 1)]
    places = sorted(data.draw(st.lists(st.sampled_from(borders), max_size=4)))
    rewritten, moved = CONTROL.rewrite(text, places)
    assert rewritten == CONTROL.rewrite(text, [])[0]
    for position, new in zip(places, moved, strict=True):
        assert rewritten[:new] == CONTROL.rewrite(text[:position], [])[0]


@pytest.mark.parametrize("make", [byte_level, unigram], ids=["bpe", "unigram"])
def test_names_keep_their_ids_and_special_token_text_are_text(make):
    original = json.loads(make().to_str())
    control = SpecialTokens(original)
    tokenizer = Tokenizer.from_str(json.dumps(guarded(original, control.ids)))
    for name, number in control.ids.items():
        assert tokenizer.encode(f"{OPEN}{number}{CLOSE}", add_special_tokens=False).ids == [number]
        text = tokenizer.encode(f"a{name}b", add_special_tokens=False).ids
        assert not set(text) & (set(control.ids.values()) - {control.ids.get("<unk>")})
