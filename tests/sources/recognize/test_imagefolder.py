"""Metadata tables in folders, read by the rules of the Hugging Face image folder builder."""

import pytest
from made_folders import put

from latentcache.errors import TableError
from latentcache.sources.scan import scan


def rows(found):
    return list(zip(found.samples.names, found.samples.inputs["caption"].text, strict=True))


def test_a_parquet_table(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    put(tmp_path, {"sub/a.jpg": "x", "sub/b.jpg": "x"})
    table = pa.table({"file_name": ["b.jpg", "a.jpg"], "text": ["b", None]})
    pq.write_table(table, tmp_path / "sub/metadata.parquet")
    found = scan(tmp_path)
    assert rows(found) == [("sub/b.jpg", "b")]
    assert [(item.name, item.reason) for item in found.rejected] == [("sub/a.jpg", "table-row")]
    (tmp_path / "sub/metadata.parquet").write_text("no parquet")
    with pytest.raises(TableError, match="it is no parquet file"):
        scan(tmp_path)


def test_two_tables_in_one_folder(tmp_path):
    put(tmp_path, {"metadata.csv": "", "metadata.jsonl": ""})
    with pytest.raises(TableError) as caught:
        scan(tmp_path)
    assert caught.value.what == "a data folder has two tables: metadata.csv and metadata.jsonl"
    off = tmp_path / "metadata.jsonl"
    assert caught.value.fix == f"rename one, e.g. `mv {off} {off}.off`"
