import json
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from small_cache import build, damage_payload, draw

from latentcache.loader.reader_process import MEMORIES, READY, REQUEST, WHOLE, ReaderProcess, serve
from latentcache.loader.shared import map_of, shared_memory
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader

SHAPE = (4, 8, 8)
SIZE = 4 * 8 * 8 * 2


@pytest.fixture
def entries(tmp_path):
    for number in range(6):
        draw(tmp_path / "data" / f"p{number}.png", (64, 64), seed=number)
    build(tmp_path / "data", tmp_path / "cache")
    return EntryReader(CacheLayout(tmp_path / "cache"), load_generation(tmp_path / "cache"))


def paths(entries):
    return [entries.path(shard) for shard in range(len(entries.generation.shards))]


def request(entries, rows, memory, *, shape=SHAPE, dtype="float16", start=128):
    columns, found = entries.generation.rows, map_of(memory)[0]
    sizes = (found.number, len(found), start, SIZE, len(rows), len(dtype), len(shape))
    parts = (
        columns.shard[rows].astype("<i4"),
        columns.offset[rows].astype("<u8"),
        columns.key[rows],
    )
    packed = REQUEST.pack(*sizes, *shape, *[0] * (8 - len(shape)))
    return packed + dtype.encode() + b"".join(part.tobytes() for part in parts)


def answer(process, message, memory):
    process.remember(message, os.dup(map_of(memory)[0].file))
    return process.answer(message)


def test_entries_come_to_their_places(entries):
    memory, rows = shared_memory(10_000), [3, 0, 5]
    assert answer(ReaderProcess(paths(entries)), request(entries, rows, memory), memory)
    found = memory[128 : 128 + 3 * SIZE].view(np.float16).reshape(3, *SHAPE)
    assert all(np.array_equal(one, entries.read(row)[1]) for one, row in zip(found, rows, strict=True))
    assert not memory[:128].any()
    assert not memory[128 + 3 * SIZE :].any()


@pytest.mark.parametrize(("shape", "dtype"), [((8, 8, 4), "float16"), (SHAPE, "bfloat16")])
def test_another_shape_or_type_is_not_whole(entries, shape, dtype):
    memory = shared_memory(10_000)
    assert not answer(ReaderProcess(paths(entries)), request(entries, [1], memory, shape=shape, dtype=dtype), memory)


def test_damage_and_another_key_are_not_whole(entries):
    memory, process = shared_memory(10_000), ReaderProcess(paths(entries))
    assert answer(process, request(entries, [1, 2], memory), memory)
    damage_payload(entries.layout.root, row=1)
    assert not process.answer(request(entries, [2, 1], memory))
    assert process.answer(request(entries, [2, 3], memory))
    offset = entries.generation.rows.offset.copy()
    offset[2] = offset[3]
    object.__setattr__(entries.generation.rows, "offset", offset)
    assert not process.answer(request(entries, [2], memory))


@pytest.mark.parametrize("before", [False, True])
def test_a_shard_that_is_cut_is_not_whole(entries, before):
    memory, process = shared_memory(10_000), ReaderProcess(paths(entries))
    process.remember(request(entries, [0], memory), os.dup(map_of(memory)[0].file))
    if before:
        assert process.answer(request(entries, [0], memory))
    os.truncate(paths(entries)[0], int(entries.generation.rows.offset.max()) + 100)
    last = int(entries.generation.rows.offset.argmax())
    assert not process.answer(request(entries, [last], memory))


def test_memory_that_was_sent_long_ago_is_let_go(entries):
    process, kept = ReaderProcess(paths(entries)), [shared_memory(4096) for _ in range(MEMORIES + 1)]
    for memory in kept:
        assert answer(process, request(entries, [0], memory), memory)
    with pytest.raises(KeyError):
        process.answer(request(entries, [0], kept[0]))
    assert process.answer(request(entries, [0], kept[1]))


def test_messages_are_answered_until_the_other_end_is_closed(entries):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listed = json.dumps(paths(entries)).encode()
    ours.send(len(listed).to_bytes(8, "little"))
    for start in range(0, len(listed), 10):
        ours.send(listed[start : start + 10])
    ours.settimeout(20)
    thread = threading.Thread(target=serve, args=[theirs.detach()], daemon=True)
    thread.start()
    assert ours.recv(1) == READY
    memory = shared_memory(10_000)
    message = request(entries, [4], memory)
    socket.send_fds(ours, [message], [map_of(memory)[0].file])
    assert ours.recv(1) == WHOLE
    Path(paths(entries)[0]).rename(paths(entries)[0] + "x")
    ours.send(message)
    assert ours.recv(1) == WHOLE  # it is mapped
    ours.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_shard_that_is_gone_is_not_whole(entries):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listed = json.dumps([path + ".gone" for path in paths(entries)]).encode()
    ours.send(len(listed).to_bytes(8, "little"))
    ours.send(listed)
    ours.settimeout(20)
    thread = threading.Thread(target=serve, args=[theirs.detach()], daemon=True)
    thread.start()
    assert ours.recv(1) == READY
    memory = shared_memory(10_000)
    socket.send_fds(ours, [request(entries, [4], memory)], [map_of(memory)[0].file])
    assert ours.recv(1) == b"0"
    ours.close()
    thread.join(10)
