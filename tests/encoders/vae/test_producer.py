import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from described_models import described_model
from made_weights import rewrite
from PIL import Image

from latentcache.encoders.vae import producer as producer_module
from latentcache.encoders.vae.builtin import Encoder, Pending, StubEncoder, builtin_spec
from latentcache.encoders.vae.describe import describe
from latentcache.encoders.vae.producer import VaeProducer, checked_noise, open_encoder
from latentcache.errors import DeviceMemoryError, EncoderError, UsageError
from latentcache.fields.dtypes import is_finite
from latentcache.fields.latents import LatentsSettings
from latentcache.fields.protocol import DescribeContext, Failure, Job, Output, ProducerContext
from latentcache.geometry.sizes import Size, flipped, place_in
from latentcache.images import decode as decode_module
from latentcache.images.decode import decode
from latentcache.images.resize import pixel_hash, resize_crop
from latentcache.pipeline.diff import AGAIN
from latentcache.pipeline.workers.batching import attempt, read_inputs


def draw(path, seed=1, height=80, width=70, **options):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, **options)
    return path


def opened(root, buckets=((64, 64),), *, options=None, **settings):
    settings = {"model": "stub", "buckets": tuple(Size(*bucket) for bucket in buckets)} | settings
    described = describe(LatentsSettings(**settings), DescribeContext(device="cpu"))
    groups = tuple(described.recipe.group(Size(*bucket)) for bucket in buckets)
    context = ProducerContext(root=str(root), device="cpu", groups=groups, options=options or {})
    producer = VaeProducer(json.loads(json.dumps(described.producer)), described.recipe, context)
    producer.open()
    return producer


def job(name, *outputs, size=None):
    columns = {} if size is None else {"original_size": list(size)}
    outputs = outputs or (Output(item=0, group=0),)
    return Job(sample=0, name=name, inputs={"image": {"path": name}}, sample_columns=columns, outputs=outputs)


def prepare(producer, job):
    """Read and prepare the image of a job as the engine does."""
    return attempt(lambda: producer.prepare(job, read_inputs(producer._context.root, job).data))


def test_an_image_is_read_and_decoded_once_for_all_its_outputs(tmp_path, monkeypatch):
    path = draw(tmp_path / "a.png")
    opens, decodes = [], []
    real = decode_module.header
    monkeypatch.setattr(decode_module, "header", lambda *args, **more: opens.append(1) or real(*args, **more))
    check = decode_module.check_png
    monkeypatch.setattr(decode_module, "check_png", lambda data: decodes.append(1) or check(data))
    outputs = [Output(item=n, group=g, variant=v) for n, (g, v) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)])]
    producer = opened(tmp_path, ((64, 64), (32, 64)), flip=True)
    items = prepare(producer, job("a.png", *outputs, size=(80, 70)))
    assert (len(opens), len(decodes)) == (1, 1)
    pixels = decode(path.read_bytes(), producer._recipe.pixels)
    for item, output in zip(items, outputs, strict=True):
        upright = place_in(Size(80, 70), Size(*((64, 64), (32, 64))[output.group]))
        expected = resize_crop(pixels, upright, "lanczos-pil")
        expected = expected[:, ::-1] if output.variant else expected
        placement = flipped(upright) if output.variant else upright
        assert np.array_equal(item.value, expected)
        assert item.same == pixel_hash(expected)
        assert item.columns["crop"] == (placement.top, placement.left)
        assert item.columns["resize"] == (placement.resize.height, placement.resize.width)
        assert (item.output, item.num_bytes) == (output, expected.nbytes)


def test_a_changed_file_size_is_a_failure(tmp_path):
    draw(tmp_path / "a.png", height=200)
    failure = prepare(opened(tmp_path), job("a.png", size=(80, 70)))
    assert failure.reason == "changing"
    assert failure.detail == "it was 80x70 when the build was planned and is 200x70 now"
    assert "changing" in AGAIN


def test_missing_files_and_too_many_pixels(tmp_path):
    draw(tmp_path / "a.png")
    assert prepare(opened(tmp_path), job("b.png")).reason == "not-found"
    assert prepare(opened(tmp_path, options={"max_pixels": 100}), job("a.png")).reason == "too-many-pixels"


def test_an_image_too_large_for_memory_is_a_failure(tmp_path, monkeypatch):
    draw(tmp_path / "a.png")

    def no_memory(*args, **options):
        raise MemoryError

    monkeypatch.setattr(decode_module, "resize_crop", no_memory)
    failure = prepare(opened(tmp_path), job("a.png"))
    assert failure.reason == "out-of-memory"


def test_items_keep_their_pixels_when_the_next_image_is_decoded(tmp_path):
    """Images of the bucket's size are not resampled; they must not share decoder memory."""
    producer = opened(tmp_path)
    for number in range(4):
        draw(tmp_path / f"{number}.jpg", number, height=64, width=64)
    items = [item for number in range(4) for item in prepare(producer, job(f"{number}.jpg"))]
    assert len({item.same for item in items}) == 4
    assert [pixel_hash(item.value) for item in items] == [item.same for item in items]


