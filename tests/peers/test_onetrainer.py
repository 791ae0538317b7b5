"""OneTrainer, by its own code, takes our folders: nothing is encoded again, all values are equal, and it trains."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from captioned_images import TEN, draw_captioned
from checkouts import HERE, checkout, exported, said_by, served_by
from made_pipelines import clip, make_pipeline, tiny_unet, tiny_vae
from small_cache import draw

from latentcache import open_cache

pytestmark = pytest.mark.peers
MODELS = {
    "sd": ("StableDiffusionBaseDataLoader", "STABLE_DIFFUSION_15", (4, 0.18215, None), 8),
    "sdxl": ("StableDiffusionXLBaseDataLoader", "STABLE_DIFFUSION_XL_10_BASE", (4, 0.13025, None), 64),
    "sd3": ("StableDiffusion3BaseDataLoader", "STABLE_DIFFUSION_35", (16, 1.5305, 0.0609), 64),
    "flux": ("FluxBaseDataLoader", "FLUX_DEV_1", (16, 0.3611, 0.1159), 64),
}
STILL = {"enable_crop_jitter": False}
INPAINTING = "STABLE_DIFFUSION_XL_10_BASE_INPAINTING"


def command_of(script, *words):
    """Run a script with the interpreter and the code of the trainer."""
    code, python = checkout("OneTrainer-23df383", "venv-onetrainer")
    return [python, HERE / script, code, checkout("mgds-3a6994a")[0], *words]


def serve(out, name, *, text=False, epochs=1, **config):
    """Epochs by the trainer: what it served, and its counts; None if it would encode again."""
    loader, model, _, _ = MODELS[name]
    settings = {"loader": [loader, loader], "text": text, "epochs": epochs}
    settings["config"] = {"model_type": model, "resolution": "256", "batch_size": 2, **config}
    served = out.with_name("served.npz")
    return served_by(command_of("serve_onetrainer.py", out, served, json.dumps(settings)), served)


@pytest.fixture(scope="session")
def images(sets, tmp_path_factory):
    """Ten images in two folders, one of them with a mask."""
    folder = tmp_path_factory.mktemp("images") / "ten"
    shutil.copytree(sets, folder)
    draw(folder / "1_dogs/p7-masklabel.png", TEN[7], seed=77)
    return folder


@pytest.fixture(scope="session")
def conditioned(images, tmp_path_factory):
    """The same with a conditioning image for each."""
    folder = tmp_path_factory.mktemp("conditioned") / "ten"
    shutil.copytree(images, folder)
    for number, path in enumerate(sorted(folder.glob("*/p?.png"))):
        draw(path.with_name(f"{path.stem}-condlabel.png"), TEN[number], seed=50 + number)
    return folder


@pytest.fixture(scope="session")
def vaes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vaes")
    for name, (*_, scaling, _) in MODELS.items():
        torch.manual_seed(0)
        tiny_vae(*scaling).save_pretrained(folder / name)
    return folder


def make(name, data, folder, model, *more, export=()):
    """An export of a cache of the trainer's sizes."""
    words = ("--resolution", "256", "--bucket-step", MODELS[name][3], *more)
    return exported("onetrainer", data, folder, model, *words, export=export)[1]


