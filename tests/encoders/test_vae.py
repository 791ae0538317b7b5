"""Every class against its own encode, precision and storage, and what happens when something breaks."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from latentcache.encoders.describe import describe_model
from latentcache.encoders.families import FAMILIES
from latentcache.encoders.modules import load_module
from latentcache.encoders.opening import check_encoder, open_encoder
from latentcache.encoders.storage import from_bfloat16
from latentcache.encoders.vae import load_vae
from latentcache.errors import DeviceError, DeviceMemoryError, EncoderError

SIX = ["AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLQwenImage", "AutoencoderKLWan"]
SIX += ["AutoencoderKLFlux2"]
ALL = [*FAMILIES, "AutoencoderKLCogVideoX"]


def opened(folder, **changes):
    options = {"storage_dtype": "float32", "device": "cpu"} | changes
    return load_vae(describe_model(str(folder), **options), device="cpu")


def rewrite(path, change):
    """Change the tensors of a weights file in place."""
    tensors = load_file(path)
    tensors = change(tensors) or tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ALL)
def test_latents_are_those_of_the_class_itself(name, tiny, pictures, reference):
    encoder = opened(tiny(name))
    batch = encoder.encode(pictures)
    spec = encoder.spec
    assert batch.latents.shape == (3, spec.channels, 64 // spec.factor, 96 // spec.factor)
    assert batch.latents.dtype == np.float32
    assert batch.finite.all()
    np.testing.assert_allclose(batch.latents, reference(tiny(name), pictures), atol=1e-5, rtol=0)
    check_encoder(encoder)


def test_the_table_covers_the_six_classes_and_their_tests():
    assert set(SIX) <= set(FAMILIES)


@pytest.mark.parametrize("name", ALL)
def test_no_decoder_is_left_and_the_rest_is_frozen(name, tiny):
    encoder = opened(tiny(name))
    (module,) = encoder._modules.values()
    names = [parameter for parameter, _ in module.named_parameters()]
    assert names
    assert not [n for n in names if n.startswith(("decoder", "post_quant_conv"))]
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not module.training


def test_two_dimensional_weights_are_channels_last(tiny):
    (module,) = opened(tiny("AutoencoderKL"))._modules.values()
    weight = module.encoder.down_blocks[0].resnets[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("compute", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_every_compute_and_storage_type(compute, storage, tiny, pictures, reference):
    encoder = opened(tiny("AutoencoderKL"), compute_dtype=compute, storage_dtype=storage)
    batch = encoder.encode(pictures)
    expected = reference(tiny("AutoencoderKL"), pictures)
    types = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    assert batch.latents.dtype == types[storage]
    floats = from_bfloat16(batch.latents) if storage == "bfloat16" else batch.latents.astype(np.float32)
    tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}
    np.testing.assert_allclose(floats, expected, atol=max(tolerance[compute], tolerance[storage]), rtol=1e-2)
    assert batch.finite.all()


def test_overflow_in_the_storage_type_is_not_finite(copied, pictures):
    model = copied()

    def enlarge(tensors):
        tensors["quant_conv.weight"] *= 1e6

    rewrite(model.weights, enlarge)
    half = opened(model.folder, storage_dtype="float16").encode(pictures)
    full = opened(model.folder, storage_dtype="float32").encode(pictures)
    assert not half.finite.any()
    assert full.finite.all()


def test_precise_is_float32_from_the_file_and_not_from_rounded_weights(tiny, pictures, reference):
    encoder = opened(tiny("AutoencoderKL"), compute_dtype="bfloat16")
    expected = reference(tiny("AutoencoderKL"), pictures)
    assert np.abs(encoder.encode(pictures).latents - expected).max() > 1e-4
    np.testing.assert_allclose(encoder.encode(pictures, precise=True).latents, expected, atol=1e-5, rtol=0)


def test_overflow_in_float16_is_mended_by_precise(copied, pictures):
    model = copied()

    def overflow(tensors):
        tensors["encoder.conv_in.weight"] *= 6e4
        tensors["encoder.conv_in.bias"].fill_(6e4)

    rewrite(model.weights, overflow)
    encoder = opened(model.folder, compute_dtype="float16")
    assert not encoder.encode(pictures).finite.any()
    assert encoder.encode(pictures, precise=True).finite.all()
    with pytest.raises(EncoderError) as caught:
        check_encoder(encoder)
    assert caught.value.what == "AutoencoderKL gives values that are not finite in float16"
    assert caught.value.fix == "add --compute-dtype bfloat16 or float32"


def test_read_only_pixels_are_taken_without_a_warning(tiny, pictures):
    frozen = pictures.copy()
    frozen.flags.writeable = False
    encoder = opened(tiny("AutoencoderTiny"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        latents = encoder.encode(frozen).latents
    np.testing.assert_array_equal(latents, encoder.encode(pictures).latents)


def test_a_batch_and_its_parts_agree(tiny, pictures):
    encoder = opened(tiny("AutoencoderKLWan"))
    whole = encoder.encode(pictures).latents
    parts = np.concatenate([encoder.encode(pictures[i : i + 1]).latents for i in range(3)])
    np.testing.assert_allclose(whole, parts, atol=1e-5)


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderKLFlux2"])
def test_original_layout_and_full_checkpoint_give_the_same_encoder(name, copied, tiny, pictures, tmp_path):
    model = copied(name)
    plain = describe_model(str(model.folder), device="cpu")
    expected = opened(tiny(name)).encode(pictures).latents
    for prefix in ("", "first_stage_model.", "vae."):
        rest = {"model.diffusion_model.out.weight": torch.ones(3)} if prefix else {}
        path = tmp_path / f"checkpoint{len(prefix)}.safetensors"
        original = {prefix + ldm_name(n): ldm_tensor(n, t) for n, t in load_file(model.weights).items()}
        save_file({**original, **rest}, path)
        described = describe_model(str(path), device="cpu", config=str(model.config), storage_dtype="float32")
        assert described.spec.fingerprint == plain.spec.fingerprint
        np.testing.assert_allclose(load_vae(described, device="cpu").encode(pictures).latents, expected, atol=1e-6)


def test_diffusers_reads_the_original_layout_as_we_do(copied, pictures, tmp_path):
    from diffusers import AutoencoderKL

    model, path = copied(), tmp_path / "original.safetensors"
    save_file({ldm_name(name): ldm_tensor(name, t) for name, t in load_file(model.weights).items()}, path)
    theirs = AutoencoderKL.from_single_file(str(path), config=str(model.folder), local_files_only=True).eval()
    module = load_module(describe_model(str(path), config=str(model.folder), device="cpu"), torch.float32)
    ours = module.state_dict()
    assert ours
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name


def test_names_written_by_old_diffusers_are_read(copied, tiny, pictures):
    model = copied()
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}

    def rename(tensors):
        return {_replace(name, old): tensor for name, tensor in tensors.items()}

    rewrite(model.weights, rename)
    now, then = describe_model(str(tiny("AutoencoderKL"))), describe_model(str(model.folder))
    assert then.spec == now.spec
    latents = opened(model.folder).encode(pictures).latents
    np.testing.assert_allclose(latents, opened(tiny("AutoencoderKL")).encode(pictures).latents, atol=1e-6)


def test_shards_are_loaded(copied, tiny, pictures):
    from diffusers import AutoencoderKL

    model = copied()
    model.weights.unlink()
    AutoencoderKL.from_pretrained(tiny("AutoencoderKL")).save_pretrained(model.folder, max_shard_size="20KB")
    assert len(list(model.folder.glob("*.safetensors"))) > 1
    assert describe_model(str(model.folder)).spec == describe_model(str(tiny("AutoencoderKL"))).spec
    expected = opened(tiny("AutoencoderKL")).encode(pictures).latents
    np.testing.assert_allclose(opened(model.folder).encode(pictures).latents, expected, atol=1e-6)


def test_a_missing_tensor_is_named(copied):
    model = copied()
    rewrite(model.weights, lambda tensors: {n: t for n, t in tensors.items() if n != "encoder.conv_in.weight"})
    with pytest.raises(EncoderError) as caught:
        opened(model.folder)
    assert caught.value.what == (
        "1 tensors of AutoencoderKL are not in the weights; the first is encoder.conv_in.weight"
    )
    assert caught.value.fix == "download the weights again, or use the config.json that belongs to them"


def test_a_missing_decoder_does_not_matter(copied, tiny, pictures):
    model = copied()
    rewrite(model.weights, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("decoder.")})
    (model.folder / "diffusion_pytorch_model.safetensors").rename(model.folder / "encoder.safetensors")
    latents = opened(model.folder).encode(pictures).latents
    np.testing.assert_allclose(latents, opened(tiny("AutoencoderKL")).encode(pictures).latents, atol=1e-6)


def test_an_extra_tensor_in_the_encoder_is_named(copied):
    model = copied()
    rewrite(model.weights, lambda tensors: {**tensors, "encoder.adapter.weight": torch.ones(2)})
    with pytest.raises(EncoderError, match=r"1 tensors that AutoencoderKL does not have.*encoder\.adapter\.weight"):
        opened(model.folder)


def test_a_tensor_of_another_shape_is_named(copied):
    model = copied()
    rewrite(model.weights, lambda tensors: {**tensors, "encoder.conv_in.bias": torch.ones(9)})
    with pytest.raises(EncoderError) as caught:
        opened(model.folder)
    assert caught.value.what == "tensor encoder.conv_in.bias has shape (9,), AutoencoderKL needs (8,)"


def test_weights_that_are_not_finite_are_named(copied):
    model = copied()

    def spoil(tensors):
        tensors["encoder.conv_out.bias"][1] = float("nan")

    rewrite(model.weights, spoil)
    with pytest.raises(EncoderError) as caught:
        opened(model.folder)
    assert caught.value.what == "tensor encoder.conv_out.bias has values that are not finite"
    assert "download the weights again" in caught.value.fix


def test_weights_of_zeros_are_found_by_the_preflight(copied):
    model = copied()
    rewrite(model.weights, lambda tensors: {n: torch.zeros_like(t) for n, t in tensors.items()})
    with pytest.raises(EncoderError, match="gives the same latent for every part of a picture"):
        check_encoder(opened(model.folder))


def test_a_factor_that_is_not_the_models_is_an_error_with_both_shapes(tiny, pictures):
    description = describe_model(str(tiny("AutoencoderKL")), storage_dtype="float32")
    wrong = replace(description, spec=replace(description.spec, factor=4))
    with pytest.raises(EncoderError) as caught:
        load_vae(wrong, device="cpu").encode(pictures)
    assert caught.value.what == ("AutoencoderKL gives latents of shape (3, 4, 32, 48), expected (3, 4, 16, 24)")


def test_out_of_memory_is_a_memory_error_and_leaves_nothing_behind(tiny, pictures):
    encoder = opened(tiny("AutoencoderKL"))
    (module,) = encoder._modules.values()
    hook = module.encoder.conv_in.register_forward_pre_hook(lambda *_: torch.empty(1 << 58))
    with pytest.raises(DeviceMemoryError) as caught:
        encoder.encode(pictures)
    assert caught.value.what == "no memory left on the device for 3 pictures of 64x96"
    assert caught.value.__context__ is None
    hook.remove()
    assert encoder.encode(pictures).finite.all()


def test_a_device_that_fails_is_a_device_error(tiny, pictures):
    encoder = opened(tiny("AutoencoderKL"))
    (module,) = encoder._modules.values()

    def lose_device(*_):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    module.encoder.conv_in.register_forward_pre_hook(lose_device)
    with pytest.raises(DeviceError, match="the device cpu failed on 3 pictures of 64x96"):
        encoder.encode(pictures)


def test_a_size_the_model_cannot_take_is_an_encoder_error(tiny):
    encoder = opened(tiny("AutoencoderKLWan"))
    with pytest.raises(EncoderError, match="AutoencoderKLWan cannot encode 1 pictures of 9x9"):
        encoder.encode(np.zeros((1, 9, 9, 3), np.uint8))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there(device, tiny):
    with pytest.raises(DeviceError) as caught:
        open_encoder(describe_model(str(tiny("AutoencoderTiny"))), device=device)
    assert caught.value.what == f"torch cannot use the device {device}"
    assert "--device cpu" in caught.value.fix


def test_a_class_that_this_diffusers_does_not_have(copied):
    model = copied()
    model.config.write_text(model.config.read_text().replace("AutoencoderKL", "AutoencoderOfTomorrow"))
    described = describe_model(str(model.folder))
    assert described.spec.generic
    with pytest.raises(EncoderError, match="has no class AutoencoderOfTomorrow"):
        load_vae(described, device="cpu")


def test_close_gives_the_modules_back(tiny, pictures):
    encoder = opened(tiny("AutoencoderTiny"))
    encoder.close()
    assert not encoder._modules


def ldm_name(name):
    """diffusers' name of a tensor as the original latent-diffusion code has it (both halves)."""
    table = {".resnets.": ".block.", ".downsamplers.0.": ".downsample.", ".upsamplers.0.": ".upsample."}
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    for number in ("0", "1"):
        name = name.replace(f"mid_block.resnets.{number}", f"mid.block_{int(number) + 1}")
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    for new, old in attention.items():
        name = name.replace(f"mid_block.attentions.0.{new}.", f"mid.attn_1.{old}.")
    name = _replace(name, table).replace("down_blocks.", "down.")
    return name.replace("up_blocks.0.", "up.1.") if "up_blocks.0." in name else name.replace("up_blocks.1.", "up.0.")


def ldm_tensor(name, tensor):
    """Attention layers are 1x1 convolutions there."""
    linear = "attentions" in name and name.endswith("weight") and "group_norm" not in name
    return tensor[:, :, None, None].contiguous() if linear else tensor


def _replace(name, table):
    for new, old in table.items():
        name = name.replace(new, old)
    return name
