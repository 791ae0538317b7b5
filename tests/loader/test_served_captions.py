"""Caption variants and the empty prompt: embeddings match the named captions."""

import json
import shutil
import warnings
from collections import Counter

import numpy as np
import PIL.Image
import pytest
import torch
import xxhash
from damaged import damage_payload

from latentcache import BuildSettings, build_cache, open_cache
from latentcache.cli.app import main
from latentcache.encoders.prompt.producer import _Stub
from latentcache.errors import UsageError
from latentcache.fields.captions import CaptionVariants
from latentcache.fields.latents import LatentsSettings
from latentcache.fields.prompt_embeds import PromptSettings
from latentcache.sources.options import SourceOptions

COUNT = 40
WORD = 0xFFFF_FFFF_FFFF_FFFF
TEXT = {"prompt_embeds", "pooled_prompt_embeds"}


def caption(number):
    """Half of the images have two captions, the others one, of 2 to 5 tags."""
    return (
        f"1girl, shared, {number % 2}, red"
        if number < COUNT // 2
        else ", ".join("abcde"[: 2 + number % 4]) + f", {number}"
    )


def written(folder):
    folder.mkdir()
    for number in range(COUNT):
        PIL.Image.fromarray(np.full((64, 64, 3), number, np.uint8)).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(caption(number))
    return folder


def build(data, cache, **settings):
    latents = LatentsSettings(model="stub", resolutions=(64,), flip=True)
    fields = {"latents": latents, "prompt_embeds": PromptSettings(text_encoder="stub", **settings)}
    return build_cache(BuildSettings(data=data, out=cache, fields=fields, related=True))


@pytest.fixture(scope="module")
def served_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    build(written(folder / "data"), folder / "cache", shuffle_tags=True, keep_tags="1", caption_variants=5,
          empty_prompt=True, negative_prompt="bad, low")  # fmt: skip
    return folder / "cache"


def draw(name, seed, epoch, number, occurrence=0):
    """Draw 64 bits as docs/format defines."""
    parts = [name.encode(), *((word & WORD).to_bytes(8, "little") for word in (seed, epoch, number))]
    return xxhash.xxh3_64_intdigest(b"".join(parts) + (occurrence.to_bytes(4, "little") if occurrence else b""))


def expected(seed, epoch, number, *, rate=0.0, occurrence=0):
    """Compute the expected caption of a sample."""
    if draw("dropout", seed, epoch, number, occurrence) < rate * 2**64:
        return ""
    rule = CaptionVariants(number=5, reorder=True, keep="1")
    text = caption(number)
    return rule.text(text, draw("caption", seed, epoch, number, occurrence) % rule.count(text))


def read_captions(source, epoch=0, **options):
    """Read an epoch: name -> caption; check the embeddings."""
    with source.loader(**{"batch_size": 5, "seed": 3, **options}) as loader:
        loader.set_epoch(epoch)
        return {name: text for batch in loader for name, text in named(source, batch)}