def of_image(served, name, epoch=0):
    """What was served of an image: key of a batch -> values."""
    return {
        key.rpartition("@")[2]: value
        for key, value in served.items()
        if f"/{name}@" in key and key.startswith(f"{epoch}/")
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_image_is_accepted_and_every_value_is_equal(run, images, vaes, tmp_path, name):
    out = make(name, images, tmp_path, vaes / name)
    served, counts = serve(out, name, epochs=5, masked_training=True)
    assert counts is not None, served
    loader = (
        open_cache(tmp_path / "cache")
        .read(scaled=False, repeats=False, dtype=torch.float32)
        .loader(batch_size=1, seed=None)
    )
    seen = set()
    for row in range(10):
        batch = loader.batch([row])
        for epoch in range(5):
            item = of_image(served, batch["names"][0].rpartition("/")[2], epoch)
            if not item:  # dropped in this epoch
                continue
            seen.add(row)
            np.testing.assert_array_equal(item["latent_image"], batch["latents"][0].numpy())
            np.testing.assert_array_equal(item["latent_mask"], batch["mask"][0].numpy())
            assert item["prompt" if name == "sd" else "prompt_1"].item() == batch["captions"][0]
            if name != "sd":
                assert item["original_resolution"].tolist() == batch["original_size"][0].tolist()
                assert item["crop_resolution"].tolist() == batch["target_size"][0].tolist()
                assert item["crop_offset"].tolist() == batch["crop_top_left"][0].tolist()
    words = ("--for", "onetrainer", "--batch-size", "2", "--resolution", "256", "--bucket-step", MODELS[name][3])
    plan = run("plan", images, *words, "--json").json["trainer"]
    alone = sum(bucket["samples"] for bucket in plan["buckets"] if not bucket["batches"])
    assert len(seen) == 10 - alone
    assert counts["batches"] == counts["lengths"] == [plan["steps_per_epoch"]] * 5


@pytest.mark.parametrize("masked", [True, False])
def test_conditioning_images_of_an_inpainting_model_are_taken(run, conditioned, vaes, tmp_path, masked):
    values = {"model_type": INPAINTING, "resolution": "256", "masked_training": masked}
    values |= {"custom_conditioning_image": True, "unmasked_probability": 0.0}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(values | {"concepts": [{"path": str(conditioned), "image": STILL}]}))
    options = ("--trainer-config", config)
    out = make("sdxl", conditioned, tmp_path, vaes / "sdxl", *options, export=options)
    served, counts = serve(out, "sdxl", epochs=3, **values)
    assert counts is not None, served
    reader = open_cache(tmp_path / "cache").read(scaled=False, repeats=False, dtype=torch.float32)
    loader, seen = reader.loader(batch_size=1, seed=None), set()
    for row, epoch in product(range(10), range(3)):
        batch = loader.batch([row])
        item = of_image(served, batch["names"][0].rpartition("/")[2], epoch)
        if not item:  # dropped in this epoch
            continue
        seen.add(row)
        np.testing.assert_array_equal(item["latent_image"], batch["latents"][0].numpy())
        np.testing.assert_array_equal(item["latent_conditioning_image"], batch["control"][0].numpy())
        mask = batch["mask"][0].numpy() if masked else np.ones_like(item["latent_mask"])
        np.testing.assert_array_equal(item["latent_mask"], mask)
    assert len(seen) > 7


def test_the_text_of_a_variation_is_that_of_the_caption_that_it_draws(run, tmp_path):
    """``prompt`` is drawn by its own ``SelectRandomText``, the hidden state comes from our cache."""
    data, model = draw_captioned(tmp_path / "cats", TEN), tmp_path / "model"
    for number in range(0, 10, 2):
        (data / f"p{number}.txt").write_text("".join(f"line {line} of {number}\n" for line in range(3)), "utf-8")
    make_pipeline(PIPELINES["sd"], model, vae=tiny_vae(*MODELS["sd"][2]))
    concept = {"path": str(data), "image": STILL, "text_variations": 3}
    config = tmp_path / "config.json"
    off = {"text_encoder": {"train": False}}
    config.write_text(json.dumps({"concepts": [concept], "model_type": MODELS["sd"][1], "resolution": "256", **off}))
    more = ("--caption-lines", "all", "--fields", "latents,prompt_embeds,prompt_ids", "--trainer-config", config)
    out = make("sd", data, tmp_path, model, *more, export=("--fields", "all", "--trainer-config", config))
    served, counts = serve(out, "sd", text=True, epochs=3)
    assert counts is not None, served
    texts, loader = {}, open_cache(tmp_path / "cache").read(dtype=torch.float32).loader(batch_size=1, seed=0)
    for epoch in range(20):
        loader.set_epoch(epoch)
        texts |= {batch["captions"][0]: batch["prompt_embeds"][0].numpy() for batch in loader}
    drawn = set()
    for epoch, number in product(range(3), range(10)):
        if item := of_image(served, f"p{number}.png", epoch):
            np.testing.assert_array_equal(item["text_encoder_hidden_state"], texts[item["prompt"].item()])
            drawn.add(item["prompt"].item())
    assert len(drawn) > 10


PIPELINES = {
    "sd": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
}


#: T5 has 77 tokens by default; those of CLIP stand before them in embeddings of SD3.
LENGTHS = {"sd3": ("--text-length", "154"), "flux": ("--text-length", "77")}


