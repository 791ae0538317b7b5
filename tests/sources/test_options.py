import pytest

from latentcache.errors import UsageError
from latentcache.sources.options import Part


def test_parsing():
    assert Part.parse("3/4") == Part(index=3, of=4)
    assert str(Part.parse("03/04")) == "3/4"
    for words in ("4/4", "1/0", "-1/4", "1", "1/4/2", "a/b", ""):
        with pytest.raises(UsageError) as caught:
            Part.parse(words)
        assert "0/4" in caught.value.fix
