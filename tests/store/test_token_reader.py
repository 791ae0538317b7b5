import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from small_tokens import build, opened, spoken, tamper, texts, write_texts

from latentcache.errors import CorruptEntryError, MissingEntryError

TEXTS = texts(200, longest=4000)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    build(write_texts(folder / "a.jsonl", TEXTS), folder / "cache")
    return folder / "cache"


@pytest.fixture
def cache(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cache")


def test_every_document_is_what_was_written(made):
    generation, reader = opened(made)
    assert len(generation.blocks) > 1
    assert spoken(reader) == TEXTS
    assert not reader.ids(0).flags.writeable
    reader.close()
    assert spoken(reader) == TEXTS


def test_pieces_come_to_their_places_and_nothing_else_is_written(made):
    _, reader = opened(made)
    documents, starts, lengths = np.array([150, 3, 150, 150]), np.array([2, 0, 0, 2]), np.array([3, 1, 2, 1])
    out = np.full(9, 9, dtype=reader.dtype)
    reader.gather(documents, starts, lengths, out, np.array([5, 0, 1, 3]))
    whole = reader.ids(150)
    assert out.tolist() == [reader.ids(3)[0], *whole[:3], 9, *whole[2:5], 9]


@pytest.mark.parametrize("count", [1, 64, 65, 200])
@pytest.mark.parametrize("shuffled", [False, True])
def test_few_pieces_and_many_come_alike(made, count, shuffled):
    _, reader = opened(made)
    documents = np.arange(count)
    if shuffled:
        documents = np.random.default_rng(count).permutation(count)
    lengths = reader.documents.length[documents]
    at = np.cumsum(lengths, dtype=np.int64) - lengths  # side by side: those that follow each other are read at once
    out = np.zeros(int(lengths.sum()), dtype=reader.dtype)
    reader.gather(documents, np.zeros(count, dtype=np.uint32), lengths, out, at)
    assert out.tolist() == [token for document in documents for token in reader.ids(document).tolist()]


def test_many_pieces_with_gaps_leave_what_lies_between(made):
    _, reader = opened(made)
    documents = np.arange(100)
    lengths = np.maximum(reader.documents.length[documents] - 1, 1).astype(np.uint32)
    starts = (reader.documents.length[documents] - lengths).astype(np.uint32)
    at = np.cumsum(lengths + 1, dtype=np.int64) - lengths
    out = np.full(int(at[-1] + lengths[-1]), 60_000, dtype=reader.dtype)
    reader.gather(documents, starts, lengths, out, at)
    expected = [[60_000, *reader.ids(d)[s:].tolist()] for d, s in zip(documents, starts, strict=True)]
    assert out.tolist() == [token for piece in expected for token in piece]


def test_a_damaged_block_names_a_document_and_serves_none_of_its_ids(cache):
    tamper(cache, block=1)
    generation, reader = opened(cache)
    inside = np.flatnonzero(generation.documents.block == 1).tolist()
    reader.ids(0)
    for document in (inside[0], inside[-1]):
        with pytest.raises(CorruptEntryError) as caught:
            reader.ids(document)
        assert caught.value.sample == generation.documents.where(inside[0])
        assert "--full" in caught.value.fix


def test_a_shard_that_is_cut_short_or_gone(cache):
    generation, reader = opened(cache)
    path = cache / "shards" / generation.shards[0] / "data.mdb"
    path.chmod(0o644)
    reader.ids(0)
    os.truncate(path, 8192)
    with pytest.raises(CorruptEntryError):
        reader.ids(0)
    _, other = opened(cache)
    with pytest.raises(CorruptEntryError):
        other.ids(0)
    path.unlink()
    _, third = opened(cache)
    with pytest.raises(MissingEntryError):
        third.ids(0)


def test_threads_share_a_reader(made):
    _, reader = opened(made)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: len(reader.ids(number)), range(200)))
    assert found == [len(text.encode()) + 1 for text in TEXTS]


def _lengths(reader, queue):
    queue.put([len(reader.ids(number)) for number in (0, 199)])


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_processes_read_too(made, way):
    _, reader = opened(made)
    reader.ids(0)
    context = multiprocessing.get_context(way)
    queue = context.Queue()
    process = context.Process(target=_lengths, args=(reader, queue))
    process.start()
    found = queue.get(timeout=60)
    process.join()
    assert found == [len(TEXTS[0].encode()) + 1, len(TEXTS[199].encode()) + 1]


def test_reading_needs_no_torch(made):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path;"
        "from latentcache.store.token_generation import load_tokens;"
        "from latentcache.store.token_reader import TokenReader; from latentcache.store.layout import CacheLayout;"
        "c = Path(sys.argv[1]); TokenReader(CacheLayout(c), load_tokens(c)).ids(0);"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, made, Path.cwd()], check=True)
