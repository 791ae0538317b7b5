"""Settings files of other trainers: sizes and flips that they give a build, and settings that forbid a cache."""

import json

import pytest
import yaml

from latentcache.errors import UsageError
from latentcache.geometry.like.trainers import TRAINERS, trainer_of
from latentcache.geometry.sizes import Size

FLUX = {"is_flux": True}


def sd_scripts(text, general=""):
    subset = "[[datasets.subsets]]\nimage_dir = 'a'\nrandom_crop = true\n"
    datasets = "".join(f"[[datasets]]\n{dataset}\n{subset}" for dataset in text.split("|"))
    return {"dataset.toml": f"[general]\nflip_aug = true\n{general}\n{datasets}"}


def onetrainer(concepts=(), **values):
    return {
        "config.json": json.dumps({"concept_file_name": "concepts.json", **values}),
        "concepts.json": json.dumps(concepts),
    }


def simpletuner(backend, **general):
    backends = [
        {"id": "cats", "type": "local", "instance_data_dir": "cats", **backend},
        {"dataset_type": "text_embeds"},
    ]
    options = {f"--{name}": value for name, value in general.items()}
    return {
        "config.json": json.dumps(options | {"data_backend_config": "multidatabackend.json"}),
        "multidatabackend.json": json.dumps(backends),
    }


def musubi(*datasets):
    text = "".join(f"[[datasets]]\nvideo_directory = 'x'\n{dataset}\n" for dataset in datasets)
    return {"data.toml": f"[general]\nbatch_size = 3\n{text}"}


def ai_toolkit(*datasets, model=FLUX, **process):
    process |= {"model": model, "datasets": [{"folder_path": "x", **dataset} for dataset in datasets]}
    return {"job.yaml": yaml.safe_dump({"job": "extension", "config": {"process": [process]}})}


def written(folder, files):
    """Write the settings; return the first file."""
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    return folder / next(iter(files))


SDXL, STILL = {"model_type": "STABLE_DIFFUSION_XL_10_BASE"}, [{"image": {"enable_crop_jitter": False}}]
PLAIN = '[training]\nresolution = "512,768"\nshuffle_caption = true\n[others]\nmin_bucket_reso = 320\n'


@pytest.mark.parametrize(
    ("trainer", "files", "options", "words"),
    [
        ("kohya", {"lora.toml": PLAIN}, {"buckets": (Size(768, 512),), "flip": None}, "min_bucket_reso 320, "),
        ("kohya", {"lora.toml": PLAIN}, {}, "max_bucket_reso 1024 (default)"),
        ("kohya", sd_scripts("resolution = 1024|resolution = [512, 768]", "enable_bucket = true"),
         {"resolutions": (1024, Size(768, 512)), "flip": True}, ""),
        ("onetrainer", onetrainer(STILL, model_type="STABLE_DIFFUSION_15"),
         {"bucket_step": 8, "resolutions": (512,), "flip": None}, "resolution 512 (default)"),
        ("onetrainer", onetrainer(**SDXL, resolution="512, 768"), {"resolutions": (512, 768)}, ""),
        ("onetrainer", onetrainer(model_type="SANA", resolution="1000x512"), {"buckets": (Size(512, 992),)}, ""),
        ("onetrainer", onetrainer(resolution="500", aspect_ratio_bucketing=False),
         {"buckets": (Size(500, 500),)}, ""),
        ("onetrainer", {"config.json": '{"concept_file_name": "none.json"}'}, {}, "none.json is not there"),
        ("simpletuner", simpletuner({"resolution": 1024}), {"resolutions": (1024,), "bucket_step": 64}, ""),
        ("simpletuner", simpletuner({}, aspect_bucket_alignment=16), {"resolutions": (1024,), "bucket_step": 16}, ""),
        ("simpletuner", simpletuner({}, model_family="sdxl", aspect_bucket_alignment=8), {"bucket_step": 64}, ""),
        ("simpletuner", simpletuner({"resolution": 0.5, "resolution_type": "area", "crop": True}),
         {"buckets": (Size(707, 707),), "bucket_step": 64}, "crops are centered, crop_style is not used"),
        ("simpletuner", simpletuner({"resolution": 768, "resolution_type": "pixel", "crop": True}),
         {"buckets": (Size(768, 768),), "bucket_step": 64}, "aspect_bucket_alignment 64 (default)"),
        ("simpletuner", simpletuner({"resolution": 768, "resolution_type": "pixel", "minimum_image_size": 0.25}),
         {"resolutions": (768,), "bucket_step": 64, "min_side": 768}, "minimum_image_size is not used"),
        ("musubi", musubi("resolution = 512\nenable_bucket = true\nframe_stride = 4"),
         {"resolutions": (512,), "upscale": True, "frames": None}, "frame_stride is not used"),
        ("musubi", musubi("enable_bucket = true\nbucket_no_upscale = true"),
         {"resolutions": (Size(544, 960),), "upscale": False}, ""),
        ("musubi", musubi("resolution = [640, 480]"),
         {"buckets": (Size(480, 640),), "upscale": True, "bucket_step": 16}, "enable_bucket False (default)"),
        ("musubi", musubi("target_frames = [1, 46, 81]"), {"frames": (1, 45, 81)}, ""),
        ("ai-toolkit", ai_toolkit({"resolution": [512, 768]}, trigger_word="ohwx"),
         {"resolutions": (512, 768), "bucket_step": 32, "flip": None}, "trigger_word 'ohwx'"),
        ("ai-toolkit", ai_toolkit({"flip_x": True}, model={"arch": "sdxl"}),
         {"resolutions": (512,), "bucket_step": 16, "flip": True}, ""),
        ("ai-toolkit", ai_toolkit({"square_crop": True}, model={"arch": "wan21:t2v"}),
         {"buckets": (Size(512, 512),), "bucket_step": 16}, ""),
    ],
)  # fmt: skip
def test_settings_are_read(tmp_path, trainer, files, options, words):
    path = written(tmp_path, files)
    assert trainer_of(path, None).name == trainer
    settings = TRAINERS[trainer].settings(path)
    assert options.items() <= settings.options.items()
    assert words in settings.words
    if trainer == "simpletuner":
        assert settings.source["config"] == str(tmp_path / "multidatabackend.json")


