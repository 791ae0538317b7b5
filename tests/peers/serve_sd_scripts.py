"""Serve one epoch by the code of a checkout of sd-scripts: python serve_sd_scripts.py CHECKOUT TOML OUT ARCH [text].

Run in an interpreter of its own. Data set, bucketing, cache check, loading and collate are the trainer's. A model
that is asked for anything is an error: an image or a caption would be encoded again. ``DRAW=0`` in the environment
flips every image, and else none is. Packages that this does not
need, but that the modules import, are stand-ins. Writes an ``.npz`` with the batches, and a line of JSON to stdout.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import standins
from standins import Refused


def main():
    checkout, config, out, architecture, *more = sys.argv[1:]
    train_util, group = _group(checkout, config)
    if more == ["pixels"]:
        np.savez(out, **_pixels(train_util, group))
        sys.stdout.write("{}\n")
        return
    _check_caches(train_util, group, architecture, text=bool(more))
    import torch

    served = {}
    for dataset in group.datasets:
        getattr(dataset, "dreambooth_dataset_delegate", dataset).get_input_ids = lambda *_: torch.zeros(
            77, dtype=torch.long
        )  # tokens of a caption, which is given below
        for at in range(len(dataset)):
            bucket = dataset.bucket_manager.buckets[dataset.buckets_indices[at].bucket_index]
            size, first = dataset.buckets_indices[at].bucket_batch_size, dataset.buckets_indices[at].batch_index
            keys = bucket[first * size : (first + 1) * size]
            batch = dataset[at]
            for number, key in enumerate(keys):
                name = f"{key.rpartition('/')[2]}@{dataset.width}x{dataset.height}"
                served[f"{name}/latents"] = batch["latents"][number].numpy()
                served[f"{name}/caption"] = np.array(batch["captions"][number])
                if "conditioning_images" in batch:
                    served[f"{name}/mask"] = batch["conditioning_images"][number].numpy()
                if batch.get("alpha_masks") is not None:
                    served[f"{name}/alpha"] = batch["alpha_masks"][number].numpy()
                for part in ("original_sizes_hw", "crop_top_lefts", "target_sizes_hw"):
                    served[f"{name}/{part}"] = np.array(batch[part][number])
                outputs = batch.get("text_encoder_outputs_list") or [
                    values_of_part
                    for part in (
                        "text_encoder_outputs1_list",
                        "text_encoder_outputs2_list",
                        "text_encoder_pool2_list",
                    )
                    if (values_of_part := batch.get(part)) is not None
                ]
                for order, values in enumerate(outputs):
                    served[f"{name}/text{order}"] = np.asarray(values[number])
    if len(more) > 1:
        served |= _encoded_by_lumina(
            more[1], more[2], sorted({str(served[key]) for key in served if "/caption" in key})
        )
    np.savez(out, **served)
    batches = sum(len(dataset) for dataset in group.datasets)
    counts = {"images": sum(len(dataset.image_data) for dataset in group.datasets), "batches": batches}
    counts["repeats"] = {
        key.rpartition("/")[2]: info.num_repeats
        for dataset in group.datasets
        for key, info in dataset.image_data.items()
    }
    sys.stdout.write(json.dumps(counts) + "\n")


def _group(checkout, config):
    """The trainer's data sets, with images in their buckets."""
    import torch

    standins.install(checkout)
    from library import config_util, train_util

    np.random.seed(0)
    user = config_util.load_user_config(config)
    # of torchvision, which need not be there: for masks alone
    train_util.IMAGE_TRANSFORMS = lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
    random.random = lambda: float(os.environ.get("DRAW", "1"))
    with_masks = "conditioning_data_dir" in Path(config).read_text("utf-8")  # as --masked_loss
    sanitizer = config_util.ConfigSanitizer(True, True, with_masks, True)
    arguments = argparse.Namespace(
        debug_dataset=False, max_token_length=None, train_batch_size=2, prior_loss_weight=1.0
    )
    blueprint = config_util.BlueprintGenerator(sanitizer).generate(user, arguments, tokenizer=MagicMock())
    group = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
    group = group[0] if isinstance(group, tuple) else group
    return train_util, group


