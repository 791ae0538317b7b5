"""Make masks of the loss: the mean of a mask image in each latent cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentcache.encoders.pixels import PixelProducer, Pixels
from latentcache.fields.protocol import Finished, Job, Made, Prepared
from latentcache.images.decode import EncodedImage


class MaskProducer(PixelProducer):
    """Masks of a bucket."""

    def own_pixels(self, job: Job, image: EncodedImage) -> NDArray[np.uint8]:
        """(H, W, 3) of the mask: its colors, or the transparency of an image that is its own mask."""
        image_itself = len({place["path"] for place in job.inputs.values()}) == 1
        return image.opacity() if image_itself else super().own_pixels(job, image)

    def encode(self, batch: Sequence[Prepared]) -> Finished:
        """See :class:`Producer`. Items of one group."""
        group = self._groups[batch[0].output.group]
        images = (item.value.reshape(*group.dims[1:], 3) for item in batch)  # a clip of one frame as well
        made = (cell_means(image, self._recipe.encoder.factor) for image in images)
        return Finished([Made(array=array.reshape(group.shape)) for array in made])


def cell_means(pixels: Pixels, factor: int) -> NDArray[np.uint8]:
    """Mean gray (Pillow's ``L``) of each latent cell of (H, W, 3), rounded: (1, H / factor, W / factor)."""
    gray = np.asarray(Image.fromarray(pixels).convert("L"))
    height, width = gray.shape
    cells = gray.reshape(1, height // factor, factor, width // factor, factor).mean(axis=(2, 4))
    return np.asarray(np.rint(cells), dtype=np.uint8)
