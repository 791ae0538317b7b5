import pyarrow
import pyarrow.parquet
import pytest
import xxhash
from datasets import Dataset, DatasetDict

from latentcache.errors import SourceError
from latentcache.sources.columnar import read_columnar
from latentcache.sources.corpus import scan_records
from latentcache.sources.record_files import RecordFile
from latentcache.sources.records import RecordLog

ROWS = [{"text": f"text {n}"} for n in range(2500)] + [{"text": None}]


def test_rows_of_parquet_stream_in_order(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=900)
    log = RecordLog()
    records = list(read_columnar(RecordFile(path=path, name="a.parquet", kind="parquet"), log))
    assert [r.text for r in records] == [row["text"] for row in ROWS[:-1]]
    assert [r.line for r in records] == list(range(1, 2501))
    assert [(item.line, item.field) for item in log.refused] == [(2501, "text")]
    assert log.sources[0].content == xxhash.xxh3_128_digest(path.read_bytes())


def test_conversations_of_parquet(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}]), tmp_path / "a.parquet")
    (record,) = scan_records(tmp_path)
    assert [m.content for m in record.messages] == ["a", "b"]


@pytest.mark.parametrize("split", [False, True])
def test_data_that_datasets_saved(tmp_path, split):
    data = Dataset.from_list(ROWS[:10])
    (DatasetDict({"train": data, "test": data}) if split else data).save_to_disk(str(tmp_path / "d"))
    scan = scan_records(tmp_path / "d")
    assert [r.text for r in scan] == [row["text"] for row in ROWS[:10]]
    assert [s.name for s in scan.sources] == [("train/" if split else "") + "data-00000-of-00001.arrow"]


@pytest.mark.parametrize(("kind", "data"), [("parquet", b"PAR1 no"), ("arrow", b"nothing")])
def test_a_damaged_file_is_an_error(tmp_path, kind, data):
    path = tmp_path / "a"
    path.write_bytes(data)
    with pytest.raises(SourceError, match="no " + kind):
        list(read_columnar(RecordFile(path=path, name="a", kind=kind), RecordLog()))
