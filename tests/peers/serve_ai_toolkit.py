"""Serve all samples by the code of a checkout of ai-toolkit: CHECKOUT EXPORT SERVED ARCH SPACE STEP [TRIGGER].

Run in an interpreter of its own. Its data sets cache what is missing when they are made, with a model that fails if
used. Writes an ``.npz`` with the values of each item, and a line of JSON to stdout: files before and after, items and
batches.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import yaml
from standins import install

_STANDINS = ("torchaudio", "lycoris", "optimum", "oyaml", "torchao", "toolkit.control_generator", "toolkit.models",
             "toolkit.train_tools", "toolkit.audio", "toolkit.metadata")  # fmt: skip
_MODULES = ("transformers.image_utils", "transformers.models.siglip", "diffusers.models")
BATCH = 2


class Model:
    """What a data set asks of a model; encoders fail."""

    latent_space_version, te_padding_side, use_raw_control_images = None, "right", False
    encode_control_in_text_embeddings = is_audio_model = False
    device = device_torch = "cpu"
    vae = unet = None

    def __init__(self, arch, step):
        self.arch, self.step = self.text_embedding_space_version, self.step = arch, step
        self.model_config = type("Config", (), {"latent_space_version": None, "arch": arch, "is_pixart_sigma": False})
        self.is_xl, self.is_v3, self.is_flux, self.is_auraflow = arch == "sdxl", arch == "sd3", arch == "flux", False

    def get_bucket_divisibility(self):
        return self.step

    def __getattr__(self, name):
        raise AttributeError(name)

    def set_device_state_preset(self, what):
        raise AssertionError(f"the trainer encodes again: {what}")


def main():
    checkout, export, served_path, arch, step, *rest = sys.argv[1:]
    install(checkout, _STANDINS, _MODULES)
    import torch
    from toolkit import dataloader_mixins
    from toolkit.config_modules import DatasetConfig, preprocess_dataset_raw_config
    from toolkit.data_loader import AiToolkitDataset, dto_collation

    # Of torchvision, which is a stand-in; it makes tensors of masks.
    dataloader_mixins.transforms.Compose = lambda _: lambda image: torch.from_numpy(np.array(image))[None] / 255
    export, served, batches = Path(export), {}, 0
    random.seed(0)
    before = len(list(export.rglob("*.safetensors")))
    raw = yaml.safe_load((export / "datasets.yaml").read_text("utf-8"))["datasets"]
    if rest:
        raw = [{**entry, "trigger_word": rest[0]} for entry in raw]
    spaces, items = set(), 0
    for config in preprocess_dataset_raw_config(raw):
        dataset = AiToolkitDataset(DatasetConfig(**config), batch_size=BATCH, sd=Model(arch, int(step)))
        batches, items = batches + len(dataset), items + len(dataset.file_list)
        for index, item in enumerate(dataset.file_list):
            item.is_text_embedding_cached = bool(config["cache_text_embeddings"])
            spaces.add(item.latent_space_version)
            name = f"{Path(config['folder_path']).name}/{item.width}x{item.height}/{Path(item.path).stem}"
            name += f"/{config['resolution']}{'/flip' if item.flip_x else ''}"
            batch = dto_collation([dataset._get_single_item(index)])
            served[f"{name}/latents"] = batch.latents[0].float().numpy()
            served[f"{name}/caption"] = np.array(batch.get_caption_list()[0])
            if batch.prompt_embeds is not None:
                text = batch.prompt_embeds
                embeds = text.text_embeds[0]
                served[f"{name}/text_embeds"] = embeds.float().numpy()
                for part in ("pooled_embeds", "attention_mask"):
                    if getattr(text, part) is not None:
                        served[f"{name}/{part}"] = getattr(text, part)[0].float().numpy()
            if batch.mask_tensor is not None:
                served[f"{name}/mask"] = batch.mask_tensor[0].numpy()
    np.savez(served_path, **served)
    after = len(list(export.rglob("*.safetensors")))
    counts = {"files": [before, after], "items": items, "batches": batches, "spaces": sorted(spaces)}
    sys.stdout.write(f"\n{json.dumps(counts)}\n")


if __name__ == "__main__":
    main()
