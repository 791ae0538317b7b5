"""Serve and train by the code of a checkout of SimpleTuner: CHECKOUT EXPORT SERVED FAMILY MODEL.

Run in an interpreter of its own. Factory, data and metadata backends, caches, sampler, collate and the training step
are the trainer's. An encoder that is asked for anything is an error: an image or a caption would be encoded again.
Writes an ``.npz`` with the values of each image, and a line of JSON to stdout: images, batches of an epoch as the
trainer counts them, batches that its sampler draws, and the losses of two steps (SDXL).
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
from standins import Refused, install

#: Imported by the trainer's modules, never called here.
_STANDINS = ("torchaudio", "imageio", "boto3", "botocore", "peft", "lycoris", "torchao", "trainingsample", "optimum",
             "wandb", "cv2", "av", "colorama", "deepspeed", "datasets", "pandas", "fast_luby",
             "simpletuner.simpletuner_sdk")  # fmt: skip
_MODULES = ("transformers.image_utils", "diffusers.loaders", "diffusers.models", "diffusers.utils.export_utils",
            "diffusers.pipelines.stable_diffusion_xl", "diffusers.pipelines.flux")  # fmt: skip
#: Of a batch: values that are compared.
PARTS = ("prompts", "latent_batch", "prompt_embeds", "add_text_embeds", "batch_time_ids", "encoder_attention_mask")
BATCH = 2


def refuse(*_, **__):
    """Fail where the trainer would encode."""
    raise AssertionError("the trainer encodes again")


class Arguments(types.SimpleNamespace):
    """Options of the command line; those that are not set are off."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def arguments(export, family, model):
    """Options as the advice of the export says them; others have the trainer's defaults."""
    import torch

    scratch = export.parent / "trainer-cache"
    return Arguments(
        data_backend_config=str(export / "multidatabackend.json"),
        pretrained_model_name_or_path=str(model),
        output_dir=str(export / "output"),
        cache_dir=str(scratch),
        cache_dir_text=str(scratch / "text"),
        cache_dir_vae=str(scratch / "vae"),
        model_family=family,
        model_type="lora",
        lora_type="standard",
        weight_dtype=torch.float32,
        base_weight_dtype=torch.float32,
        train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        resolution=1024,
        resolution_type="pixel_area",
        caption_strategy="filename",
        caption_dropout_probability=0.0,
        aspect_bucket_alignment=64,
        aspect_bucket_worker_count=1,
        metadata_update_interval=3600,
        skip_file_discovery="",
        vae_cache_scan_behaviour="recreate",
        vae_batch_size=1,
        read_batch_size=25,
        write_batch_size=128,
        image_processing_batch_size=32,
        max_workers=2,
        tokenizer_max_length=512,
        num_train_epochs=1,
        max_train_steps=0,
        seed=0,
        data_aesthetic_score=7.0,
        nsfw_check_min_votes=1,
        nsfw_check_video_frame_count=1,
        nsfw_check_video_min_flagged_frames=1,
        flow_schedule_shift=3.0,
        loss_type="l2",
        snr_gamma=0,
        snr_weight=1.0,
        masked_loss_probability=1.0,
        input_perturbation=0.0,
        noise_offset=0.0,
        noise_offset_probability=0.0,
        scheduled_sampling_max_step_offset=0,
        disable_segmented_timestep_sampling=True,
        timestep_bias_strategy="none",
        timestep_bias_portion=0.25,
        timestep_bias_multiplier=1.0,
        timestep_bias_begin=0,
        timestep_bias_end=1000,
    )


def refusing_model(family, config, accelerator, folder):
    """The trainer's class of a model with the denoiser of a folder; its encoders refuse."""
    import diffusers

    module, name, part, kind = {
        "sdxl": ("sdxl", "SDXL", "unet", diffusers.UNet2DConditionModel),
        "flux": ("flux", "Flux", "transformer", diffusers.FluxTransformer2DModel),
        "sd1x": ("sd1x", "StableDiffusion1", "unet", None),
        "sd3": ("sd3", "SD3", "transformer", None),
    }[family]
    model = getattr(importlib.import_module(f"simpletuner.helpers.models.{module}.model"), name)(config, accelerator)
    model.vae, model.text_encoders, model.tokenizers = Refused(), [Refused()], [Refused()]
    model.get_vae = Refused
    model.encode_text_batch = model.encode_cache_batch = refuse
    model.get_transforms = lambda *_, **__: pixels
    model.model = kind and kind.from_pretrained(folder, subfolder=part)
    return model


