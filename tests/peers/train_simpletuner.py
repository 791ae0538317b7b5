"""Serve every image and train two steps by SimpleTuner's own trainer: CHECKOUT EXPORT SERVED FAMILY MODEL [FLAVOUR].

Run in an interpreter of its own, on a CPU. The trainer's ``train.py`` reads a ``config.json`` that says what the
export advises, and sets up models, backends, caches, LoRA and optimizer. VAE and text encoders fail if they are used.
Before the training, each image is served by the trainer's backends and collate. Writes an ``.npz`` with the values of
each image, and a line of JSON to stdout.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from standins import install

#: Imported by the trainer's modules, never called here.
_STANDINS = ("torchaudio", "librosa", "spacy", "py3langid", "pypinyin", "hangul_romanize", "num2words", "imageio",
             "boto3", "botocore", "lycoris", "singlora", "torchao", "torchsde", "trainingsample", "optimum", "optimi",
             "prodigyplus", "skrample", "kernels", "deepspeed", "wandb", "cv2", "av", "colorama", "datasets",
             "pandas", "scipy", "bs4", "cryptography", "aiosqlite", "sse_starlette", "loguru",
             "open_clip")  # fmt: skip
_MODULES = ("transformers.image_utils", "diffusers.loaders", "diffusers.models", "diffusers.utils.export_utils",
            "diffusers.pipelines.stable_diffusion_xl", "diffusers.pipelines.flux")  # fmt: skip
#: Of a batch: values that are compared.
PARTS = ("prompts", "latent_batch", "prompt_embeds", "add_text_embeds", "batch_time_ids", "encoder_attention_mask",
         "conditioning_latents", "conditioning_pixel_values")  # fmt: skip


def settings(export, family, model, flavour=None):
    """Settings as the advice of the export says them, and what a training of two steps on a CPU needs."""
    return {
        "model_family": family,
        "model_flavour": flavour,
        "model_type": "lora",
        "pretrained_model_name_or_path": model,
        "pretrained_vae_model_name_or_path": model,
        "data_backend_config": f"{export}/multidatabackend.json",
        "output_dir": f"{export}/output",
        "cache_dir": "trainer-cache",
        "caption_dropout_probability": 0,
        "aspect_bucket_alignment": 64,
        "resolution": 256,
        "train_batch_size": 2,
        "max_train_steps": 2,
        "num_train_epochs": 0,
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "optimizer": "torch-adamw",
        "mixed_precision": "no",
        "base_model_default_dtype": "fp32",
        "validation_disable": True,
        "report_to": "none",
        "seed": 0,
    }


def refuse(*_, **__):
    """Fail where the trainer would encode."""
    raise AssertionError("the trainer encodes again")


def pixels(image):
    """(C, H, W) from -1 to 1, as torchvision gives them, which is a stand-in."""
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def main():
    checkout, export, served_path, *model = sys.argv[1:]
    install(checkout, _STANDINS, _MODULES)
    import diffusers
    import torch
    import transformers
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    modeling_qwen3_vl.Qwen3VLCausalLMOutputWithPast = dict  # a name of its release of transformers
    diffusers.AutoencoderKL.encode = refuse
    for name in ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"):
        getattr(transformers, name).forward = refuse
    torch.Tensor.pin_memory = lambda self, *_: self  # there is no GPU
    config = Path("config/config.json")
    config.parent.mkdir(exist_ok=True)
    config.write_text(json.dumps(settings(export, *model)), "utf-8")
    sys.argv[1:] = []
    os.environ["SIMPLETUNER_CONFIG_BACKEND"] = "json"
    from simpletuner.helpers.training.state_tracker import StateTracker
    from simpletuner.train import Trainer, _run_training

    trainer, served, losses = Trainer(exit_on_error=True), {}, []
    train, backward = trainer.train, trainer.accelerator.backward
    trainer.model.get_transforms = lambda *_, **__: pixels
    counts = {}

    def serve_and_train():
        backends = {name: entry for name, entry in StateTracker.get_data_backends().items() if "sampler" in entry}
        for name, backend in backends.items():
            for paths in backend["metadata_backend"].aspect_ratio_bucket_indices.values():
                for path in paths:
                    keep(f"{name}/{Path(path).name}", batch_of(backend, path), served)
        counts["batches"] = {name: len(backend["metadata_backend"]) for name, backend in backends.items()}
        counts["is_reg"] = {
            name: bool(entry["train_dataset"].is_regularisation_data) for name, entry in backends.items()
        }
        train()

    def backward_of(loss, **options):
        losses.append(loss.item())
        backward(loss, **options)

    trainer.train, trainer.accelerator.backward = serve_and_train, backward_of
    _run_training(trainer)
    counts |= {"images": len(served) // len(PARTS), "losses": losses, "steps": trainer.state["global_step"]}
    counts |= {"steps_per_epoch": trainer.config.num_update_steps_per_epoch}
    np.savez(served_path, **served)
    sys.stdout.write(f"\n{json.dumps(counts)}\n")


def batch_of(backend, path):
    """A batch of one image as the trainer collates it."""
    from simpletuner.helpers.training.collate import collate_fn

    samples = backend["sampler"]._validate_and_yield_images_from_samples([path], None)
    samples = backend["sampler"].connect_conditioning_samples(tuple(samples))
    return collate_fn([backend["train_dataset"][samples]])


def keep(name, batch, served):
    """Take the values of a batch of one."""
    served[f"{name}/prompts"] = np.array(batch["prompts"][0])
    for part in PARTS[1:]:
        value = batch.get(part)
        value = value[0] if isinstance(value, list) else value  # of each conditioning data set
        served[f"{name}/{part}"] = np.zeros(0) if value is None else value[0].float().numpy()


if __name__ == "__main__":
    main()
