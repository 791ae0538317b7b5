"""Masks and control images from files to batches: same placement, own entries, own findings."""

import diffusers
import numpy as np
import pytest
import torch
from commands import look
from in_threads import in_threads
from PIL import Image
from tiny_vae import tiny_vae

from latentcache import open_cache
from latentcache.store.snapshot import open_snapshot

STUB = ("--model", "stub", "--resolution", 64, "--bucket-step", 32)


def noise(seed, height=80, width=96, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def position(height, width):
    """Red grows to the right, green downwards."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([columns, rows, np.zeros_like(rows)], axis=-1).astype(np.uint8)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.squeeze()).save(path)


def opened(path):
    with Image.open(path) as image:
        return image.convert("RGB")


def placed(path, like, top, left):
    """Resize as ``like`` covers a bucket of 64 x 64 pixels, and crop; (64, 64, 3)."""
    width, height = opened(like).size
    size = (-(-width * 64 // height), 64) if width >= height else (64, -(-height * 64 // width))
    return np.asarray(opened(path).resize(size, Image.Resampling.LANCZOS))[top : top + 64, left : left + 64]


def means(pixels):
    """(8, 8) mean gray of cells of 8 x 8 pixels."""
    return np.asarray(Image.fromarray(pixels.copy()).convert("L")).reshape(8, 8, 8, 8).mean(axis=(1, 3))


def covering_width(path):
    width, height = opened(path).size
    return max(-(-width * 64 // height), 64)


@pytest.fixture
def data(tmp_path):
    """Six images with a mask and a control image each."""
    for number in range(6):
        save(tmp_path / f"data/{number}.png", noise(number, 80 + number))
        save(tmp_path / f"data/{number}-masklabel.png", noise(10 + number, 80 + number, channels=1))
        save(tmp_path / f"data/{number}-condlabel.png", noise(20 + number, 80 + number))
    return tmp_path / "data"


def build(data, *more, code=0):
    done = look("build", data, "--out", data.parent / "cache", *more, "--json")
    assert done.status == code, done.err
    return done.json


def encoded(done):
    return {name: field["encoded"] for name, field in done["fields"].items()}


def notes(done):
    return {item["reason"]: item.get("count", 1) for item in done["items"] if item["category"] == "note"}


def batch_of(data, *, size=6, **more):
    """All samples in one batch, by name."""
    (batch,) = open_cache(data.parent / "cache").loader(batch_size=size, **more)
    return batch


def test_image_mask_and_control_are_encoded_separately(data, monkeypatch):
    monkeypatch.setattr("latentcache.sources.known.RACY_NS", 0)
    assert encoded(build(data, *STUB)) == {"latents": 6, "mask": 6, "control": 6}
    monkeypatch.setattr("latentcache.pipeline.build.Run", None)
    assert encoded(build(data)) == {"latents": 0, "mask": 0, "control": 0}, "no file is read again"
    monkeypatch.undo()
    save(data / "1-masklabel.png", noise(91, 81, channels=1))
    save(data / "2-condlabel.png", noise(92, 82))
    (data / "3-masklabel.png").unlink()
    checked = look("verify", data.parent / "cache", "--json").json
    stale = {
        (item["path"], item["reason"], item["field"]) for item in checked["items"] if item["category"] == "stale"
    }
    masks = {(name, "mask-changed", "mask") for name in ("1.png", "3.png")}
    assert stale == {("2.png", "control-changed", "control"), *masks}
    assert "1-masklabel.png: " in next(item["found"] for item in checked["items"] if item["path"] == "1.png")
    done = build(data)
    assert (encoded(done), notes(done)["no-mask"]) == ({"latents": 0, "mask": 2, "control": 1}, 1)
    assert look("verify", data.parent / "cache", "--full", "--json").json["counts"]["ok"] == 6
    save(data / "4.png", noise(93, 84))
    assert encoded(build(data)) == {"latents": 1, "mask": 0, "control": 0}, "equal pixels are copied to the new keys"
    assert look("verify", data.parent / "cache", "--model", "stub").status == 0
    checked = look("verify", data.parent / "cache", "--resolution", 32, "--json").json
    assert {item["field"] for item in checked["recipe_diff"]} == {"latents", "mask", "control"}
    build(data, "--resolution", 32)
    labels = {name: {item.label for item in field.groups} for name, field in fields_of(data).items()}
    assert labels == {"latents": {"32x32"}, "mask": {"32x32"}, "control": {"32x32"}}, "they follow latents"


def fields_of(data):
    return open_snapshot(data.parent / "cache").fields


def test_masks_are_means_of_cells_and_full_without_a_file(data):
    (data / "0-masklabel.png").unlink()
    (data / "1-masklabel.png").unlink()
    build(data, *STUB)
    batch = batch_of(data, fields=["mask", "latents", "crop_top_left"])
    (unscaled,) = open_cache(data.parent / "cache").read(scaled=False).loader(batch_size=6)
    assert unscaled["mask"].equal(batch["mask"]), "scale and shift are those of latents"
    assert (batch["mask"].dtype, batch["mask"].shape) == (torch.float32, (6, 1, 8, 8))
    for name, mask, (top, left) in zip(batch["names"], batch["mask"], batch["crop_top_left"].tolist(), strict=True):
        path = data / name.replace(".png", "-masklabel.png")
        if not path.exists():
            assert (mask == 1).all()
            continue
        cells = means(placed(path, data / name, top, left)) / 255
        assert np.abs(mask[0].numpy() - cells).max() <= 1 / 510 + 1e-6
    assert fields_of(data)["mask"].entries == 1, "masks are packed"


@pytest.mark.parametrize("crop", [("--crop", "random", "--crop-variants", 3), ("--crop", "top"), ()])
def test_flips_and_crops_of_all_images_of_a_sample_agree(tmp_path, crop):
    data = tmp_path / "data"
    for number in range(4):
        pixels = position(160 + number, 200 if number % 2 else 100)
        pixels[..., 2] = number
        save(data / f"{number}.png", pixels)
        save(data / f"{number}-condlabel.png", pixels)
        save(data / f"{number}-masklabel.png", pixels)
    build(data, *STUB, "--flip", *crop)
    loader = open_cache(tmp_path / "cache").read(scaled=False).loader(batch_size=2, seed=3)
    seen = set()
    for epoch in range(12):
        loader.set_epoch(epoch)
        for batch in loader:
            assert torch.equal(batch["latents"], batch["control"])
            for name, mask, corner in zip(batch["names"], batch["mask"], batch["crop_top_left"], strict=True):
                top, left = corner.tolist()
                right = covering_width(data / name) - 64 - left
                upright, flipped = (placed(data / name, data / name, top, side) for side in (left, right))
                ways = upright, np.flip(flipped, axis=1)
                fitting = [np.array_equal((mask[0] * 255).round(), np.rint(means(way))) for way in ways]
                assert sum(fitting) == 1, "the crop of the batch, one way round"
                seen.add((name, fitting[1], top, left))
    assert len(seen) >= (16 if crop[:2] == ("--crop", "random") else 8)


def test_control_latents_equal_a_plain_loop_of_diffusers(data, tmp_path):
    save(data / "3-condlabel.png", noise(77, 166, 192))
    model = tiny_vae(tmp_path / "vae")
    words = ("--model", model, "--resolution", 64, "--bucket-step", 32, "--storage-dtype", "float32")
    with in_threads():
        done = build(data, *words, "--compute-dtype", "float32", "--resample", "lanczos-pil")
    assert notes(done)["control-scaled"] == 1
    vae = diffusers.AutoencoderKL.from_pretrained(model)
    batch = batch_of(data, fields=["control", "crop_top_left"])
    corners = batch["crop_top_left"].tolist()
    for name, latents, (top, left) in zip(batch["names"], batch["control"], corners, strict=True):
        cut = placed(data / name.replace(".png", "-condlabel.png"), data / name, top, left)
        pixels = torch.from_numpy(cut.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        with torch.no_grad():
            wanted = vae.encode(pixels).latent_dist.mode()[0] * vae.config.scaling_factor
        assert torch.allclose(latents, wanted, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* for lack of")
def test_bad_masks_and_control_images_cost_only_their_own_field(data, monkeypatch):
    (data / "0-condlabel.png").unlink()
    (data / "1-condlabel.png").write_bytes((data / "1-condlabel.png").read_bytes()[:-40])
    (data / "2-masklabel.png").write_text("<html>")
    monkeypatch.setattr("latentcache.sources.known.RACY_NS", 0)
    done = build(data, *STUB, code=1)
    bad = {item["path"]: item for item in done["items"] if item["category"] == "quarantined"}
    assert {path: (item["field"], item["reason"]) for path, item in bad.items()} == {
        "0.png": ("control", "no-control"),
        "1.png": ("control", "truncated"),
        "2.png": ("mask", "html"),
    }
    assert "1-condlabel.png: " in bad["1.png"]["found"]
    assert "2-masklabel.png: " in bad["2.png"]["found"]
    assert all(item["hint"] for item in bad.values())
    cache = open_cache(data.parent / "cache")
    counts = [len(cache.loader(batch_size=1, fields=[name])) for name in ("latents", "control", "mask")]
    assert (counts, len(cache.loader(batch_size=1))) == ([6, 4, 5], 3)
    monkeypatch.setattr("latentcache.pipeline.build.Run", None)
    assert encoded(build(data, code=1)) == {"latents": 0, "mask": 0, "control": 0}, "bad files are not read again"
    monkeypatch.undo()
    save(data / "0-condlabel.png", noise(50))
    save(data / "1-condlabel.png", noise(51))
    assert encoded(build(data, code=1)) == {"latents": 0, "mask": 0, "control": 2}


@pytest.mark.parametrize("has_control", [True, False])
def test_a_damaged_image_with_a_control_image_is_rejected_until_its_bytes_change(data, has_control):
    if not has_control:
        (data / "1-condlabel.png").unlink()
    whole = (data / "1.png").read_bytes()
    (data / "1.png").write_bytes(whole[:20])
    build(data, *STUB, code=1)

    def states():
        checked = look("verify", data.parent / "cache", "--json").json["counts"]
        return {state: number for state, number in checked.items() if number}

    assert states() == {"ok": 5, "quarantined": 1}
    (data / "1.png").write_bytes(whole)
    assert states() == {"ok": 5, "stale": 1}
    build(data, code=not has_control)
    assert states() == ({"ok": 6} if has_control else {"ok": 5, "quarantined": 1})


def test_a_renamed_mask_encodes_nothing(data):
    (data / "mask").mkdir()
    for number in range(6):
        (data / f"{number}-masklabel.png").rename(data / f"mask/{number}.png")
    build(data, *STUB, "--masks", "mask")
    (data / "mask/0.png").rename(data / "mask/0.webp")
    assert look("verify", data.parent / "cache", "--json").json["counts"]["ok"] == 6


def test_masks_from_transparency_and_switches(tmp_path):
    data = tmp_path / "data"
    shade = np.full((64, 64), 255, dtype=np.uint8)
    shade[:32] = 51
    Image.fromarray(np.dstack([noise(1, 64, 64), shade])).save(tmp_path / "a.png")
    data.mkdir()
    (tmp_path / "a.png").rename(data / "a.png")
    save(data / "b.jpg", noise(2, 64, 64))
    save(data / "b-condlabel.png", noise(3, 64, 64))
    build(data, *STUB, "--masks", "alpha", "--controls", "none")
    assert list(fields_of(data)) == ["latents", "mask"]
    batch = batch_of(data, size=2, fields=["mask"])
    rows = dict(zip(batch["names"], batch["mask"][:, 0].mean(dim=2).tolist(), strict=True))
    assert rows == {"a.png": pytest.approx([0.2] * 4 + [1.0] * 4), "b.jpg": [1.0] * 8}


@pytest.mark.parametrize(
    "more", [["--flip"], ["--resolution", "128"], ["--model", "stub"], ["--resample", "lanczos-u8"]]
)
def test_settings_of_masks_that_differ_from_their_latents_are_an_error(data, more):
    build(data, "--resolution", "64", "--resample", "lanczos-pil")
    done = look("build", data, "--out", data.parent / "cache", "--fields", "mask", *more)
    assert (done.status, f"{more[0]}: the latents have other settings" in done.err) == (2, True)
    build(data, "--fields", "mask", "--resolution", "64", "--model", "demo", "--no-flip")  # as they are
    build(data, "--fields", "latents,mask", *more)
    build(data, *more)


def test_transparent_parts_of_a_mask_do_not_count(tmp_path):
    """Transparent pixels of a mask may have any color."""
    data = tmp_path / "data"
    save(data / "a.png", noise(1, 64, 64))
    paint = np.full((64, 64, 4), 255, dtype=np.uint8)
    paint[32:, :, 3] = 0
    save(data / "a-masklabel.png", paint)
    build(data, *STUB)
    assert batch_of(data, size=1, fields=["mask"])["mask"][0, 0].mean(dim=1).tolist() == [1.0] * 4 + [0.0] * 4