class Faulty(Encoder):
    """The stub with faults for chosen images, matched by pixels."""

    def __init__(self, broken=(), *, mends=False, value=np.nan, precise_memory=True, most=None, **options):
        self.stub = StubEncoder(builtin_spec(**options))
        self.spec, self.calls = self.stub.spec, []
        self.broken = [pixels.tobytes() for pixels in broken]
        self.mends, self.value, self.precise_memory, self.most = mends, value, precise_memory, most

    def submit(self, images, *, precise=False):
        self.calls.append((len(images), precise))
        if (precise and not self.precise_memory) or (self.most is not None and len(images) > self.most):
            raise DeviceMemoryError("no memory left", why=f"{len(images)} images are too many")
        latents = self.stub.encode(np.stack(images)).copy()
        for number, image in enumerate(images):
            if image.tobytes() in self.broken and not (precise and self.mends):
                latents[number, 0, 0, 0] = self.value
        return Pending(lambda: latents)


@pytest.fixture
def four(tmp_path):
    for number in range(4):
        draw(tmp_path / f"{number}.png", number)

    def make(**settings):
        producer = opened(tmp_path, **settings)
        return producer, [prepare(producer, job(f"{number}.png"))[0] for number in range(4)]

    return make


def encoded_alone(items):
    return [StubEncoder(builtin_spec()).encode(item.value[None])[0].tobytes() for item in items]


def test_non_finite_latents_are_retried_in_float32(four):
    producer, items = four()
    producer._encoder = Faulty([items[2].value], mends=True)
    assert [item.array.tobytes() for item in producer.encode(items).result()] == encoded_alone(items)
    assert producer._encoder.calls == [(4, False), (1, True)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "non-finite"), ({"value": np.inf}, "storage-overflow"), ({"precise_memory": False}, "out-of-memory")],
)
def test_non_finite_latents_fail_one_item(four, options, reason):
    producer, items = four()
    producer._encoder = Faulty([items[0].value], **options)
    failure, *others = producer.encode(items).result()
    assert isinstance(failure, Failure)
    assert failure.reason == reason
    assert failure.hint
    assert [item.array.tobytes() for item in others] == encoded_alone(items[1:])


def test_a_real_model_is_checked_and_measured_when_it_is_opened(tiny, tmp_path):
    draw(tmp_path / "a.png")
    producer = opened(tmp_path, model=str(tiny("AutoencoderKL")), compute_dtype="float32")
    assert producer.noise["devices"] == ["cpu"]
    assert 0 <= producer.noise["mean"] <= producer.noise["largest"] < 0.05
    (item,) = producer.encode(prepare(producer, job("a.png"))).result()
    assert item.array.shape == (4, 32, 32)
    producer.close()
    assert len(prepare(producer, job("a.png"))) == 1


def test_a_machine_that_cannot_resize_as_the_recipe_does_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(producer_module, "resample_self_test", lambda: False)
    with pytest.raises(UsageError, match="resample='lanczos-u8'"):
        opened(tmp_path, resample="lanczos-u8")


@pytest.mark.parametrize(("name", "bytes_per_pixel"), [("a.jpg", 12), ("a.png", 25)])
def test_memory_estimate_counts_pixels_file_and_crops(tmp_path, name, bytes_per_pixel):
    Image.new("RGB", (64, 64)).save(tmp_path / name)
    image = job(name, size=(64, 64))
    pixels = bytes_per_pixel * 64 * 64 + 3 * 64 * 64
    assert opened(tmp_path).host_bytes(image) == pixels, "the bytes of the file are not known"
    size = (tmp_path / name).stat().st_size
    known = replace(image, inputs={"image": {"path": name, "size": size}})
    assert opened(tmp_path).host_bytes(known) == pixels + size


def test_float16_overflow_is_retried_in_float32(copied, images):
    model = copied()

    def overflow(tensors):
        tensors["encoder.conv_in.weight"] *= 6e4
        tensors["encoder.conv_in.bias"].fill_(6e4)

    rewrite(model.weights, overflow)
    encoder = open_encoder(described_model(model.folder, compute_dtype="float16"), device="cpu")
    assert not any(map(is_finite, encoder.encode(images)))
    assert is_finite(encoder.encode(images, precise=True))
    with pytest.raises(EncoderError) as caught:
        checked_noise(encoder)
    assert caught.value.what == "AutoencoderKL gives values that are not finite in float16"
    assert caught.value.fix == "add --compute-dtype=bfloat16 or --compute-dtype=float32"


def test_zero_weights_fail_the_preflight(copied):
    model = copied()
    rewrite(model.weights, lambda tensors: {n: torch.zeros_like(t) for n, t in tensors.items()})
    with pytest.raises(EncoderError, match="gives the same latent for every part of an image"):
        checked_noise(open_encoder(described_model(model.folder), device="cpu"))
