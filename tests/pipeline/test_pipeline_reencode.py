"""Encoding again, of whole caches with the demo, the stub and a real model."""

import shutil

import numpy as np
import pytest
from PIL import Image
from small_builds import draw, folder_of, settings
from tiny_vae import tiny_vae

from latentcache.encoders.protocol import EncodedBatch
from latentcache.encoders.stub import StubEncoder
from latentcache.errors import ModelNotFoundError
from latentcache.pipeline import reencode as reencode_module
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.reencode import Reencoder
from latentcache.store.generation import load_generation
from latentcache.verify.repair import repair_cache
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Depth


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path):
    folder = folder_of(tmp_path / "data", 4)
    draw(folder / "wide.png", 8, height=70, width=150)
    draw(folder / "tall.jpg", 9, height=200, width=70)
    shutil.copy(folder / "000.png", folder / "twin.png")
    return folder


def made(data, cache, model="stub", **changes):
    batch_size = changes.pop("batch_size", 3)
    build_cache(settings(data, out=cache, batch_size=batch_size, recipe={"model": str(model)} | changes))
    return cache


def again(cache, number=99, *, batch_size=2, **more):
    with Reencoder(device_name="cpu", batch_size=batch_size, **more) as encoder:
        return verify_cache(cache, depth=Depth(reencode=number), reencode=encoder)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "stub"},
        {"model": "demo", "flip": True},
        {"model": "stub", "latents": "sample"},
        {"model": "stub", "latents": "moments", "storage_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_exact_encoders_give_the_same_bits(data, tmp_path, changes):
    cache = made(data, tmp_path / "cache", **changes)
    report = again(cache)
    assert (report.exit_code(), report.reencoded.samples, report.reencoded.largest) == (0, 7, 0.0)
    assert report.reencoded.entries == len(load_generation(cache).rows.shard)
    assert report.reencoded.confidence == "7 clean: that is all of them"


@pytest.mark.parametrize(
    ("latents", "storage_dtype"), [("mode", "float16"), ("sample", "bfloat16"), ("moments", "float32")]
)
def test_a_real_model_in_other_batches(data, tmp_path, model, latents, storage_dtype):
    cache = made(data, tmp_path / "cache", model, latents=latents, storage_dtype=storage_dtype, flip=True)
    report = again(cache, batch_size=1)
    assert (report.exit_code(), report.reencoded.samples, report.reencoded.entries) == (0, 7, 14)
    assert 0 <= report.reencoded.mean < 0.001


def test_where_a_picture_was_put_counts_and_not_todays_rule(data, tmp_path):
    cache = made(data, tmp_path / "cache", resolutions=(64, 96), bucket_step=16)
    generation = load_generation(cache)
    rows = list(range(len(generation.rows.shard)))
    with Reencoder() as encoder:
        found = list(encoder.encode(generation, data, rows))
    assert sorted(fresh.row for fresh in found) == rows
    assert all(fresh.same_pixels and not fresh.cause for fresh in found)


class Wrong(StubEncoder):
    """Right but for pictures whose first pixel is this one."""

    def __init__(self, pixel):
        super().__init__()
        self.pixel = pixel

    def encode(self, pixels, *, precise=False):
        encoded = super().encode(pixels, precise=precise)
        wrong = (pixels[:, 0, 0] == self.pixel).all(axis=1)
        values = np.where(wrong[:, None, None, None], encoded.latents[:, :, ::-1], encoded.latents)
        return EncodedBatch(latents=np.ascontiguousarray(values), finite=encoded.finite)


def first_pixel(path):
    with Image.open(path) as picture:
        return np.asarray(picture)[0, 0]


@pytest.fixture
def drifted(data, tmp_path, use_encoder, monkeypatch):
    """A whole cache in which one payload is not what the encoder gives; all checksums are right."""
    use_encoder(Wrong(first_pixel(data / "002.png")))
    cache = made(data, tmp_path / "cache")
    monkeypatch.undo()
    return cache


def test_other_values_with_right_checksums_are_drift(drifted):
    assert verify_cache(drifted, full=True).exit_code() == 0
    report = again(drifted)
    assert (report.exit_code(), report.counts["drift"], report.counts["ok"]) == (1, 1, 6)
    (finding,) = report.findings
    assert (finding.category, finding.reason, finding.path) == ("drift", "latents", "002.png")
    assert report.reencoded.confidence == ""


def test_repair_takes_out_what_has_drifted_and_a_build_makes_it_again(data, drifted):
    with Reencoder(device_name="cpu") as encoder:
        depth = Depth(full=True, reencode=99)
        report = repair_cache(drifted, depth=depth, reencode=encoder, confirm=lambda plan: True)
    assert [(item.path, item.reason) for item in report.removals] == [("002.png", "latents")]
    assert sum(found.saved for found in report.salvaged) == 5
    counts = verify_cache(drifted).counts
    assert (counts["missing"], counts["ok"]) == (1, 6)
    assert build_cache(settings(data, out=drifted)).encoded == 1
    report = again(drifted)
    assert (report.exit_code(), report.counts["ok"], report.reencoded.largest) == (0, 7, 0.0)


def test_a_repair_without_encoding_keeps_it(drifted):
    assert not repair_cache(drifted, confirm=lambda plan: True).plan.needed


def test_another_decoder_is_told_apart(data, tmp_path, monkeypatch):
    cache = made(data, tmp_path / "cache")
    real = reencode_module.decode
    monkeypatch.setattr(reencode_module, "decode", lambda *given, **more: real(*given, **more)[:, ::-1].copy())
    assert {finding.reason for finding in again(cache).findings} == {"pixels"}


def test_a_decoder_that_refuses_or_gives_another_size(data, tmp_path, monkeypatch):
    cache = made(data, tmp_path / "cache")
    real = reencode_module.decode
    monkeypatch.setattr(reencode_module, "decode", lambda *given, **more: real(*given, **more)[1:])
    report = again(cache, number=2)
    assert {(f.category, f.reason) for f in report.findings} == {("unverifiable", "not-encoded")}
    assert "decoder-error" in report.findings[0].found

    def no_memory(*given, **more):
        raise MemoryError

    monkeypatch.setattr(reencode_module, "decode", no_memory)
    assert "out-of-memory" in again(cache, number=2).findings[0].found


def test_bytes_changed_behind_an_unchanged_stat(data, tmp_path):
    cache = made(data, tmp_path / "cache")
    generation = load_generation(cache)
    (data / "001.png").write_bytes((data / "002.png").read_bytes())
    (data / "003.png").unlink()
    rows = range(len(generation.rows.shard))
    with Reencoder() as encoder:
        found = {fresh.row: fresh for fresh in encoder.encode(generation, data, list(rows))}
    names = [generation.samples.names[sample] for sample in generation.rows.sample.tolist()]
    causes = {name: found[row].cause for row, name in enumerate(names)}
    assert causes.pop("001.png") == "source-changed"
    assert causes.pop("003.png")
    assert set(causes.values()) == {""}


def test_weights_changed_in_place_are_a_stale_recipe(data, tmp_path):
    model = tiny_vae(tmp_path / "model")
    cache = made(data, tmp_path / "cache", model)
    tiny_vae(model, seed=8)
    report = again(cache)
    assert {(f.category, f.reason) for f in report.findings} == {("stale", "recipe:encoder.fingerprint")}
    assert (report.counts["stale"], report.counts["drift"], report.reencoded.entries) == (7, 0, 0)
    assert [name for name, _, _ in report.recipe_diff] == ["encoder.fingerprint"]


def test_a_model_that_is_gone_or_moved(data, tmp_path):
    model = tiny_vae(tmp_path / "model")
    cache = made(data, tmp_path / "cache", model)
    model.rename(tmp_path / "moved")
    with pytest.raises(ModelNotFoundError) as caught:
        again(cache)
    assert "--model" in caught.value.fix
    assert again(cache, model=str(tmp_path / "moved")).exit_code() == 0


def test_leaving_gives_the_encoder_back(data, tmp_path):
    generation = load_generation(made(data, tmp_path / "cache"))
    with Reencoder() as encoder:
        assert encoder.device == ""
        list(encoder.encode(generation, data, [0]))
        assert encoder.device == "cpu"
    assert encoder.device == ""
