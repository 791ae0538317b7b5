"""Mirror images: beside their pictures on disk, one row with them for a plan, rows of their own for a reader."""

from dataclasses import replace

import numpy as np
import pytest
from small_cache import build, draw_four

from latentcache.errors import CacheDamagedError
from latentcache.identity.key import EntryKey
from latentcache.store import generation as generations
from latentcache.store.columns import check_pairs
from latentcache.store.generation import Rows, load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader
from latentcache.store.variants import NOWHERE, FoldedRows, alike, doubled, folded, in_pairs, moved, names_of
from latentcache.store.views import combine, select


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flipped")
    build(draw_four(folder / "data"), folder / "cache", flip=True)
    build(folder / "data", folder / "plain")
    return folder


def test_pictures_come_first_and_then_their_mirror_images(flipped):
    generation = load_generation(flipped / "cache")
    keys = [EntryKey.unpack(key.tobytes()) for key in generation.rows.key]
    assert [key.variant for key in keys] == [0] * 4 + [1] * 4
    assert [replace(key, variant=0) for key in keys[4:]] == keys[:4]
    assert generation.manifest["format"]["version"] == 2
    assert generation.manifest["counts"] == {"samples": 4, "rows": 8, "quarantined": 0}


def test_a_cache_without_them_has_the_old_version_and_is_not_folded(flipped):
    generation = load_generation(flipped / "plain")
    assert generation.manifest["format"]["version"] == 1
    assert "flip" not in generation.manifest["recipe"]["geometry"]
    assert folded(generation) is generation


def test_folded_rows_are_those_of_the_cache_without_mirror_images(flipped):
    one, plain = folded(load_generation(flipped / "cache")), load_generation(flipped / "plain")
    for name in ("key", "bucket", "sample", "crop", "resize", "pixel_hash"):
        np.testing.assert_array_equal(getattr(one.rows, name), getattr(plain.rows, name))
    assert isinstance(one.rows, FoldedRows)


def test_doubled_rows_are_those_on_disk(flipped):
    generation = load_generation(flipped / "cache")
    again = doubled(folded(generation)).rows
    for name in ("key", "shard", "offset", "bucket", "sample", "crop", "resize"):
        np.testing.assert_array_equal(getattr(again, name), getattr(generation.rows, name), err_msg=name)


def test_selected_and_combined_rows_read_the_mirror_images_of_their_pictures(flipped):
    caches = [(CacheLayout(flipped / name), folded(load_generation(flipped / name))) for name in ("plain", "cache")]
    both = combine(caches)
    assert both.rows.flip_shard[:4].tolist() == [NOWHERE] * 4
    chosen = select(both, np.array([7, 2, 4, 4]))
    reader = EntryReader(caches[0][0], doubled(chosen))
    first, second = reader.read(0)[1], reader.read(4)[1]
    np.testing.assert_allclose(
        second.astype(float), first[..., ::-1].astype(float), atol=1e-2
    )  # the stub is symmetric
    np.testing.assert_array_equal(reader.read(1)[1], reader.read(5)[1])  # nothing is stored: the picture itself
    np.testing.assert_array_equal(reader.read(6)[1], reader.read(7)[1])
    reader.close()


def test_rows_of_one_kind_stay_as_they_are(flipped):
    plain = load_generation(flipped / "plain").rows
    assert alike([plain, plain])[0] is plain
    assert moved(plain, np.int32(3)) is plain
    assert names_of(plain) == list(Rows.__dataclass_fields__)


@pytest.mark.parametrize("column", ["key", "sample", "bucket"])
def test_rows_that_are_no_pairs_are_damage(flipped, column):
    rows = load_generation(flipped / "cache").rows
    columns = {name: getattr(rows, name).copy() for name in names_of(rows)}
    check_pairs(columns)
    columns[column][5] = columns[column][4]
    if column == "bucket":
        columns[column][5] += 1
    with pytest.raises(ValueError, match="mirrored rows"):
        check_pairs(columns)
    with pytest.raises(ValueError, match="mirrored rows"):
        check_pairs({name: values[:7] for name, values in columns.items()})


def test_a_generation_whose_pairs_do_not_match_is_not_opened(flipped, monkeypatch):
    def refuse(columns):
        raise ValueError("the mirrored rows are not those of the pictures before them")

    monkeypatch.setattr(generations, "check_pairs", refuse)
    with pytest.raises(CacheDamagedError, match="contradicts itself"):
        load_generation(flipped / "cache")
    load_generation(flipped / "plain")


def test_a_row_on_disk_goes_with_its_mirror_image(flipped):
    assert in_pairs(load_generation(flipped / "plain"), {1}) == {1}
    assert in_pairs(load_generation(flipped / "cache"), {1, 6}) == {1, 5, 6, 2}