def _check_caches(train_util, group, architecture, *, text):
    """Its look for what is cached; it encodes what is not, which is an error here."""
    import torch

    if not hasattr(train_util, "LatentsCachingStrategy"):  # stable
        group.cache_latents(Refused(), 1, True, True)
        if text:
            group.cache_text_encoder_outputs((None, None), (Refused(), Refused()), "cpu", torch.float32, True, True)
        return
    _set_strategies(architecture, text=text)
    group.set_current_strategies()
    machine = MagicMock(num_processes=1, process_index=0)
    group.new_cache_latents(Refused(), machine)
    if text:
        group.new_cache_text_encoder_outputs([Refused(), Refused()], machine)


def _encoded_by_lumina(model, system_prompt, captions):
    """Text as the trainer encodes it, with the text encoder and the tokenizer of a pipeline."""
    import torch
    import transformers
    from library import strategy_lumina

    tokens = strategy_lumina.LuminaTokenizeStrategy.__new__(strategy_lumina.LuminaTokenizeStrategy)
    tokens.tokenizer = transformers.AutoTokenizer.from_pretrained(f"{model}/tokenizer", padding_side="right")
    tokens.system_prompt, tokens.max_length = f"{system_prompt} <Prompt Start> ", 256
    encoder = transformers.Gemma2Model.from_pretrained(f"{model}/text_encoder")
    encoding = strategy_lumina.LuminaTextEncodingStrategy()
    with torch.no_grad():
        results = [encoding.encode_tokens(tokens, [encoder], tokens.tokenize(caption)) for caption in captions]
    return {
        f"{caption}/own{order}": values[0].numpy()
        for caption, result in zip(captions, results, strict=True)
        for order, values in enumerate(result)
    }


def _pixels(train_util, group):
    """Pixels (H, W, 3) as the trainer resizes and crops them before it encodes them, by the name of the image."""
    pixels = {}
    for dataset in group.datasets:
        for key, info in dataset.image_data.items():
            image = train_util.load_image(info.absolute_path)
            cropped, *_ = train_util.trim_and_resize_if_required(False, image, info.bucket_reso, info.resized_size)
            pixels[key.rpartition("/")[2]] = cropped
    return pixels


def _set_strategies(architecture, *, text):
    import torch
    from library import (
        strategy_base,
        strategy_flux,
        strategy_hunyuan_image,
        strategy_lumina,
        strategy_sd,
        strategy_sd3,
        strategy_sdxl,
    )

    latents = {
        "sd": lambda: strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 1, False),
        "sdxl": lambda: strategy_sd.SdSdxlLatentsCachingStrategy(False, True, 1, False),
        "sd3": lambda: strategy_sd3.Sd3LatentsCachingStrategy(True, 1, False),
        "flux": lambda: strategy_flux.FluxLatentsCachingStrategy(True, 1, False),
        "lumina": lambda: strategy_lumina.LuminaLatentsCachingStrategy(True, 1, False),
        "hunyuan-image": lambda: strategy_hunyuan_image.HunyuanImageLatentsCachingStrategy(True, 1, False),
    }
    strategy_base.LatentsCachingStrategy.set_strategy(latents[architecture]())
    tokens = torch.zeros(1, 77, dtype=torch.long)  # of no use here: the caption itself is compared
    strategy_base.TokenizeStrategy.set_strategy(MagicMock(tokenize=lambda caption: [tokens]))
    if text:
        texts = {
            "sdxl": strategy_sdxl.SdxlTextEncoderOutputsCachingStrategy,
            "flux": strategy_flux.FluxTextEncoderOutputsCachingStrategy,
            "sd3": strategy_sd3.Sd3TextEncoderOutputsCachingStrategy,
            "lumina": strategy_lumina.LuminaTextEncoderOutputsCachingStrategy,
        }
        strategy = texts[architecture](True, 1, False)
        strategy_base.TextEncoderOutputsCachingStrategy.set_strategy(strategy)


main()
