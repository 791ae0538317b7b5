"""Serve all samples by the code of a checkout of musubi-tuner: CHECKOUT EXPORT SERVED CODE [text].

Run in an interpreter of its own. The caching of latents, and with ``text`` of texts, runs first, with encoders that
fail: they delete files that they do not know. Then the data sets of a training are read. Writes an ``.npz`` with
every tensor of every sample, and a line of JSON to stdout: files before and after, samples and batches.
"""

import json
import multiprocessing
import sys
import types
from pathlib import Path

import numpy as np
from standins import install

_STANDINS = ("ascii_magic", "easydict", "sentencepiece", "tensorboard")


def refuse(batch):
    raise AssertionError(f"the trainer encodes again: {[item.item_key for item in batch]}")


def blueprint(export, code, *, training):
    from musubi_tuner.dataset import config_utils

    config = config_utils.load_user_config(str(export / "dataset.toml"))
    generator = config_utils.BlueprintGenerator(config_utils.ConfigSanitizer())
    group = generator.generate(config, types.SimpleNamespace(debug_dataset=False), architecture=code).dataset_group
    epoch = multiprocessing.Value("i", 0)
    return config_utils.generate_dataset_group_by_blueprint(group, training=training, shared_epoch=epoch).datasets


def cache(export, code, *, has_text):
    """Run the caching scripts: they encode what is missing, and delete what they do not know."""
    from musubi_tuner import cache_latents, cache_text_encoder_outputs

    datasets = blueprint(export, code, training=False)
    options = types.SimpleNamespace(num_workers=1, skip_existing=True, batch_size=None, keep_cache=False)
    cache_latents.encode_datasets(datasets, refuse, options)
    if has_text:
        files, paths = cache_text_encoder_outputs.prepare_cache_files_and_paths(datasets)
        cache_text_encoder_outputs.process_text_encoder_batches(1, True, None, datasets, files, paths, refuse)
        cache_text_encoder_outputs.post_process_cache_files(datasets, files, paths, False)


def main():
    checkout, export, served_path, code, *rest = sys.argv[1:]
    install(checkout, _STANDINS)
    export = Path(export)
    before = len(list(export.rglob("*.safetensors")))
    cache(export, code, has_text="text" in rest)
    served, batches, samples = {}, 0, 0
    for dataset in blueprint(export, code, training=True):
        manager = dataset.batch_manager
        batches, samples = batches + len(manager), samples + dataset.num_train_items
        name = Path(dataset.cache_directory).name
        manager.batch_size = 1
        items = [
            (bucket, number) for bucket in manager.bucket_resos for number in range(len(manager.buckets[bucket]))
        ]
        manager.bucket_batch_indices = items
        for number, (bucket, position) in enumerate(items):
            item = manager.buckets[bucket][position]
            for key, value in dataset[number].items():
                if value is not None:
                    served[f"{name}/{item.item_key}/{key}"] = value[0].float().numpy()
                    served[f"{name}/{item.item_key}/{key}/dtype"] = np.array(str(value[0].dtype))
            served[f"{name}/{item.item_key}/bucket"] = np.array(bucket[:2])
    np.savez(served_path, **served)
    after = len(list(export.rglob("*.safetensors")))
    sys.stdout.write(f"\n{json.dumps({'files': [before, after], 'samples': samples, 'batches': batches})}\n")


if __name__ == "__main__":
    main()
