"""Scale and shift, posterior draws, dtypes and flips, compared with their formulas."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_caches import documents, images, latents_of, opened, texts

from latentcache.errors import UsageError
from latentcache.identity.content import gaussian
from latentcache.loader.values import Affine, posterior, without_team
from latentcache.store import gather

KEYS = np.arange(96, dtype=np.uint8).reshape(3, 32)
KINDS = [
    {"kind": "none"},
    {"kind": "scale-shift", "scale": 0.18215},
    {"kind": "scale-shift", "scale": 0.3611, "shift": 0.1159},
    {"kind": "mean-std", "scale": 2.0, "mean": (0.1, -0.2, 0.3, 0.4), "std": (1.0, 2.0, 0.5, 3.0)},
    {"kind": "batch-norm", "patch": 2, "mean": tuple(np.linspace(-1, 1, 16)), "std": tuple(np.linspace(0.5, 2, 16))},
]


def reference(z, spec):
    """Compute in float64 as diffusers pipelines do; also return the largest intermediate value."""
    z, scale = z.double(), spec.get("scale", 1.0)
    if spec["kind"] == "none":
        return z, z.abs()
    if spec["kind"] == "batch-norm":
        z = torch.nn.functional.pixel_unshuffle(z, spec["patch"])
    column = (1, -1, *(1,) * (z.dim() - 2))
    mean, std = (
        torch.tensor(spec.get(name, default), dtype=torch.float64).view(column)
        for name, default in (("mean", spec.get("shift", 0.0)), ("std", 1.0))
    )
    return (z - mean) / std * scale, torch.maximum(z.abs(), mean.abs()) / std * abs(scale)


def assert_rounded_once(scaled, z, spec):
    """Allow half a step of the type, and a few float32 steps of the largest intermediate value."""
    exact, largest = reference(z, spec)
    info = torch.finfo(scaled.dtype)
    half = exact.abs().clamp(min=info.tiny) * info.eps / 2
    assert scaled.shape == exact.shape
    inside = exact.abs() < info.max
    assert ((scaled.double() - exact).abs() <= half + largest * 3 * 2.0**-24)[inside].all()


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: f"{spec['kind']}{'-shift' * ('shift' in spec)}")
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_computed_in_float32_and_rounded_once(spec, stored, wanted):
    z = torch.randn((3, 4, 6, 10), generator=torch.Generator().manual_seed(0)).to(stored)
    kept, out = z.clone(), z if stored == wanted else torch.empty(z.numel(), dtype=wanted)
    scaled = Affine.of(spec).apply(z, out)
    assert_rounded_once(scaled, kept, spec)
    assert scaled.data_ptr() == out.data_ptr()
    assert spec["kind"] != "none" or torch.equal(scaled, kept.to(wanted))


@pytest.mark.parametrize("width", [77, 30_007], ids=["in a piece", "across pieces"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("spec", KINDS[1:4], ids=lambda spec: f"{spec['kind']}{'-shift' * ('shift' in spec)}")
def test_values_scaled_during_reads_are_bit_equal(tmp_path, library, monkeypatch, name, spec, width):
    monkeypatch.setattr(gather, "LIBRARY", gather.compiled(library))
    dtype, affine = getattr(torch, name), Affine.of(spec)
    random = torch.Generator().manual_seed(7)
    z = (torch.randn((9, 4, 3, width), generator=random) * 10.0 ** torch.arange(-6, 3).view(9, 1, 1, 1)).to(dtype)
    z[:, :, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, -float("inf")], dtype=dtype)
    data = z.view(torch.uint8).numpy().reshape(9, -1)
    (tmp_path / "f").write_bytes(data.tobytes())
    out, at = np.zeros(data.size, np.uint8), np.arange(9) * data.shape[1]
    with (tmp_path / "f").open("rb") as file:
        pieces = np.stack([np.full(9, file.fileno()), at, np.full(9, data.shape[1]), at])
        assert gather.read_pieces(pieces, out, affine.scaling(name)) == 9
        stored = np.zeros(data.size, np.uint8)
        assert gather.read_pieces(pieces, stored) == 9
    assert np.array_equal(stored, data.reshape(-1))
    gather.scale_pieces(pieces, stored, affine.scaling(name))
    assert np.array_equal(stored, out)
    scaled = torch.from_numpy(out).view(dtype).view(z.shape)
    expected = affine.apply(z.clone(), torch.empty(z.numel(), dtype=dtype))
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(scaled.isnan(), expected.isnan())
    assert torch.equal(scaled.nan_to_num().view(kind), expected.nan_to_num().view(kind))
    assert_rounded_once(scaled[:, :, 1:], z[:, :, 1:], spec)


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(-4, 4), st.floats(0.05, 8)), min_size=1, max_size=9),
    st.floats(0.01, 10),
    st.integers(0, 2**32),
)
def test_any_statistics_agree_with_float64(stored, wanted, batch, statistics, scale, seed):
    random = torch.Generator().manual_seed(seed)
    z = (torch.randn((batch, len(statistics), 3, 70), generator=random) * 5).to(stored)
    mean, std = zip(*statistics, strict=True)
    for spec in (
        {"kind": "scale-shift", "scale": scale, "shift": mean[0]},
        {"kind": "mean-std", "scale": scale, "mean": mean, "std": std},
    ):
        assert_rounded_once(Affine.of(spec).apply(z, torch.empty(z.numel(), dtype=wanted)), z, spec)
        if stored == wanted:
            in_place = z.clone()
            assert_rounded_once(Affine.of(spec).apply(in_place, in_place), z, spec)


def test_an_unknown_kind_is_rejected():
    with pytest.raises(UsageError, match="unknown scaling 'cubic'"):
        Affine.of({"kind": "cubic"})


def test_reader_threads_keep_the_thread_settings_of_torch():
    """Torch's thread teams outlive the call."""
    kept = torch.get_num_threads()
    torch.set_num_threads(2)

    def count():
        return len(list(Path("/proc/self/task").iterdir()))

    def work():
        before.append((count(), torch.get_num_threads()))
        with without_team():
            for spec in (
                {"kind": "scale-shift", "scale": 0.5},
                {"kind": "mean-std", "mean": [0.0] * 16, "std": [1.0] * 16},
                {"kind": "batch-norm", "patch": 2, "mean": [0.0] * 64, "std": [1.0] * 64},
            ):
                Affine.of(spec).apply(z, torch.empty(z.numel()))
            posterior(z, KEYS[:2], torch.empty(2, 8, 256, 256), "sample", (0, 0))
        after.append((count(), torch.get_num_threads()))

    z, before, after, later = torch.randn(2, 16, 256, 256).to(torch.float16), [], [], []
    for run in (work, lambda: later.append(torch.get_num_threads())):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert after == before
    assert later == [torch.get_num_threads()] == [2]
    torch.set_num_threads(kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_draw_is_mean_and_deviation_times_noise(dtype):
    moments = torch.randn((3, 8, 40, 60), generator=torch.Generator().manual_seed(1)).to(dtype)
    kept, draws = moments.clone(), torch.empty((3, 4, 40, 60))
    posterior(moments, KEYS, draws, "sample", (5, 2))
    for key, item, drawn in zip(KEYS, moments.double(), draws, strict=True):
        noise = torch.from_numpy(gaussian(9600, b"read", 5, 2, key.tobytes())).double().view(4, 40, 60)
        torch.testing.assert_close(drawn.double(), item[:4] + (item[4:] / 2).exp() * noise, atol=1e-5, rtol=1e-5)
    assert torch.equal(moments, kept)
    for order in ([1], [2, 0]):
        again = torch.empty((len(order), 4, 40, 60))
        posterior(moments[order], KEYS[order], again, "sample", (5, 2))
        assert torch.equal(again, draws[order])
    posterior(moments, KEYS, draws, "mode", (0, 0))
    assert torch.equal(draws, moments[:, :4].float())


def read_latents(loader, epoch=0):
    loader.set_epoch(epoch)
    return {name: latents for batch in loader for name, latents in zip(batch["names"], batch["latents"], strict=True)}


def same(first, other):
    return first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


def test_draws_depend_on_seed_epoch_and_key_only(tmp_path):
    cache = opened(images(tmp_path / "c", [(64, 64)] * 3 + [(64, 96)] * 2, posterior="moments"))
    first = read_latents(cache.loader(batch_size=1, seed=3), 1)
    assert first["00.png"].shape == (4, 8, 8)
    assert first["00.png"].dtype == torch.float16
    assert same(first, read_latents(cache.loader(batch_size=3, seed=3, prefetch=0, remainder="partial"), 1))
    ranks = [read_latents(cache.loader(batch_size=1, seed=3, rank=rank, world_size=2), 1) for rank in range(2)]
    assert same(first, dict(sorted((ranks[0] | ranks[1]).items(), key=lambda pair: list(first).index(pair[0]))))
    for other in (
        read_latents(cache.loader(batch_size=1, seed=4), 1),
        read_latents(cache.loader(batch_size=1, seed=3), 2),
    ):
        assert not any(torch.equal(other[name], first[name]) for name in first)
    mean = read_latents(cache.read(augment=False).loader(batch_size=1))
    stored = latents_of(cache)
    for (sample, _, _), array in stored.items():
        assert np.array_equal(mean[f"{sample:02}.png"].numpy(), array[:4])


@pytest.mark.usefixtures("each_way")
def test_dtype_and_scaling_options(tmp_path):
    cache = opened(images(tmp_path / "c", [(64, 64)] * 3, kind="scale-shift", scale=0.5, shift=0.25))
    raw = read_latents(cache.read(scaled=False).loader(batch_size=1))
    exact = read_latents(cache.read(dtype=torch.float32).loader(batch_size=2))
    for name, latents in read_latents(cache.loader(batch_size=1)).items():
        expected = (raw[name].float() - 0.25) * 0.5
        assert torch.equal(exact[name], expected)
        assert torch.equal(latents, expected.half())


def test_flips_depend_on_seed_epoch_and_content(tmp_path):
    cache = opened(images(tmp_path / "c", [(64, 64)] * 40, flip=True))
    stored = latents_of(cache)
    counts = []
    for epoch in range(3):
        loader = cache.loader(batch_size=8, seed=1)
        served = read_latents(loader, epoch)
        flipped = {
            name for name, latents in served.items() if np.array_equal(latents.numpy(), stored[int(name[:2]), 0, 1])
        }
        unflipped = {
            name for name, latents in served.items() if np.array_equal(latents.numpy(), stored[int(name[:2]), 0, 0])
        }
        assert flipped | unflipped == set(served)
        counts.append(frozenset(flipped))
        again = cache.loader(batch_size=8, seed=1, rank=1, world_size=2)
        assert all(torch.equal(latents, served[name]) for name, latents in read_latents(again, epoch).items())
    assert len(set(counts)) == 3
    assert all(8 < len(names) < 32 for names in counts)
    plain = read_latents(cache.read(augment=np.bool_(False)).loader(batch_size=8))
    assert all(np.array_equal(latents.numpy(), stored[int(name[:2]), 0, 0]) for name, latents in plain.items())
    for batch in cache.loader(batch_size=8):
        keys = batch["keys"]["latents"]
        assert [int(key[1]) for key in keys] == batch["crop_top_left"][:, 1].tolist()  # columns of the variant


@pytest.mark.parametrize("dtype", ["float32", torch.int32])
def test_only_floating_types_are_allowed(many, dtype):
    with pytest.raises(UsageError, match="must be a floating type"):
        many.read(dtype=dtype)


def test_caption_dropout_without_captions_is_an_error(tmp_path, many):
    plain = opened(images(tmp_path / "cache", [(64, 96)] * 4, captions=False))
    with pytest.raises(UsageError, match="no captions") as caught:
        plain.read(caption_dropout=0.1)
    assert caught.value.slug == "no-prompt"
    cache = many.read(caption_dropout=1.0)
    assert {text for batch in cache.loader(batch_size=8) for text in batch["captions"]} == {""}
    with pytest.raises(UsageError, match="no captions"):
        cache.loader(batch_size=8, fields=["latents"])


def test_caption_dropout_is_an_error_for_documents(tmp_path):
    cache = opened(documents(tmp_path / "cache", texts(4)))
    with pytest.raises(UsageError, match="holds documents"):
        cache.read(caption_dropout=0.1)
    cache.read(augment=False, repeats=False)