def named(source, batch):
    for field in TEXT & set(batch):
        stub = _Stub(0, source.recipe(field))
        for row, text in enumerate(batch["captions"]):
            array = torch.from_numpy(stub.encode([text])[0][0])
            kept = batch[field][row]
            assert (kept[: len(array)] == array).all() if field == "prompt_embeds" else (kept == array).all(), text
            if field == "prompt_embeds":
                assert batch["prompt_embeds_mask"][row].sum() == len(array)
    return zip(batch["names"], batch["captions"], strict=True)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_captions_are_those_of_a_plain_reference(served_cache, rate):
    cache = open_cache(served_cache).read(caption_dropout=rate)
    epochs = [read_captions(cache, epoch) for epoch in range(3)]
    for epoch, captions in enumerate(epochs):
        assert captions == {f"{number:02}.png": expected(3, epoch, number, rate=rate) for number in range(COUNT)}
    assert epochs[0] != epochs[1] != epochs[2]
    assert read_captions(cache, 1, batch_size=8, prefetch=0) == epochs[1], "the size of a batch changes nothing"
    assert read_captions(cache, 1, seed=4) != epochs[1]
    same = [epochs[0][f"{number:02}.png"] for number in range(0, COUNT // 2, 2)]
    assert len(set(same)) > 1, "images of one caption are drawn each for itself"


@pytest.mark.parametrize("rate", [np.float16(0.5), np.float32(0.3), np.int64(1), np.uint8(0)])
def test_a_rate_of_numpy_is_the_number_that_it_is_written_as(served_cache, rate):
    cache = open_cache(served_cache).read(caption_dropout=rate)
    plain = float(str(rate))
    assert cache.settings == open_cache(served_cache).read(caption_dropout=plain).settings
    assert read_captions(cache) == {f"{number:02}.png": expected(3, 0, number, rate=plain) for number in range(COUNT)}


def test_every_rank_and_a_resumed_loader_draw_the_same(served_cache):
    cache = open_cache(served_cache).read(caption_dropout=0.2)
    whole = read_captions(cache, 2, batch_size=10)
    parts = [read_captions(cache, 2, rank=rank, world_size=2) for rank in (0, 1)]
    assert parts[0] | parts[1] == whole
    with cache.loader(batch_size=10, seed=3) as loader:
        loader.set_epoch(2)
        first = next(iter(loader))
        state = loader.state_dict()
    with cache.loader(batch_size=10, seed=3) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        rest = {name: text for batch in loader for name, text in named(cache, batch)}
    assert dict(named(cache, first)) | rest == whole
    with cache.loader(batch_size=10, seed=3) as loader:
        loader.set_epoch(2)
        options = {"sampler": loader.sampler, "batch_size": None, "num_workers": 1}
        workers = torch.utils.data.DataLoader(loader.dataset, multiprocessing_context="fork", **options)
        assert {name: text for batch in workers for name, text in named(cache, batch)} == whole


def test_repeats_draw_separate_captions(served_cache):
    with open_cache(served_cache).repeated(3).loader(batch_size=10, seed=3) as loader:
        counts = Counter(pair for batch in loader for pair in zip(batch["names"], batch["captions"], strict=True))
    wanted = Counter(
        (f"{number:02}.png", expected(3, 0, number, occurrence=occurrence))
        for number in range(COUNT)
        for occurrence in range(3)
    )
    assert counts == wanted


def test_the_first_caption_for_validation(served_cache):
    captions = read_captions(open_cache(served_cache).read(augment=False))
    assert captions == {f"{number:02}.png": caption(number) for number in range(COUNT)}


def test_prompts_of_a_field(served_cache):
    cache = open_cache(served_cache)
    for text in ("", "bad, low"):
        prompt = cache.prompt(text)
        assert set(prompt) == {*TEXT, "prompt_embeds_mask"}
        assert list(named(cache, {**prompt, "names": ["-"], "captions": [text]})) == [("-", text)]
    assert cache.read(dtype=torch.float32).prompt()["prompt_embeds"].dtype == torch.float32
    with pytest.raises(UsageError, match=r"prompt\('other'\).*'', 'bad, low'") as caught:
        cache.prompt("other")
    assert "--negative-prompt=TEXT" in caught.value.fix


def test_unstored_captions_are_an_error(tmp_path):
    data = written(tmp_path / "data")
    build(data, tmp_path / "cache")
    for rate in (-0.1, 1.5, True, "0.1"):
        with pytest.raises(UsageError, match="caption_dropout"):
            open_cache(tmp_path / "cache").read(caption_dropout=rate)
    with pytest.raises(UsageError, match="does not hold the empty prompt") as caught:
        open_cache(tmp_path / "cache").read(caption_dropout=0.1)
    assert "`latentcache build` with --empty-prompt" in caught.value.fix
    build(data, tmp_path / "cache", empty_prompt=True)
    with pytest.raises(UsageError, match="it holds ''"):
        open_cache(tmp_path / "cache").prompt("bad")
    assert len(open_cache(tmp_path / "cache").read(caption_dropout=0.5)) == COUNT


@pytest.mark.filterwarnings("ignore:cache.* for lack of")
def test_variants_removed_by_a_repair_are_not_served(served_cache, tmp_path):
    shutil.copytree(served_cache, tmp_path / "cache")
    for row in range(2, 12):
        damage_payload(tmp_path / "cache", row=row, field="pooled_prompt_embeds")
    assert main(["verify", str(tmp_path / "cache"), "--full", "--repair", "--yes"]) == 1
    cache = open_cache(tmp_path / "cache", allow_partial=True)
    assert {text for epoch in range(8) for text in read_captions(cache, epoch).values()} > {caption(20)}


def test_fields_with_other_variants_are_not_served_together(tmp_path):
    data = written(tmp_path / "data")
    build(data, tmp_path / "cache")
    shuffled = {"prompt_embeds": PromptSettings(shuffle_tags=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_cache(BuildSettings(data=data, out=tmp_path / "cache", fields=shuffled, related=False))
    cache = open_cache(tmp_path / "cache")
    with pytest.raises(UsageError, match="hold other variants of captions"):
        len(cache)
    with cache.loader(batch_size=4, fields=["prompt_embeds", "captions"]) as loader:
        assert len(loader) == COUNT // 4


def test_one_of_several_captions_without_embeddings(tmp_path):
    data = written(tmp_path / "data")
    for number in range(COUNT):
        (data / f"{number:02}.txt").write_text(f"one {number}\ntwo {number}")
    latents = {"latents": LatentsSettings(model="stub", resolutions=(64,))}
    build_cache(
        BuildSettings(data=data, out=tmp_path / "c", fields=latents, source=SourceOptions(caption_lines="all"))
    )
    loader = open_cache(tmp_path / "c").loader(batch_size=8, seed=3)
    loader.set_epoch(2)
    captions = {
        int(name[:2]): text for batch in loader for name, text in zip(batch["names"], batch["captions"], strict=True)
    }
    drawn = {number: (draw("caption", 3, 2, number) >> 1) % 2 for number in range(COUNT)}
    assert captions == {number: f"{('one', 'two')[which]} {number}" for number, which in drawn.items()}
    assert set(drawn.values()) == {0, 1}
    first = open_cache(tmp_path / "c").read(augment=False).loader(batch_size=8)
    assert all(text.startswith("one") for batch in first for text in batch["captions"])