@pytest.mark.parametrize("name", PIPELINES)
def test_text_is_taken_and_every_value_is_equal(run, images, tmp_path, name):
    import transformers

    torch.manual_seed(0)
    parts = {"vae": tiny_vae(*MODELS[name][2])}
    projected = transformers.CLIPTextModelWithProjection
    if name == "sdxl":  # its two encoders are told apart by their widths
        parts |= {"text_encoder": clip(hidden=768), "text_encoder_2": clip(projected, hidden=1280, projection=1280)}
    if name == "sd3":
        parts |= {"text_encoder": clip(projected, 768, 768), "text_encoder_2": clip(projected, 1280, 1280)}
        parts |= {"text_encoder_3": wide_t5()}
    make_pipeline(PIPELINES[name], tmp_path / "model", **parts)
    fields = "latents,prompt_embeds,prompt_ids" + (",pooled_prompt_embeds" if name != "sd" else "")
    more = ("--fields", fields, *LENGTHS.get(name, ()))
    out = make(name, images, tmp_path, tmp_path / "model", *more, export=("--fields", "all"))
    served, counts = serve(out, name, text=True)
    assert counts is not None, served
    loader = open_cache(tmp_path / "cache").read(repeats=False, dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(10):
        batch = loader.batch([row])
        item = of_image(served, batch["names"][0].rpartition("/")[2])
        if not item:
            continue
        ids, masks = batch["prompt_ids"][0].numpy()
        joined = [item[key] for key in sorted(item) if key in ("tokens", "tokens_1", "tokens_2", "tokens_3")]
        np.testing.assert_array_equal(np.concatenate(joined), ids)
        if name in ("sd3", "flux"):
            np.testing.assert_array_equal(
                np.concatenate([item[key] for key in sorted(item) if "_mask_" in key]), masks
            )
        for key, values in expected_text(name, batch).items():
            np.testing.assert_array_equal(item[key], values, err_msg=key)


def wide_t5():
    import transformers

    config = transformers.T5Config(vocab_size=64, d_model=2560, d_kv=8, d_ff=64, num_layers=1, num_heads=2)
    return transformers.T5EncoderModel(config)


def expected_text(name, batch):
    """What the trainer gets of the values that a pipeline of diffusers makes."""
    sequence = batch["prompt_embeds"][0].numpy()
    if name == "sd":
        return {"text_encoder_hidden_state": sequence}
    pooled = batch["pooled_prompt_embeds"][0].numpy()
    if name == "flux":
        return {"text_encoder_1_pooled_state": pooled, "text_encoder_2_hidden_state": sequence}
    first = {
        "text_encoder_1_hidden_state": sequence[:77, :768],
        "text_encoder_2_hidden_state": sequence[:77, 768:2048],
    }
    if name == "sdxl":
        return {**first, "text_encoder_2_pooled_state": pooled}
    pooled_states = {"text_encoder_1_pooled_state": pooled[:768], "text_encoder_2_pooled_state": pooled[768:]}
    return {**first, **pooled_states, "text_encoder_3_hidden_state": sequence[77:]}


#: Settings that move the steps of its pipeline.
SHIFTS = [
    {},
    {"masked_training": True},
    {"custom_conditioning_image": True},
    {"model_type": INPAINTING, "custom_conditioning_image": True},
    {"model_type": INPAINTING, "custom_conditioning_image": True, "masked_training": True},
]


@pytest.mark.parametrize("more", SHIFTS, ids=" ".join)
def test_flips_and_resolutions_are_those_that_its_generator_draws(run, conditioned, vaes, tmp_path, more):
    """Every drawn flip is in the place where its own ``RandomFlip`` puts one: see ``draws_onetrainer.py``."""
    concepts = [
        {"path": str(conditioned / folder), "image": {**STILL, "enable_random_flip": True}, "image_variations": 4}
        for folder in ("1_dogs", "2_cats")
    ]
    config = tmp_path / "config.json"
    model = {"model_type": MODELS["sdxl"][1], "resolution": "256, 320", **more}
    config.write_text(json.dumps({"concepts": concepts, "aspect_ratio_bucketing": True, **model}))
    words = ("build", conditioned, "--out", tmp_path / "cache", "--model", vaes / "sdxl", "--trainer-config", config)
    assert run(*words).status == 0
    out = tmp_path / "out"
    assert run("export", tmp_path / "cache", out, "--to", "onetrainer", "--trainer-config", config).status == 0
    drawn = said_by(command_of("draws_onetrainer.py", out, json.dumps(model)))
    read = open_cache(tmp_path / "cache").read(scaled=False, repeats=False, dtype=torch.float32, augment=False)
    plain = {
        (batch["names"][0].rpartition("/")[2], *batch["target_size"][0].tolist()): batch["latents"][0]
        for batch in read.loader(batch_size=1, seed=None)
    }
    for concept in json.loads((out / "concepts.json").read_text()):
        for number, (name, sizes, flips) in enumerate(drawn[concept["path"]]):
            for variation, (size, flip) in enumerate(zip(sizes, flips, strict=True)):
                (file,) = [
                    path
                    for path in out.glob(f"cache/image/*/variation-{variation}/{number}.pt")
                    if name in str(torch.load(path.with_name("aggregate.pt"), weights_only=True)[number])
                ]
                latent = torch.load(file, weights_only=True)["latent_image"]
                assert [8 * side for side in latent.shape[1:]] == size
                assert torch.equal(latent, plain[(name, *size)]) is not flip


@pytest.mark.parametrize("wrong", ["listing", "settings", "shape"])
def test_wrong_exports_are_refused(run, images, vaes, tmp_path, wrong):
    out = make("sdxl", images, tmp_path, vaes / "sdxl")
    if wrong == "settings":
        path = out / "concepts.json"
        path.write_text(path.read_text().replace('"enable_random_hue": false', '"enable_random_hue": true'))
    elif wrong == "listing":
        for file in out.glob("cache/image/*/variation-0/aggregate.pt"):
            file.unlink()
    else:
        (file,) = out.glob("cache/image/*/variation-0/5.pt")
        item = torch.load(file, weights_only=True)
        torch.save({**item, "latent_image": item["latent_image"][:, :, 1:]}, file)
    _, counts = serve(out, "sdxl", epochs=2)
    assert counts is None
    if wrong != "settings":
        assert run("verify", out).status == 1


def test_buckets_smaller_than_a_batch_give_no_step(run, vaes, tmp_path):
    """Its own count for five images in five buckets: no batch, no word; as ``plan`` says before."""
    for number, size in enumerate([(400, 256), (256, 400), (300, 300), (512, 160), (160, 512)]):
        draw(tmp_path / "data" / f"{number}.png", size, seed=number)
    out = make("sdxl", tmp_path / "data", tmp_path, vaes / "sdxl")
    for batch in (4, 1):
        served, counts = serve(out, "sdxl", batch_size=batch)
        assert counts is not None, served
        words = ("--for", "onetrainer", "--resolution", "256", "--batch-size", batch, "--json")
        steps = run("plan", tmp_path / "data", *words).json["trainer"]["steps_per_epoch"]
        assert counts["batches"] == counts["lengths"] == [steps] == [0 if batch == 4 else 5]


def test_it_trains_an_epoch_from_our_folder(run, images, tmp_path):
    """Its trainer and a tiny SDXL, with a VAE and text encoders that fail if used: as many steps as ``plan`` says."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    second = clip(transformers.CLIPTextModelWithProjection, hidden=1280, projection=1280)
    parts = {"vae": tiny_vae(*MODELS["sdxl"][2]), "text_encoder": clip(hidden=768), "text_encoder_2": second}
    parts |= {"unet": tiny_unet(2048, 1280), "scheduler": diffusers.DDIMScheduler(beta_schedule="scaled_linear")}
    make_pipeline(PIPELINES["sdxl"], tmp_path / "model", **parts)
    fields = ("--fields", "latents,prompt_embeds,pooled_prompt_embeds,prompt_ids", "--masks", "none")
    out = make("sdxl", images, tmp_path, tmp_path / "model", *fields, export=("--fields", "all"))
    trained = said_by(command_of("train_onetrainer.py", out, tmp_path / "model", tmp_path / "work", "1"))
    words = ("--for", "onetrainer", "--resolution", "256", "--batch-size", "2", "--json")
    assert trained["steps"] == run("plan", images, *words).json["trainer"]["steps_per_epoch"] == 7
    assert len(trained["losses"]) == 7
    assert run("verify", out).status == 0
