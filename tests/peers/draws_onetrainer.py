"""What OneTrainer's generators draw: python draws_onetrainer.py ONETRAINER MGDS OUT CONFIG (JSON).

Its pipeline is set up by its own data loader, with images of the sizes of the files. Prints by concept, for each
image: its name, and for each variation the bucket and whether it is flipped.
"""

import importlib
import json
import sys
from unittest.mock import MagicMock

from serve_onetrainer import install, model_of


def main():
    trainer, mgds, out, settings = sys.argv[1:]
    import torch

    install(trainer, mgds)
    from modules.util.config.TrainConfig import TrainConfig
    from modules.util.TrainProgress import TrainProgress

    values = {"__version": 11, "concept_file_name": f"{out}/concepts.json", "cache_dir": f"{out}/cache"}
    values |= {"clear_cache_before_training": False, "train_device": "cpu", "dataloader_threads": 1}
    config = TrainConfig.default_values().from_dict(values | json.loads(settings))
    module = importlib.import_module("modules.dataLoader.StableDiffusionXLBaseDataLoader")
    cpu, model = torch.device("cpu"), model_of(config, text=False)
    loader = module.StableDiffusionXLBaseDataLoader(cpu, cpu, config, model, MagicMock(), TrainProgress())
    steps = {type(step).__name__: step for step in loader.get_data_set().loading_pipeline.modules}
    paths, buckets, flips = steps["CollectPaths"], steps["AspectBucketing"], steps["RandomFlip"]
    from PIL import Image

    steps["DownloadHuggingfaceDatasets"].start(0)
    paths.start(0)
    buckets.start(0)
    draws = {}
    for index, path in enumerate(paths.paths):
        with Image.open(path) as image:
            size = (image.height, image.width)
        buckets._get_previous_item = _answers(buckets, original_resolution=size)
        flips._get_previous_item = _answers(flips, image="plain", mask="plain", custom_conditioning_image="plain")
        variations = range(paths.concepts[index]["image_variations"])
        module = sys.modules[type(flips).__module__]
        module.functional = MagicMock(hflip=lambda _: "flipped")
        drawn = [list(buckets.get_item(variation, index)["crop_resolution"]) for variation in variations]
        flipped = [flips.get_item(variation, index)["image"] == "flipped" for variation in variations]
        draws.setdefault(paths.concepts[index]["path"], []).append([path.rpartition("/")[2], drawn, flipped])
    sys.stdout.write("\n" + json.dumps(draws))


def _answers(step, **known):
    """The values of the steps before, with those that are known without a pixel."""
    asked = type(step)._get_previous_item

    def answer(variation, name, index):
        return known[name] if name in known else asked(step, variation, name, index)

    return answer


main()
