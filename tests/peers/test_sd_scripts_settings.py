"""What a configuration says reaches sd-scripts and lora-scripts through our folders: flips, sets, masks, sizes."""

import json
import sys

import numpy as np
import pytest
import torch
from checkouts import CHECKOUTS, exported
from made_pipelines import tiny_vae
from make_images import make_images
from PIL import Image
from test_sd_scripts import exported_for, serve

from latentcache import open_cache
from latentcache.cli.app import main
from latentcache.geometry.sizes import Size
from latentcache.images.decode import cut, encoded_file

pytestmark = pytest.mark.peers
SCRIPTS = [name for name in CHECKOUTS if "-scripts-" in name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_flips_are_taken(sets, vaes, tmp_path, name):
    cache, out = exported_for(name, "sdxl", sets, tmp_path, vaes / "sdxl", "--flip")
    served, counts = serve(name, out, "sdxl", draw="0")
    assert counts is not None, served
    flips, plain = (
        open_cache(cache)
        .read(scaled=False, augment=flip, repeats=False, dtype=torch.float32)
        .loader(batch_size=1, seed=0 if flip else None)
        for flip in (True, False)
    )
    for row in range(10):
        batch = plain.batch([row])
        drawn = (flips.batch([row], epoch=epoch)["latents"][0].numpy() for epoch in range(64))
        flipped = next(values for values in drawn if not np.array_equal(values, batch["latents"][0].numpy()))
        start = f"{batch['names'][0].rpartition('/')[2]}@"
        latents = next(value for key, value in served.items() if key.startswith(start) and key.endswith("/latents"))
        np.testing.assert_array_equal(latents, flipped)


CONFIG = """
[general]
enable_bucket = true
min_bucket_reso = 128
max_bucket_reso = 512
caption_extension = ".cap"
[[datasets]]
resolution = [192, 320]
[[datasets.subsets]]
image_dir = "DATA/2_cats"
num_repeats = 3
class_tokens = "sks cat"
caption_prefix = "photo of"
[[datasets.subsets]]
image_dir = "DATA/1_dogs"
is_reg = true
class_tokens = "dog"
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_sets_of_a_configuration_are_those_of_the_trainer(sets, vaes, tmp_path, capsys, name):
    config = tmp_path / "dataset.toml"
    config.write_text(CONFIG.replace("DATA", str(sets)))
    options = ("--trainer-config", config)
    cache, out = exported_for(name, "sdxl", sets, tmp_path, vaes / "sdxl", *options, export=options)
    served, counts = serve(name, out, "sdxl")
    assert counts is not None, served
    captions = {key.partition("@")[0]: value.item() for key, value in served.items() if key.endswith("/caption")}
    assert captions == {f"p{n}.png": "photo of sks cat" if n < 6 else "dog" for n in range(10)}
    samples = open_cache(cache).snapshots[0].samples
    repeats = dict(zip((name.rpartition("/")[2] for name in samples.names), samples.columns["repeats"], strict=True))
    assert sum(counts["repeats"].values()) == sum(map(int, repeats.values())) == 36
    capsys.readouterr()
    words = ("plan", sets, "--model", vaes / "sdxl", *options, "--for", "kohya", "--batch-size", "2")
    assert main([*map(str, words), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trainer"]["batches_per_epoch"] == counts["batches"]
    shown = {tuple(value.tolist()) for key, value in served.items() if key.endswith("/target_sizes_hw")}
    assert max(height * width for height, width in shown) <= 192 * 320


@pytest.mark.parametrize("name", SCRIPTS)
def test_masks_in_files_are_read(sets, vaes, tmp_path, name):
    data = tmp_path / "data"
    for path in sorted(sets.rglob("*.png")):
        target = data / path.relative_to(sets)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
        with Image.open(path) as image:
            mask = Image.new("L", image.size, 51 * (int(path.stem[1:]) % 6))
        (data / "weights").mkdir(exist_ok=True)
        mask.save(data / "weights" / path.name)
    words = ("--masks", "weights", "--layout", "kohya", "--follow-links", "--flip")
    _, out = exported_for(name, "sdxl", data, tmp_path, vaes / "sdxl", *words)
    served, counts = serve(name, out, "sdxl")
    assert counts is not None, served
    assert counts["images"] == 10
    for key, mask in served.items():
        if key.endswith("/mask"):
            expected = 51 * (int(key[1]) % 6) / 127.5 - 1
            np.testing.assert_allclose(mask, expected, atol=1e-2)
    assert sum(key.endswith("/mask") for key in served) == 10


@pytest.mark.parametrize("name", SCRIPTS)
def test_alpha_masks_weigh_the_loss_as_the_masks_of_the_cache(vaes, tmp_path, name):
    """The trainer shrinks a mask by means (``apply_masked_loss``), which gives the mask of the cache back."""
    random = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for number, mode in enumerate(("RGBA", "RGBA", "RGB")):
        values = random.integers(0, 256, (240, 400, len(mode)), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / f"data/p{number}.png")
    words = ("--masks", "alpha", "--layout", "folder")
    cache, out = exported_for(name, "sdxl", tmp_path / "data", tmp_path, vaes / "sdxl", *words)
    served, counts = serve(name, out, "sdxl")
    assert counts is not None, served
    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(3):
        batch = loader.batch([row])
        (alpha,) = [served[key] for key in served if key.startswith(batch["names"][0]) and key.endswith("/alpha")]
        height, width = batch["mask"].shape[-2:]
        shrunk = torch.nn.functional.interpolate(torch.from_numpy(alpha)[None, None], (height, width), mode="area")
        torch.testing.assert_close(shrunk, batch["mask"].float(), rtol=0, atol=1e-6)


def test_the_distance_to_the_latents_of_the_trainer(tmp_path, capsys):
    """Its pixels are resized by OpenCV (``INTER_AREA``), ours by Lanczos; a VAE of random weights encodes both."""
    make_images(tmp_path / "data", count=24, side=900)
    for path in list((tmp_path / "data").glob("*.[jpw]*")):  # transparency and EXIF data move more than the resize
        with Image.open(path) as image:
            is_plain = image.mode == "RGB" and image.getexif().get(0x0112, 1) == 1
        if not is_plain:
            path.unlink()
    words, export = ("--resolution", "512", "--layout", "folder"), ("--release", "plain", "--architecture", "sdxl")
    cache, out = exported("kohya", tmp_path / "data", tmp_path, "stub", *words, export=export)
    theirs, _ = serve("sd-scripts-48d368f", out, "sdxl", "pixels")
    recipe = open_cache(cache).recipe()
    torch.manual_seed(0)
    vae = tiny_vae()
    pixels, latents, scale = [], [], []
    for name, cropped in theirs.items():
        (path,) = out.rglob(name)
        with Image.open(path) as image:
            placement = recipe.geometry.place(Size(image.height, image.width), Size(*cropped.shape[:2]))
        ours = cut(encoded_file(path.read_bytes()), [placement], 1, recipe)[placement]
        both = torch.from_numpy(np.stack([ours, cropped])).permute(0, 3, 1, 2) / 127.5 - 1
        with torch.no_grad():
            means = vae.encode(both).latent_dist.mean
        pixels.append(float(((both[0] - both[1]) * 127.5).square().mean()))
        latents.append(float((means[0] - means[1]).square().mean()))
        scale.append(float(means[0].var()))
    rms = [float(np.sqrt(np.mean(values))) for values in (pixels, latents, scale)]
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(theirs)} images: rms {rms[0]:.2f} of 255 levels, latents {rms[1] / rms[2]:.3f} of their std\n"
        )
    assert len(theirs) >= 10
    assert rms[0] < 8
    assert rms[1] < 0.2 * rms[2]
