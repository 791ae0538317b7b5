"""The model of a disk that loses what was not synced: it may lose all of that, and nothing else."""

import random

from disk_model import PAGE, Disk
from hypothesis import given, settings
from hypothesis import strategies as st
from traced import Operation

FILE = "/top/folder/file"
NEW = [Operation("mkdir", "/top/folder"), Operation("sync", "/top"), Operation("create", FILE)]
NAMED = [*NEW, Operation("sync", "/top/folder")]


def written(data, offset=0, durable=False):
    return Operation("write", FILE, offset=offset, data=data, durable=durable)


def states(tmp_path, operations, count=60):
    """What the file holds after each of many cuts; None where it is not there."""
    disk, found = Disk("/top"), []
    for operation in operations:
        disk.apply(operation)
    for seed in range(count):
        disk.cut(random.Random(seed), tmp_path / str(seed))
        file = tmp_path / str(seed) / "folder" / "file"
        found.append(file.read_bytes() if file.exists() else None)
    return found


def test_what_was_synced_is_always_there(tmp_path):
    operations = [*NAMED, written(b"a" * 9000), Operation("sync", FILE)]
    assert set(states(tmp_path, operations)) == {b"a" * 9000}


def test_what_was_not_synced_is_there_by_pages_in_any_combination(tmp_path):
    operations = [*NAMED, written(b"a" * 3 * PAGE), Operation("sync", FILE), written(b"b" * 3 * PAGE)]
    found = {bytes(content[start] for start in range(0, 3 * PAGE, PAGE)) for content in states(tmp_path, operations)}
    assert len(found) == 8


def test_a_name_is_durable_when_its_folder_was_synced_and_not_before(tmp_path):
    synced = [written(b"a"), Operation("sync", FILE)]
    (tmp_path / "new").mkdir()
    assert set(states(tmp_path / "new", [*NEW, *synced], 20)) == {None, b"a"}
    (tmp_path / "named").mkdir()
    assert set(states(tmp_path / "named", [*NAMED, *synced], 20)) == {b"a"}


def test_a_file_that_grew_may_hold_zeros(tmp_path):
    found = set(states(tmp_path, [*NAMED, written(b"a" * PAGE)]))
    assert found == {b"", bytes(PAGE), b"a" * PAGE}


def test_a_rename_is_whole_or_not_there(tmp_path):
    other = "/top/folder/other"
    operations = [
        *NAMED, written(b"old"), Operation("sync", FILE),
        Operation("create", other), Operation("write", other, data=b"new"), Operation("sync", other),
        Operation("rename", other, to=FILE),
    ]  # fmt: skip
    assert set(states(tmp_path, operations)) == {b"old", b"new"}


def test_a_write_that_was_durable_at_once_keeps_its_place_among_others(tmp_path):
    found = states(tmp_path, [*NAMED, written(b"a" * 2 * PAGE), Operation("sync", FILE), written(b"b", 5, True)])
    assert set(found) == {b"aaaaab" + b"a" * (2 * PAGE - 6)}


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 3 * PAGE), st.binary(min_size=1, max_size=2 * PAGE), st.booleans()), max_size=8)
)
def test_after_a_sync_the_file_is_what_the_process_saw(tmp_path_factory, writes):
    seen = bytearray()
    for offset, data, _ in writes:
        seen.extend(bytes(max(0, offset + len(data) - len(seen))))
        seen[offset : offset + len(data)] = data
    operations = [written(data, offset, durable) for offset, data, durable in writes]
    operations = [*NAMED, *operations, Operation("sync", FILE)]
    assert set(states(tmp_path_factory.mktemp("disk"), operations, 3)) == {bytes(seen)}
