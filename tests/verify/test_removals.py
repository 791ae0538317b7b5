import json

from small_tokens import build, opened, write_texts

from latentcache.store.layout import CacheLayout
from latentcache.verify.findings import Finding
from latentcache.verify.removals import Removal, damaged_shards, write_log


def test_shards_are_damaged_where_a_finding_lies_in_them(tmp_path):
    build(write_texts(tmp_path / "a.jsonl", ["one"]), tmp_path / "cache")
    layout, (generation, _) = CacheLayout(tmp_path / "cache"), opened(tmp_path / "cache")
    (mine,) = generation.shards
    other = layout.shards / "0123456789abcdef"
    other.mkdir()
    found = [Finding(category="corrupt", reason="pages", file=f"shards/{name}/data.mdb") for name in (mine, "gone")]
    assert damaged_shards(layout, generation, found) == (mine,)
    assert damaged_shards(layout, generation, found, also={other.name}) == (mine, other.name)
    assert damaged_shards(layout, generation, []) == ()


def test_the_log_has_a_line_for_each_entry(tmp_path):
    layout = CacheLayout(tmp_path)
    assert write_log(layout, 3, []) == ""
    removal = Removal(row=0, path="a:1", key="00", reason="payload", num_bytes=7)
    (line,) = (tmp_path / write_log(layout, 3, [removal])).read_text().splitlines()
    assert json.loads(line) == {"key": "00", "path": "a:1", "reason": "payload", "bytes": 7, "generation": 3}
