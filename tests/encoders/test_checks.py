import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_vae import tiny_vae

from latentcache.encoders.text.describe import check_tokenizer
from latentcache.encoders.vae.describe import check_vae
from latentcache.encoders.vae.locate import WEIGHTS_NAME
from latentcache.encoders.versions import device_facts
from latentcache.errors import UnsupportedModelError
from latentcache.fields.input_ids import InputIdsSettings
from latentcache.fields.latents import LatentsSettings


def test_a_vae_is_described_and_its_weights_are_read(tmp_path):
    folder = tiny_vae(tmp_path / "vae")
    assert check_vae(LatentsSettings(model=str(folder))) == f"{folder} is AutoencoderKL: 4 channels, f2"
    assert check_vae(LatentsSettings()) == ""
    assert check_vae(LatentsSettings(model="demo")).startswith("demo is ")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_not_finite_are_found(value, dtype, tmp_path):
    path = tiny_vae(tmp_path / "vae") / WEIGHTS_NAME
    tensors = {name: one.astype(dtype) for name, one in load_file(path).items()}
    tensors["decoder.conv_in.bias"][:] = value
    save_file(tensors, path)
    assert check_vae(LatentsSettings(model=str(path.parent))), "no encoder reads the decoder"
    tensors["encoder.conv_in.bias"][-1] = value
    save_file(tensors, path)
    with pytest.raises(UnsupportedModelError, match="weights that are not finite") as caught:
        check_vae(LatentsSettings(model=str(path.parent)))
    assert "tensor encoder.conv_in.bias" in caught.value.why


def test_a_tokenizer_is_described():
    assert check_tokenizer(InputIdsSettings(tokenizer="stub")) == "stub: 261 ids, with a chat template"
    assert check_tokenizer(InputIdsSettings()) == ""


def test_the_device_is_asked():
    found = device_facts("cpu")
    assert not found["usable"]
    assert found["torch"]
