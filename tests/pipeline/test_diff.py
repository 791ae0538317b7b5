import numpy as np
import pytest
from made_archives import as_parquet, as_saved, as_tars, some_images
from small_cache import draw

from latentcache.fields.protocol import DescribeContext
from latentcache.fields.registry import field_kind, load
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, Rejected, SampleTable
from latentcache.pipeline.diff import field_work, rejected_before, with_equal_files
from latentcache.sources import known
from latentcache.sources.scan import scan

KIND = field_kind("latents")


def described(**changes):
    settings = KIND.settings(model="stub", resolutions=(64,), bucket_step=32, **changes)
    return load(KIND.describer)(settings, DescribeContext())


def contents(seeds):
    return np.array([[seed % 251 + 1] * 8 + [seed // 251] * 8 for seed in seeds], dtype=np.uint8).reshape(-1, 16)


def table(seeds, *, sizes=(64, 64), bytes_=None):
    """Images with these contents; 0 is an unread image."""
    count = len(seeds)
    names = Strings.of(f"{number:05}.png" for number in range(count))
    stat = np.full((count, 6), 7, dtype=np.uint64)
    stat[:, 0] = np.arange(count) if bytes_ is None else bytes_
    stat[:, 5] = 10**18
    content = contents(seeds)
    content[np.array(seeds, dtype=int) == 0] = 0
    return SampleTable(
        names=names,
        files=Files(names=names, stat=stat, content=content.copy()),
        inputs={"image": Input(content=content, file=np.arange(count, dtype=np.int32))},
        columns={"original_size": np.tile(np.array(sizes, dtype=np.uint32), (count, 1))},
    )


class FakeCatalog:
    shards = ("one",)

    def __init__(self, keys=()):
        self._keys = np.array(keys, dtype=np.uint8).reshape(-1, 32)
        self._place = {key.tobytes(): place for place, key in enumerate(self._keys)}

    def __len__(self):
        return len(self._keys)

    def find(self, keys):
        return np.array([self._place.get(key.tobytes(), -1) for key in keys], dtype=np.int64)

    def count(self, kind, recipe):
        return sum(key[0] == kind and key.tobytes().endswith(recipe) for key in self._keys)


def keys_of(samples, one):
    return KIND.plan_keys(KIND.plan(samples, one.recipe), KIND.content(samples), one.recipe)


@pytest.mark.parametrize(("unfinished", "assumed"), [(False, 0), (True, 2)])
def test_items_of_an_unfinished_build_count_for_unread_inputs(unfinished, assumed):
    one = described()
    committed = keys_of(table([1, 2, 9]), one)
    other = keys_of(table([5]), described(storage_dtype="float32"))
    catalog = FakeCatalog(np.concatenate([committed, other]))
    work = field_work(KIND, one, None, table([9, 0, 0, 0]), catalog, {}, unfinished=unfinished)
    assert (work.assumed, len(work.todo)) == (assumed, 3)


class StoredField:
    def __init__(self, one, decoders=None):
        self.recipe = one.recipe
        self.provenance = dict(one.provenance) if decoders is None else {"decoders": decoders}


def test_known_rejections_are_matched_by_content():
    one, samples = described(), table([5, 0, 6, 5])
    held = [
        Rejected(name="gone.png", reason="truncated", content=contents([5]).tobytes(), target="latents"),
        Rejected(name="00001.png", reason="empty", target="latents"),
        Rejected(name="00002.png", reason="empty", content=contents([6]).tobytes(), target="mask"),
    ]
    found = rejected_before(samples, KIND, one, StoredField(one), held)
    assert {row: (item.name, item.reason) for row, item in found.items()} == {
        0: ("00000.png", "truncated"),
        3: ("00003.png", "truncated"),
    }
    assert rejected_before(samples, KIND, one, StoredField(described(flip=True)), held) == {}
    assert rejected_before(samples, KIND, one, StoredField(one, {"pillow": "0"}), held) == {}
    again = [Rejected(name="x", reason="too-many-pixels", content=contents([5]).tobytes(), target="latents")]
    assert rejected_before(samples, KIND, one, StoredField(one), again) == {}


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    for number in range(3):
        draw(folder / f"p{number}.bmp", (16, 16), seed=number)  # equal sizes in bytes
    (folder / "q.bmp").write_bytes((folder / "p0.bmp").read_bytes())
    draw(folder / "r.bmp", (32, 16), seed=9)
    return folder


def found(folder, samples=None):
    samples = scan(folder).samples if samples is None else samples
    table = with_equal_files(samples, "image", folder)
    known = table.inputs["image"].content.any(axis=1)
    return table, [name for name, there in zip(table.names, known.tolist(), strict=True) if there]


def test_only_files_of_equal_heads_are_hashed(data, monkeypatch):
    whole = []
    read = known.read_image
    monkeypatch.setattr(known, "read_image", lambda root, at: whole.append(at["path"]) or read(root, at))
    table, names = found(data)
    assert names == sorted(whole) == ["p0.bmp", "q.bmp"]
    content = table.inputs["image"].content
    assert content[0].tobytes() == content[3].tobytes()
    assert table.files.stat[0].all(), "with the memo of the read"


@pytest.mark.parametrize(("form", "equal"), [(as_tars, 2), (as_saved, 2), (as_parquet, 0)])
def test_equal_images_of_archives_are_found_unless_they_are_compressed(tmp_path, form, equal):
    images = some_images(4)
    form(tmp_path, {**images, "again": (next(iter(images.values()))[0], "")})
    samples = scan(tmp_path).samples
    read = found(tmp_path, samples)[0].inputs["image"].content
    assert int(read.any(axis=1).sum()) == equal
    assert len(np.unique(read, axis=0)) == 1 + bool(equal)
