"""SimpleTuner #977: ``latent shape mismatch [16,88,136] != [16,88,144]``, because build and check round differently.

In SimpleTuner two functions compute a size: one rounds down to 64 pixels, one to the nearest. Here one integer
function computes it once; it is stored with the entry, and plan, verify and reader use it. The tests fail if one of
the four rounds differently: the image of 1130 x 704 pixels is between the buckets of 1088 and 1152 pixels.
"""

import hashlib
import json

import pytest
import torch
from small_cache import build, draw
from trained_steps import train

from latentcache import open_cache
from latentcache.geometry.like.simpletuner import SimpleTunerTable
from latentcache.geometry.sizes import Size, explicit_table, latent_size, place_in
from latentcache.verify.verify import verify_cache

NARROW, WIDE = Size(704, 1088), Size(704, 1152)
#: Widths inside one bucket, inside the other, and that of the report.
WIDTHS = (1080, 1088, 1089, 1100, 1119, 1120, 1121, 1130, 1151, 1152, 1153, 1160)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build images of all widths in the two buckets."""
    folder = tmp_path_factory.mktemp("shapes")
    for width in WIDTHS:
        draw(folder / "data" / f"w{width}.png", (width, 704), seed=width)
    build(folder / "data", folder / "cache", resolutions=(), buckets=(NARROW, WIDE))
    return folder


def expected_buckets():
    table = explicit_table((NARROW, WIDE), multiple=64)
    return {f"w{width}.png": place_in(Size(704, width), table.nearest(Size(704, width))) for width in WIDTHS}


def test_the_latent_shapes_of_the_report():
    assert (latent_size(NARROW, 8), latent_size(WIDE, 8)) == (Size(88, 136), Size(88, 144))
    # The narrow bucket keeps more of an image up to sqrt(1088 * 1152) = 1119.5 pixels.
    wide = {name for name, placed in expected_buckets().items() if placed.bucket == WIDE}
    assert wide == {f"w{width}.png" for width in (1120, 1121, 1130, 1151, 1152, 1153, 1160)}


def test_build_verify_plan_and_reader_agree(run, built):
    expected = expected_buckets()
    opened = open_cache(built / "cache")
    served = {}
    for batch in opened.loader(batch_size=1):
        (name,) = batch["names"]
        placed = expected[name]
        cells = latent_size(placed.bucket, 8)
        assert batch["latents"].shape == (1, 4, cells.height, cells.width)
        assert Size(*batch["target_size"][0].tolist()) == placed.bucket
        assert tuple(batch["crop_top_left"][0].tolist()) == (placed.top, placed.left)
        served[name] = placed.bucket
    assert set(served) == set(expected)
    assert verify_cache(built / "cache", full=True).counts["ok"] == len(WIDTHS)
    words = ["--bucket", "704x1088", "--bucket", "704x1152", "--bucket-step", "8", "--model", "stub"]
    assert run("verify", built / "cache", *words).status == 0
    for target in ([built / "cache"], [built / "data", *words]):
        value = run("plan", *target, "--batch-size", "1", "--json").json
        counted = {Size(b["height"], b["width"]): b["samples"] for b in value["buckets"]}
        assert counted == {bucket: list(served.values()).count(bucket) for bucket in (NARROW, WIDE)}


def test_a_cache_of_another_rounding_is_named_before_training(built, monkeypatch):
    """``verify`` reports entries that were stored in another bucket than today's rule gives."""
    table = explicit_table((NARROW, WIDE), multiple=64)

    def nearest_64(_, size):
        return WIDE if size.width >= 1088 + 1 else NARROW

    monkeypatch.setattr("latentcache.geometry.sizes.BucketTable.nearest", nearest_64)
    report = verify_cache(built / "cache")
    monkeypatch.undo()
    moved = {f"w{w}.png" for w in WIDTHS if table.nearest(Size(704, w)) != nearest_64(None, Size(704, w))}
    assert {f.path for f in report.findings if f.reason == "geometry-changed"} == moved
    assert moved
    finding = report.findings[0]
    assert (finding.expected, finding.found) == ("704x1152", "704x1088")
    assert report.exit_code() == 1


#: Two images whose buckets SimpleTuner calls ``0.56``, and for which it computes two sizes.
PAIR = {"a.png": Size(500, 280), "b.png": Size(500, 285)}


def scanned(names):
    """Sizes as SimpleTuner's scan gives them: the first image of a ratio decides for all later ones."""
    first, sizes = dict[float, Size](), dict[str, Size]()
    for name in names:
        image = PAIR[name]
        root = round(image.width / image.height, 2) ** 0.5
        computed = Size(round(512 / root / 8) * 8, round(512 * root / 8) * 8)
        sizes[name] = first.setdefault(round(computed.width / computed.height, 2), computed)
    return sizes


def test_the_order_of_files_decides_a_size_in_simpletuner():
    """Latents of one scan, and a new output folder with another order: the mismatch of the report."""
    before, after = scanned(["a.png", "b.png"]), scanned(["b.png", "a.png"])
    assert (before["a.png"], after["a.png"]) == (Size(688, 384), Size(680, 384))
    cells = [latent_size(sizes[name], 8) for sizes, name in ((before, "a.png"), (after, "b.png"))]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([torch.zeros(16, size.height, size.width) for size in cells])


def test_from_the_images_to_batches_of_one_shape(run, tmp_path):
    """A ratio has one size in any order, and the export says it to the trainer; ``tests/peers`` trains from it."""
    data, cache, out = (tmp_path / name for name in ("data", "cache", "out"))
    like = {"like": "simpletuner", "resolutions": (512,), "bucket_step": 8}
    for number, (name, size) in enumerate(PAIR.items()):
        draw(data / name, (size.width, size.height), seed=number)
        (data / name).with_suffix(".txt").write_text(f"caption {number}", "utf-8")
    build(data, cache, **like)
    for renamed in (False, True):  # then the other one is the first
        if renamed:
            for end in ("png", "txt"):
                (data / f"a.{end}").rename(data / f"z.{end}")
            assert build(data, cache, **like).encoded == 0
        assert run("export", cache, out, "--to", "simpletuner").status == 0
        folder = out / "images-1x"
        sizes = json.loads((folder / "aspect_ratio_bucket_metadata_images-1x-512.json").read_text("utf-8"))
        (bucket,) = {tuple(entry["target_size"]) for entry in sizes.values()}
        assert len(sizes) == 2
        files = [
            out / f"vae/images-1x-512/{hashlib.sha256(name.encode()).hexdigest()}.pt" for name in ("b", "az"[renamed])
        ]
        batch = torch.stack([torch.load(file, weights_only=True) for file in files])
        assert batch.shape[2:] == (bucket[1] // 8, bucket[0] // 8)
        assert train([batch]) == 1
    assert SimpleTunerTable(resolution=Size(512, 512), step=8).nearest(PAIR["a.png"]) == Size(bucket[1], bucket[0])


def test_explicit_buckets_are_refused_with_the_build_that_fits(run, built):
    error = run("export", built / "cache", built / "out", "--to", "simpletuner", "--json").error
    assert "the trainer has no such sizes" in error["what"]
    assert error["fix"].endswith("--like simpletuner")
