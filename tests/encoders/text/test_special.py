from hypothesis import given
from hypothesis import strategies as st

from latentcache.encoders.text.chat import MARK, SpecialTokens

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
