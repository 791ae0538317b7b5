"""One build of a whole pipeline: latents by its VAE, embeddings by its text encoders."""

import json
import shutil

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from commands import look, noise
from made_pipelines import flux_transformer, make_pipeline, tiny_unet, tiny_vae

from latentcache import open_cache

FIELDS = ["latents", "prompt_embeds", "pooled_prompt_embeds"]
SMALL = ("--resolution", "64", "--bucket-step", "32")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdxl")
    return make_pipeline("StableDiffusionXLPipeline", folder, vae=tiny_vae()), folder


@pytest.fixture
def data(tmp_path):
    """Six images; two share a caption."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.png").write_bytes(noise(number, 70, 64))
        (folder / f"{number}.txt").write_text("a red fox" if number < 2 else f"caption number {number}")
    return folder


def build(data, cache, *words):
    done = look("build", data, "--out", cache, *words, "--json")
    return done, {name: field["encoded"] for name, field in done.json["fields"].items()}


@pytest.fixture
def stub(data, tmp_path):
    _, made = build(data, tmp_path / "cache", "--model", "stub", *SMALL, "--text-encoder", "stub")
    assert made == {"latents": 6, "prompt_embeds": 5, "pooled_prompt_embeds": 5}, "one entry per distinct caption"
    return tmp_path / "cache"


def sdxl_loss(unet, latents, noise, conditions):
    return torch.nn.functional.mse_loss(unet(latents + noise, 10, **conditions).sample, noise)


def flux_loss(transformer, latents, noise, conditions):
    def patches(values):
        return diffusers.FluxPipeline._pack_latents(values, *values.shape)

    guess = transformer(patches((latents + noise) / 2), timestep=torch.full((2,), 0.5), **conditions).sample
    return torch.nn.functional.mse_loss(guess, patches(noise - latents))


def sdxl_conditions(pipe, batch):
    text, _, pooled, _ = pipe.encode_prompt(batch["captions"], device="cpu", do_classifier_free_guidance=False)
    times = torch.tensor([[64, 64, 0, 0, 64, 64]] * 2)
    return {"encoder_hidden_states": text, "added_cond_kwargs": {"text_embeds": pooled, "time_ids": times}}


def flux_conditions(pipe, batch):
    text, pooled, txt_ids = pipe.encode_prompt(batch["captions"], None, device="cpu")
    img_ids = pipe._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32)
    names = ("encoder_hidden_states", "pooled_projections", "txt_ids", "img_ids")
    return dict(zip(names, (text, pooled, txt_ids, img_ids), strict=True))


FLUX = {"channels": 16, "scaling": 0.3611, "shift": 0.1159}
STEPS = {
    "StableDiffusionXLPipeline": ("diffusers-sdxl", {}, lambda: tiny_unet(40, 12), sdxl_conditions, sdxl_loss),
    "FluxPipeline": ("diffusers-flux", FLUX, lambda: flux_transformer(32, 16), flux_conditions, flux_loss),
}


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", STEPS)
def test_loss_from_the_cache_equals_loss_without_it(name, tmp_path):
    form, space, make_model, conditions, loss = STEPS[name]
    pipe = make_pipeline(name, tmp_path / "pipeline", vae=tiny_vae(**space))
    (tmp_path / "data").mkdir()
    for number in range(2):
        (tmp_path / "data" / f"{number}.png").write_bytes(noise(number, 64, 64))  # the bucket: nothing is resized
        (tmp_path / "data" / f"{number}.txt").write_text(f"caption {number}")
    words = ("--storage-dtype", "float32", "--text-storage-dtype", "float32")
    build(tmp_path / "data", tmp_path / "cache", "--model", tmp_path / "pipeline", *SMALL, *words)
    batch = next(iter(open_cache(tmp_path / "cache").loader(batch_size=2, format=form)))
    model = make_model().eval()
    images = [PIL.Image.open(tmp_path / "data" / one).convert("RGB") for one in batch["names"]]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1
    target = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        config = pipe.vae.config
        latents = (pipe.vae.encode(pixels).latent_dist.mode() - (config.shift_factor or 0)) * config.scaling_factor
        uncached = loss(model, latents, target, conditions(pipe, batch))
        torch.testing.assert_close(
            loss(model, batch["latents"], target, batch["forward"]), uncached, atol=1e-4, rtol=0
        )


@pytest.mark.usefixtures("threads")
def test_prompt_ids_are_added_to_a_cache_and_served(pipeline, data, tmp_path):
    pipe, folder = pipeline
    build(data, tmp_path / "cache", "--model", folder, *SMALL)
    _, made = build(data, tmp_path / "cache", "--prompt-ids")
    assert made == dict.fromkeys(FIELDS, 0) | {"prompt_ids": 5}, "with the pipeline of the embeddings"
    assert build(data, tmp_path / "cache")[1] == dict.fromkeys([*FIELDS, "prompt_ids"], 0), "it stays"
    assert look("verify", tmp_path / "cache", "--data", data).status == 0
    cache = open_cache(tmp_path / "cache")
    batch = cache.loader(batch_size=6, seed=None).batch([0])
    assert batch["prompt_ids"].dtype == torch.int32
    parts = cache.recipe("prompt_ids").split(batch["prompt_ids"].numpy())
    for (ids, mask), tokenizer in zip((part[0] for part in parts), (pipe.tokenizer, pipe.tokenizer_2), strict=True):
        expected = tokenizer(batch["captions"][0], padding="max_length", max_length=77, truncation=True)
        assert (ids.tolist(), mask.tolist()) == (expected["input_ids"], expected["attention_mask"])


def test_a_caption_of_100_kilobytes_is_cut_and_counted(data, tmp_path):
    (data / "0.txt").write_text("long " * 20_000)
    (data / "1.txt").write_bytes(b"caf\xe9")
    done, _ = build(data, tmp_path / "cache", "--model", "stub", *SMALL, "--text-encoder", "stub")
    assert {(one["path"], one["reason"]) for one in done.json["items"] if one["category"] == "quarantined"} == {
        ("1.png", "caption-encoding")
    }
    assert done.json["fields"]["prompt_embeds"]["numbers"] == {"truncated_captions": 1}
    (note,) = (one for one in done.json["items"] if one["reason"] == "caption-cut")
    assert note["path"] == "0.txt"
    assert "by 19924 tokens at most (samples: 1)" in note["found"]


def test_each_edit_encodes_its_own_field(stub, data):
    (data / "0.txt").write_text("a blue fox")
    assert build(data, stub)[1] == {"latents": 0, "prompt_embeds": 1, "pooled_prompt_embeds": 1}
    (data / "3.png").write_bytes(noise(99, 70, 64))
    assert build(data, stub)[1] == {"latents": 1, "prompt_embeds": 0, "pooled_prompt_embeds": 0}
    assert build(data, stub, "--text-length", "2")[1]["latents"] == 0


def test_the_caption_of_an_image_that_is_rejected_is_not_encoded(data, tmp_path):
    for name, image in ("broken.png", b"no image"), ("tiny.png", noise(9, 4, 4)):
        (data / name).write_bytes(image)
        (data / name).with_suffix(".txt").write_text(name)
    words = ("--model", "stub", *SMALL, "--text-encoder", "stub", "--min-pixels", "256")
    done, encoded = build(data, tmp_path / "cache", *words)
    assert encoded == {"latents": 6, "prompt_embeds": 5, "pooled_prompt_embeds": 5}
    rejected = {item["path"] for item in done.json["items"]}
    again, encoded = build(data, tmp_path / "cache")
    assert (set(encoded.values()), again.json["items"]) == ({0}, done.json["items"])
    checked = look("verify", tmp_path / "cache", "--full", "--json").json
    assert {item["path"] for item in checked["items"] if item["category"] == "quarantined"} == rejected
    assert checked["counts"]["ok"] == 6
    (data / "broken.png").write_bytes(noise(7, 70, 64))
    assert build(data, tmp_path / "cache")[1] == {"latents": 1, "prompt_embeds": 1, "pooled_prompt_embeds": 1}


def test_an_image_without_a_caption_has_no_embedding(stub, data):
    (data / "5.txt").unlink()
    done, _ = build(data, stub)
    items = [one for one in done.json["items"] if one["category"] == "quarantined"]
    assert {(one["reason"], one["path"], one["field"]) for one in items} == {
        ("no-caption", "5.png", "prompt_embeds"),
        ("no-caption", "5.png", "pooled_prompt_embeds"),
    }
    assert "--default-caption" in items[0]["hint"]
    assert (done.status, done.json["counts"]["quarantined"]) == (1, 1)
    with pytest.warns(
        UserWarning, match="cache: 1 sample is not served, for lack of prompt_embeds, pooled_prompt_embeds;"
    ):
        assert open_cache(stub).loader(batch_size=5).excluded == 1
    assert open_cache(stub).loader(batch_size=3, fields=["latents"]).excluded == 0


def test_a_pipeline_without_a_text_encoder_is_rejected_before_anything_is_written(pipeline, data, tmp_path):
    broken = shutil.copytree(pipeline[1], tmp_path / "broken")
    shutil.rmtree(broken / "text_encoder_2")
    words = ("--model", broken, *SMALL, "--resample", "lanczos-pil", "--json")
    done = look("build", data, "--out", tmp_path / "cache", *words)
    assert done.status == 2
    assert "text_encoder_2" in json.dumps(done.json["error"])
    assert not (tmp_path / "cache").exists()


def test_an_edited_caption_of_several_is_changed_and_encoded_alone(data, tmp_path):
    (data / "0.txt").write_text("one\ntwo\n")
    words = ("--model", "stub", *SMALL, "--text-encoder", "stub", "--caption-lines", "all", "--empty-prompt")
    _, made = build(data, tmp_path / "cache", *words)
    assert made == {"latents": 6, "prompt_embeds": 2 + 5 + 1, "pooled_prompt_embeds": 8}
    assert build(data, tmp_path / "cache")[1] == dict.fromkeys(FIELDS, 0), "settings follow the cache"
    (data / "0.txt").write_text("one\nthree\n")
    verified = look("verify", tmp_path / "cache", "--data", data, "--json")
    (one,) = verified.json["items"]
    assert (one["category"], one["reason"], one["path"]) == ("stale", "caption-changed", "0.png")
    assert one["hint"] == "a build records the new caption; it encodes embeddings alone"
    assert build(data, tmp_path / "cache")[1] == {"latents": 0, "prompt_embeds": 2, "pooled_prompt_embeds": 2}
    (data / "1.txt").unlink()
    done, _ = build(data, tmp_path / "cache", "--default-caption", "")
    assert done.status == 0
    batch = next(iter(open_cache(tmp_path / "cache").loader(batch_size=6)))
    assert dict(zip(batch["names"], batch["captions"], strict=True))["1.png"] == ""
    assert "rejected" not in look("inspect", data, *words, "--default-caption", "").out


def test_prompts_survive_parts_merge_and_gc(data, tmp_path):
    words = ("--model", "stub", *SMALL, "--text-encoder", "stub", "--shuffle-tags", "--empty-prompt")
    for number in range(6):
        (data / f"{number}.txt").write_text(f"a, b, {number}")
    parts = [tmp_path / f"part{number}" for number in (1, 2)]
    for number, part in enumerate(parts):
        assert build(data, part, *words, "--part", f"{number}/2")[0].status == 0
    assert look("merge", *parts, "--out", tmp_path / "all", "--json").status == 0
    assert look("gc", tmp_path / "all", "--apply", "--json").status == 0
    build(data, tmp_path / "one", *words)
    batches = []
    for name in ("all", "one"):
        assert look("verify", tmp_path / name, "--full", "--json").status == 0
        cache = open_cache(tmp_path / name).read(caption_dropout=0.3)
        batches.append(next(iter(cache.loader(batch_size=6, seed=2))))
        assert len(cache) == 6
    assert batches[0]["captions"] == batches[1]["captions"]
    assert "" in batches[0]["captions"]
    assert (batches[0]["prompt_embeds"] == batches[1]["prompt_embeds"]).all()


def test_info_reports_stored_and_shared_texts(stub, data):
    shared = look("info", stub, "--json").json["fields"]
    assert shared["prompt_embeds"]["shared"] == {"items": 1, "bytes": 4 * 8 * 2}, "start and three words of 8 float16"
    assert shared["pooled_prompt_embeds"]["shared"] == {"items": 1, "bytes": 8 * 2}
    assert shared["latents"]["shared"] == {"items": 0, "bytes": 0}
    captions = ("a red fox", *(f"caption number {number}" for number in range(2, 6)))
    stored = sum(1 + len(text.split()) for text in captions)
    assert shared["prompt_embeds"]["trimmed_bytes"] == (77 * len(captions) - stored) * 8 * 2, "tokens of 8 float16"
    assert shared["pooled_prompt_embeds"]["trimmed_bytes"] == 0
    assert "padding is not stored, 5.8 kB saved" in look("info", stub).out
    build(data, stub, "--shuffle-tags", "--empty-prompt")
    assert "texts     up to 4 per sample, tags in other orders, prompt ''" in look("info", stub).out


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_prompts_do_not_depend_on_the_first_caption(data, tmp_path):
    """The text encoder fails for it; the build stores the prompts with the next sample."""
    pipe = make_pipeline("StableDiffusionPipeline", tmp_path / "pipe")
    (bad,) = pipe.tokenizer(["z"], add_special_tokens=False)["input_ids"]
    assert len(bad) == 1
    with torch.no_grad():
        pipe.text_encoder.get_input_embeddings().weight[bad[0]] = torch.nan
    pipe.save_pretrained(tmp_path / "pipe")
    (data / "0.txt").write_text("z")
    words = ("--fields", "prompt_embeds", "--text-encoder", tmp_path / "pipe", "--empty-prompt")
    for _ in range(2):
        done, _ = build(data, tmp_path / "cache", *words)
        assert (done.status, [one["reason"] for one in done.json["items"]]) == (1, ["non-finite"])
        cache = open_cache(tmp_path / "cache").read(caption_dropout=1.0)
        batch = next(iter(cache.loader(batch_size=5)))
        assert torch.equal(batch["prompt_embeds"][3], cache.prompt()["prompt_embeds"][0])
    (data / "0.txt").write_text("a fox")
    assert build(data, tmp_path / "cache", *words)[1] == {"prompt_embeds": 1}
    done, _ = build(data, tmp_path / "cache", "--negative-prompt", "z")
    assert (done.status, [one["reason"] for one in done.json["items"]]) == (0, ["prompt-not-stored"])
    assert len(open_cache(tmp_path / "cache")) == 6


def test_added_pooled_embeddings_use_the_stored_texts(data, tmp_path):
    words = ("--text-encoder", "stub", "--empty-prompt", "--shuffle-tags", "--caption-variants", "3")
    build(data, tmp_path / "cache", "--fields", "latents,prompt_embeds", "--model", "stub", *SMALL, *words)
    build(data, tmp_path / "cache", "--text-encoder", "stub")
    cache = open_cache(tmp_path / "cache")
    assert cache.recipe("pooled_prompt_embeds").read_time == cache.recipe("prompt_embeds").read_time
    assert len(list(cache.read(caption_dropout=0.5).loader(batch_size=2))) == 3
