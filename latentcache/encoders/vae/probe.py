"""Questions that only a process with torch can answer: the types of a device, and the resize kernel.

Workers call :func:`has_bfloat16` and :func:`can_resample` by name; arguments and results are JSON values.
"""

from __future__ import annotations

import torch

from latentcache.encoders.vae.encoder import choose_device
from latentcache.images.resize import resample_self_test


def has_bfloat16(device: str = "auto") -> bool:
    """True if a device computes bfloat16; devices that only emulate it are slower than in float32.

    Raises:
        DeviceError: The device does not exist.
    """
    chosen = choose_device(device)
    return chosen.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def can_resample() -> bool:
    """True if the uint8 resize of torch works here and agrees with Pillow's."""
    return resample_self_test()
