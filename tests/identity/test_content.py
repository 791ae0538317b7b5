import pytest

from latentcache.identity.content import canonical_json, checksum, content_hash, json_hash


def test_the_hashes_are_the_published_ones():
    # xxHash's own values for the empty input with seed 0
    assert content_hash(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"") == 0x2D06800538D394C2


def test_the_spelling_is_pinned():
    value = {"b": [1, None, True], "a": {"é": "x y"}, "c": (2,)}
    assert canonical_json(value) == b'{"a":{"\\u00e9":"x y"},"b":[1,null,true],"c":[2]}'
    assert json_hash(value) == content_hash(canonical_json(value))


@pytest.mark.parametrize(
    "value", [1.0, [1, 2.5], {"a": {"b": 0.1}}, (float("nan"),), {"a": [{"b": [float("inf")]}]}, {1.5: "a"}]
)
def test_nested_floats_are_rejected(value):
    with pytest.raises(TypeError, match=r"float|1\.5"):
        canonical_json(value)


@pytest.mark.parametrize("value", [{1: "a"}, {None: 1}, {"a": {True: 1}}, [{b"a": 1}]])
def test_non_text_names_are_rejected(value):
    with pytest.raises(TypeError, match="must be text"):
        canonical_json(value)