def test_batch_sizes_are_read(tmp_path):
    for trainer, files in (
        ("kohya", sd_scripts("resolution = 512\nbatch_size = 3")),
        ("onetrainer", onetrainer(batch_size=3)),
        ("simpletuner", simpletuner({}, train_batch_size=3)),
        ("musubi", musubi("")),
        ("ai-toolkit", ai_toolkit({}, train={"batch_size": 3})),
    ):
        assert TRAINERS[trainer].settings(written(tmp_path, files)).batch == 3


MOVED = [{"name": "cats", "image": {"enable_random_hue": True}, "text": {"enable_tag_shuffling": True}}]
FROZEN = {"text_encoder": {"train": False}}
MOVING = {"random_crop": True, "flip_y": True, "num_frames": 41, "scale": 0.5, "shuffle_tokens": True}


@pytest.mark.parametrize(
    ("trainer", "files", "no_latents", "no_text"),
    [
        ("kohya", {"lora.toml": PLAIN}, (), ("shuffle_caption = true",)),
        ("kohya", sd_scripts("resolution = 1024"), ("random_crop = true",), ()),
        ("onetrainer", onetrainer(STILL, **FROZEN), (), ()),
        ("onetrainer", onetrainer(MOVED, latent_caching=False, **FROZEN, text_encoder_layer_skip=1),
         ("latent_caching = false", "concept cats: enable_crop_jitter = true",
          "concept cats: enable_random_hue = true"),
         ("text_encoder_layer_skip = 1", "concept cats: enable_tag_shuffling = true")),
        ("onetrainer", onetrainer(**FROZEN, **SDXL), (), ("text_encoder_2.train = true",)),
        ("simpletuner", simpletuner({"vae_cache_disable": True}), ("cats: vae_cache_disable = true",), ()),
        ("simpletuner", simpletuner({"crop": True, "crop_aspect": "random"}), ("cats: crop_aspect = random",), ()),
        ("simpletuner", simpletuner({"crop": True, "crop_style": "corner"}), ("cats: crop_style = corner",), ()),
        ("simpletuner", simpletuner({"crop_style": "corner"}, aspect_bucket_rounding=3),
         ("aspect_bucket_rounding = 3",), ()),
        ("simpletuner", simpletuner({"caption_shuffle": {"enable": True}}), (),
         ("cats: caption_shuffle.enable = true",)),
        ("musubi", musubi("frame_extraction = 'slide'"), ("frame_extraction = slide",), ()),
        ("ai-toolkit", ai_toolkit(MOVING, train={"train_text_encoder": True}),
         ("random_crop = true", "flip_y = true", "scale = 0.5", "num_frames: videos"),
         ("shuffle_tokens = true", "train_text_encoder = true")),
    ],
)  # fmt: skip
def test_settings_that_forbid_a_cache_are_named(tmp_path, trainer, files, no_latents, no_text):
    settings = TRAINERS[trainer].settings(written(tmp_path, files))
    assert (settings.no_latents, settings.no_text) == (no_latents, no_text)


BACKEND = '{"id": "a", "type": "local"'


@pytest.mark.parametrize(
    ("trainer", "files", "expected"),
    [
        ("kohya", {}, "No such file"),
        ("kohya", {"x.toml": "resolution = "}, "no TOML"),
        ("kohya", {"x.toml": "enable_bucket = true"}, "has no resolution"),
        ("kohya", {"x.toml": "resolution = 'big'"}, "another form"),
        ("kohya", sd_scripts("resolution = 512\nenable_bucket = true|resolution = 512"), "several values of"),
        ("onetrainer", {"x.json": "[]"}, "OneTrainer saves no such file"),
        ("onetrainer", {"x.json": "{"}, "no JSON file"),
        ("onetrainer", onetrainer(resolution="large"), "another form"),
        ("simpletuner", {"x.json": "["}, "no JSON file"),
        ("simpletuner", {"x.json": '[{"id": "t", "dataset_type": "text_embeds"}]'}, "no backend of images"),
        ("simpletuner", {"x.json": f'[{BACKEND}, "resolution": "big"}}]'}, "another form"),
        ("simpletuner", {"x.json": f'[{BACKEND}}}, {BACKEND}, "resolution_type": "pixel"}}]'},
         "several values of resolution or resolution_type"),
        ("simpletuner", {"x.json": '{"data_backend_config": "none.json"}'}, "none.json is not there"),
        ("musubi", musubi("enable_bucket = true", ""), "several values of enable_bucket"),
        ("ai-toolkit", ai_toolkit({"resolution": 512}, {"resolution": 768}), "several values of resolution"),
        ("ai-toolkit", {"x.yaml": "config: ["}, "no YAML file"),
    ],
)  # fmt: skip
def test_wrong_files_are_named(tmp_path, trainer, files, expected):
    path = written(tmp_path, files) if files else tmp_path / "none.toml"
    with pytest.raises(UsageError, match=expected):
        TRAINERS[trainer].settings(path)
