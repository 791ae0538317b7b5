"""Serve one epoch by the code of a checkout of sd-scripts: python serve_sd_scripts.py CHECKOUT TOML OUT ARCH [text].

Run in an interpreter of its own. Data set, bucketing, cache check, loading and collate are the trainer's. A model
that is asked for anything is an error: an image or a caption would be encoded again. Packages that this does not
need, but that the modules import, are stand-ins. Writes an ``.npz`` with the batches, and a line of JSON to stdout.
"""

import argparse
import json
import sys
from unittest.mock import MagicMock

import numpy as np
import standins


class Refused:
    """A model that must not be used."""

    device, dtype = "cpu", None

    def to(self, *_, **__):
        return self

    def __getattr__(self, name):
        raise AssertionError(f"the trainer encodes again: {name}")


def main():
    checkout, config, out, architecture, *more = sys.argv[1:]
    import torch

    standins.install(checkout)
    from library import config_util, train_util

    np.random.seed(0)
    user = config_util.load_user_config(config)
    sanitizer = config_util.ConfigSanitizer(True, True, False, True)
    arguments = argparse.Namespace(
        debug_dataset=False, max_token_length=None, train_batch_size=2, prior_loss_weight=1.0
    )
    blueprint = config_util.BlueprintGenerator(sanitizer).generate(user, arguments, tokenizer=MagicMock())
    group = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
    group = group[0] if isinstance(group, tuple) else group
    is_stable = not hasattr(train_util, "LatentsCachingStrategy")
    if is_stable:
        vae = Refused()
        group.cache_latents(vae, 1, True, True)
        if more:
            group.cache_text_encoder_outputs((None, None), (Refused(), Refused()), "cpu", torch.float32, True, True)
    else:
        _set_strategies(architecture, text=bool(more))
        group.set_current_strategies()
        machine = MagicMock(num_processes=1, process_index=0)
        group.new_cache_latents(Refused(), machine)
        if more:
            group.new_cache_text_encoder_outputs([Refused(), Refused()], machine)
    served = {}
    for dataset in group.datasets:
        dataset.get_input_ids = lambda *_: torch.zeros(
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
                for part in ("original_sizes_hw", "crop_top_lefts", "target_sizes_hw"):
                    served[f"{name}/{part}"] = np.array(batch[part][number])
                outputs = batch.get("text_encoder_outputs_list") or [
                    one
                    for part in (
                        "text_encoder_outputs1_list",
                        "text_encoder_outputs2_list",
                        "text_encoder_pool2_list",
                    )
                    if (one := batch.get(part)) is not None
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
    sys.stdout.write(json.dumps(counts) + "\n")


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


def _set_strategies(architecture, *, text):
    import torch
    from library import strategy_base, strategy_flux, strategy_lumina, strategy_sd, strategy_sd3, strategy_sdxl

    latents = {
        "sd": lambda: strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 1, False),
        "sdxl": lambda: strategy_sd.SdSdxlLatentsCachingStrategy(False, True, 1, False),
        "sd3": lambda: strategy_sd3.Sd3LatentsCachingStrategy(True, 1, False),
        "flux": lambda: strategy_flux.FluxLatentsCachingStrategy(True, 1, False),
        "lumina": lambda: strategy_lumina.LuminaLatentsCachingStrategy(True, 1, False),
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
