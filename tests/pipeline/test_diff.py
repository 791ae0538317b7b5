import numpy as np
import pytest
from made_archives import as_parquet, as_saved, as_tars, some_images
from small_cache import draw

from latentcache.pipeline.diff import with_equal_files
from latentcache.sources import known
from latentcache.sources.scan import scan


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    for number in range(3):
        draw(folder / f"p{number}.bmp", (16, 16), seed=number)  # equal sizes in bytes
    (folder / "q.bmp").write_bytes((folder / "p0.bmp").read_bytes())
    draw(folder / "r.bmp", (32, 16), seed=9)
    return folder


def hashed_names(folder, samples=None):
    samples = scan(folder).samples if samples is None else samples
    table = with_equal_files(samples, "image", folder)
    known = table.inputs["image"].content.any(axis=1)
    return table, [name for name, there in zip(table.names, known.tolist(), strict=True) if there]


def test_only_files_of_equal_heads_are_hashed(data, monkeypatch):
    whole = []
    read = known.read_image
    monkeypatch.setattr(known, "read_image", lambda root, at: whole.append(at["path"]) or read(root, at))
    table, names = hashed_names(data)
    assert names == sorted(whole) == ["p0.bmp", "q.bmp"]
    content = table.inputs["image"].content
    assert content[0].tobytes() == content[3].tobytes()
    assert table.files.stat[0].all(), "with the memo of the read"


@pytest.mark.parametrize(("form", "equal"), [(as_tars, 2), (as_saved, 0), (as_parquet, 0)])
def test_equal_images_of_tars_are_found_and_those_of_rows_are_left_to_a_worker(tmp_path, form, equal):
    images = some_images(4)
    form(tmp_path, {**images, "again": (next(iter(images.values()))[0], "")})
    samples = scan(tmp_path).samples
    read = hashed_names(tmp_path, samples)[0].inputs["image"].content
    assert int(read.any(axis=1).sum()) == equal
    assert len(np.unique(read, axis=0)) == 1 + bool(equal)
