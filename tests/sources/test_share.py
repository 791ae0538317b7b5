import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.plan.split import in_validation
from latentcache.sources.corpus import RecordOptions, scan_records
from latentcache.sources.records import text_record
from latentcache.sources.share import Share


@given(st.binary(min_size=16, max_size=16), st.integers(1, 9999))
def test_a_record_is_in_exactly_one_share(content, of):
    index = int.from_bytes(content[8:], "little") % of
    assert Share(index=index, of=of).holds(content)
    assert not Share(index=(index + 1) % of, of=of).holds(content) or of == 1


@pytest.mark.parametrize("of", [2, 3, 7])
def test_shares_are_even(of):
    contents = [text_record("a", 1, str(number)).content for number in range(3000)]
    counts = [sum(map(Share(index=index, of=of).holds, contents)) for index in range(of)]
    assert sum(counts) == 3000
    assert max(counts) - min(counts) < 6 * (3000 / of) ** 0.5


def test_a_share_says_nothing_of_the_side_of_validation(tmp_path):
    """Else a node would hold all of it, or nothing: both are told by content."""
    import numpy as np

    contents = [text_record("a", 1, str(number)).content for number in range(4000)]
    held = in_validation(np.frombuffer(b"".join(contents), dtype=np.uint8).reshape(-1, 16), 0.25)
    mine = [Share(index=0, of=4).holds(content) for content in contents]
    both = sum(one and other for one, other in zip(held.tolist(), mine, strict=True))
    assert 170 < both < 330


def test_words():
    assert Share.parse("3/4") == Share(index=3, of=4)
    assert str(Share.parse("03/04")) == "3/4"
    for words in ("4/4", "1/0", "-1/4", "1", "1/4/2", "a/b", ""):
        with pytest.raises(UsageError) as caught:
            Share.parse(words)
        assert "0/4" in caught.value.fix


def test_a_scan_gives_the_records_of_its_share_and_every_refusal(tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(40)) + "{broken\n")
    whole = list(scan_records(data))
    scans = [scan_records(data, RecordOptions(share=Share(index=index, of=3))) for index in range(3)]
    assert sorted((r.line for scan in scans for r in scan), key=int) == [record.line for record in whole]
    assert [len(scan.refused) for scan in scans] == [1, 1, 1]
    assert {scan.sources[0].content for scan in scans} == {scans[0].sources[0].content}
    assert [next(scan.firsts()).line for scan in scans] == [1, 1, 1]
    assert list(scans[0].but(["a.jsonl"])) == []
    assert [r.line for r in scans[1].but([])] == [r.line for r in scans[1]]
