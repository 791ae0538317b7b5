"""Devices, and the translation of their errors; test_encoder.py has both inside an encoder."""

import pytest
import torch

from latentcache.encoders.devices import Translator, device_report, first_line
from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError

TRANSLATOR = Translator(device=torch.device("cpu"), name="stub", label="my model")


def test_a_cpu_is_no_usable_cuda_device():
    report = device_report("cpu")
    assert (report["usable"], report["torch"]) == (False, torch.__version__)


def fails_with(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), DeviceMemoryError),
        (MemoryError(), DeviceMemoryError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), DeviceMemoryError),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), DeviceError),
        (torch.AcceleratorError("an illegal memory access was encountered"), DeviceError),
        (RuntimeError("Sizes of tensors must match"), EncoderError),
        (ValueError("not divisible"), EncoderError),
    ],
    ids=str,
)
def test_errors_are_translated_without_context(error, kind):
    with pytest.raises(kind, match="two images") as caught:
        TRANSLATOR.run(fails_with(error), "two images")
    assert type(caught.value) is kind
    assert caught.value.__context__ is None
    assert caught.value.why == first_line(error)


def test_other_exceptions_pass_through():
    with pytest.raises(TypeError):
        TRANSLATOR.run(fails_with(TypeError("a bug")), "two images")
