import pytest

from latentcache.errors import UsageError
from latentcache.sources.options import Part, SourceOptions
from latentcache.sources.scan import scan


def test_parsing():
    assert Part.parse("3/4") == Part(index=3, of=4)
    assert str(Part.parse("03/04")) == "3/4"
    for words in ("4/4", "1/0", "-1/4", "1", "1/4/2", "a/b", ""):
        with pytest.raises(UsageError) as caught:
            Part.parse(words)
        assert "0/4" in caught.value.fix


@pytest.mark.parametrize("kind", ["records", "images"])
def test_parts_cover_all_samples(tmp_path, kind):
    if kind == "records":
        lines = "".join(f'{{"text": "{number % 20}"}}\n' for number in range(40))
        (tmp_path / "a.jsonl").write_text(lines + "{broken\n")
    else:
        for number in range(40):
            (tmp_path / f"{number}.jpg").touch()
            (tmp_path / f"{number}.txt").write_text(str(number))
        (tmp_path / "x.jpg").symlink_to("nowhere.jpg")
    whole = scan(tmp_path)
    parts = [scan(tmp_path, SourceOptions(part=Part(index=index, of=3))) for index in range(3)]
    assert sorted(name for part in parts for name in part.samples.names) == sorted(whole.samples.names)
    assert [len(part.rejected) for part in parts] == [1, 1, 1]
    if kind == "images":
        assert all(len(part.samples.files) == 2 * len(part.samples) for part in parts)
        assert [text for part in parts for text in part.samples.inputs["caption"].text].count("7") == 1