def pixels(image):
    """(C, H, W) from -1 to 1, as torchvision gives them, which is a stand-in."""
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def main():
    checkout, export, served_path, family, folder = sys.argv[1:]
    os.environ["SIMPLETUNER_SKIP_TORCH"] = "1"
    install(checkout, _STANDINS, _MODULES)
    import accelerate
    import torch
    from simpletuner.helpers.data_backend.factory import FactoryRegistry
    from simpletuner.helpers.training.state_tracker import StateTracker

    torch.Tensor.pin_memory = lambda self: self  # there is no GPU
    torch.manual_seed(0)
    export = Path(export).resolve()
    config, accelerator = arguments(export, family, folder), accelerate.Accelerator(cpu=True)
    StateTracker.set_args(config)
    StateTracker.set_accelerator(accelerator)
    StateTracker.set_model_family(family)
    StateTracker.set_vae_dtype(torch.float32)
    StateTracker.set_weight_dtype(torch.float32)
    model = refusing_model(family, config, accelerator, folder)
    StateTracker.set_model(model)
    factory = FactoryRegistry(config, accelerator, model.text_encoders, model.tokenizers, model)
    factory.configure(json.loads((export / "multidatabackend.json").read_text("utf-8")))
    backends = {name: entry for name, entry in StateTracker.get_data_backends().items() if "sampler" in entry}
    batches = {name: len(backend["metadata_backend"]) for name, backend in backends.items()}
    served, drawn = {}, []
    for name, backend in backends.items():
        buckets = backend["metadata_backend"].aspect_ratio_bucket_indices.values()
        for path in [path for paths in buckets for path in paths]:
            samples = backend["sampler"]._validate_and_yield_images_from_samples([path], None)
            keep(f"{name}/{Path(path).name}", batch_of(backend, samples), served)
        drawn += list(sampled(backend))
    losses = train(model, drawn[:2]) if family == "sdxl" else []
    pixels_of = [batch.get("conditioning_pixel_values") for batch in drawn]
    masks = [mask for values in pixels_of if values is not None for mask in values]
    served |= {f"masks/{number}": mask.numpy() for number, mask in enumerate(masks)}
    images = len(served) - len(masks)
    np.savez(served_path, **served)
    is_reg = {name: bool(backend["train_dataset"].is_regularisation_data) for name, backend in backends.items()}
    counts = {"images": images // len(PARTS), "batches": batches, "drawn": len(drawn), "losses": losses}
    sys.stdout.write(f"\n{json.dumps(counts | {'is_reg': is_reg})}\n")


def batch_of(backend, samples):
    """A batch as the trainer collates it."""
    from simpletuner.helpers.training.collate import collate_fn

    return collate_fn([backend["train_dataset"][tuple(samples)]])


def sampled(backend):
    """An epoch of its sampler, which leaves images out: it retires the bucket after the one that is empty."""
    from simpletuner.helpers.training.exceptions import MultiDatasetExhausted

    try:
        for samples in backend["sampler"]:
            yield batch_of(backend, samples)
    except MultiDatasetExhausted:
        return


def keep(name, batch, served):
    """Take the values of a batch of one."""
    served[f"{name}/prompts"] = np.array(batch["prompts"][0])
    for part in PARTS[1:]:
        value = batch.get(part)
        served[f"{name}/{part}"] = np.zeros(0) if value is None else value[0].float().numpy()


def train(model, batches):
    """Two steps: preparation, prediction and loss are the trainer's. Returns the losses."""
    import torch

    optimizer = torch.optim.SGD(model.model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        prepared = model.prepare_batch(batch, {"global_step": 0, "args": {}})
        loss = model.loss(prepared, model.model_predict(prepared)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
