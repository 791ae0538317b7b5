"""Sizes by OneTrainer's own code: python sizes_onetrainer.py MGDS SETTINGS. Prints vectors for ``compare``."""

import json
import random
import sys

sys.path.insert(0, sys.argv[1])
from mgds.PipelineModule import PipelineModule
from mgds.pipelineModules.AspectBucketing import AspectBucketing
from mgds.pipelineModuleTypes.RandomAccessPipelineModule import RandomAccessPipelineModule


class Images(PipelineModule, RandomAccessPipelineModule):
    """Sizes of images, one resolution, and one frame."""

    def __init__(self, sizes, resolution):
        super().__init__()
        self.sizes, self.resolution = sizes, resolution

    def length(self):
        return len(self.sizes)

    def get_inputs(self):
        return []

    def get_outputs(self):
        return ["size", "resolution", "frames"]

    def get_item(self, variation, index, requested_name=None):
        return {"size": self.sizes[index], "resolution": str(self.resolution), "frames": 1}


class Pipeline:
    modules = ()


def vectors(draw):
    resolution, step = draw.randint(200, 2000), draw.choice([8, 16, 32, 64])
    sizes = [(draw.randint(64, 4096), draw.randint(64, 4096)) for _ in range(48)]
    sizes += [(1500, 1000), (1000, 1500), (resolution, resolution)]
    bucketing = AspectBucketing(step, "size", "resolution", None, None, "frames", False, "scaled", "bucket", "all")
    pipeline = Pipeline()
    pipeline.modules = [Images(sizes, resolution), bucketing]
    for number, module in enumerate(pipeline.modules):
        module.init(pipeline, 42, number, None)
    bucketing.start(0)
    for number, size in enumerate(sizes):
        sizes = bucketing.get_item(0, number)
        options = {"resolution": [resolution, resolution], "step": step}
        yield [options, True, size, sizes["bucket"], sizes["scaled"]]


draw = random.Random(0)
sys.stdout.write(json.dumps([vector for _ in range(int(sys.argv[2])) for vector in vectors(draw)]))
