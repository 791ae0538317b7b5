import json
import struct

import huggingface_hub
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from latentcache.encoders.files import (
    Wanted,
    download,
    expanded,
    fingerprint,
    is_hub_id,
    read_header,
    read_json,
    read_tensor,
    weights_in,
)
from latentcache.encoders.vae.families import encoder_tensors, is_encoder
from latentcache.errors import EncoderError, ModelNotFoundError, UnsupportedModelError

AGAIN = "download the file again and compare its size with the page it comes from"
RESAVE = "save it as safetensors where you trust it, then give that folder: model.save_pretrained(FOLDER)"


def safetensors_bytes(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype="F32", shape=(1,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


#: Headers that contradict themselves: spare bytes, another size, an offset below 0.
DAMAGED = (
    safetensors_bytes({"a": entry()}, bytes(9)),
    safetensors_bytes({"a": entry(shape=(2,))}, bytes(4)),
    safetensors_bytes({"a": entry(begin=-4, end=0)}),
)


@pytest.mark.parametrize(
    ("data", "kind", "fix"),
    [
        (b"GGUF\x03\0\0\0" + bytes(64), "a GGUF file",
         "give the safetensors VAE that belongs to the model (its vae/ folder)"),
        (b"PK\x03\x04" + bytes(64), "a pickle checkpoint", RESAVE),
        (b"\x80\x02}q\x00." + bytes(64), "a pickle checkpoint", RESAVE),
        (b"<!DOCTYPE html><html>" + bytes(64), "an HTML page", AGAIN),
        (b"\n  <html lang=en>" + bytes(64), "an HTML page", AGAIN),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "a git-lfs pointer",
         "run `git lfs pull` in its folder"),
        (b"", "empty", AGAIN),
        (b"abc", "not a safetensors file", RESAVE),
        (b"just some words in a file", "not a safetensors file", RESAVE),
        (struct.pack("<Q", 50) + b'{"a"', "a damaged safetensors file", AGAIN),
        (safetensors_bytes({"a": entry()}), "a damaged safetensors file", AGAIN),
        *((data, "a damaged safetensors file", AGAIN) for data in DAMAGED),
    ],
)  # fmt: skip
def test_a_wrong_file_is_rejected_by_name(tmp_path, data, kind, fix):
    path = tmp_path / "vae.safetensors"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError) as caught:
        read_header(path)
    assert (caught.value.what, caught.value.where) == (f"vae.safetensors is {kind}", str(path))
    assert caught.value.why
    assert caught.value.fix == fix


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_raise_a_package_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for content in (data, safetensors_bytes(data), safetensors_bytes(b"{" + data)):
        path.write_bytes(content)
        try:
            read_header(path)
        except UnsupportedModelError as error:
            assert error.fix  # noqa: PT017


def test_the_header_equals_safetensors(tiny):
    path = tiny("AutoencoderKL") / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    header = read_header(path)
    assert {name: info.shape for name, info in header.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read_tensor(header[name]), tensor.numpy())


def fingerprint_of(path):
    return fingerprint(encoder_tensors([path], ldm=True))


def test_fingerprint_ignores_decoder_metadata_and_order(copied, tmp_path):
    weights = copied().weights
    before, tensors = fingerprint_of(weights), load_file(weights)
    resaved = {name: t if is_encoder(name) else t + 1 for name, t in sorted(tensors.items(), reverse=True)}
    save_file(resaved, tmp_path / "other.safetensors", metadata={"format": "pt", "note": "resaved"})
    assert fingerprint_of(tmp_path / "other.safetensors") == before
    save_file({n: t for n, t in tensors.items() if is_encoder(n)}, tmp_path / "half.safetensors")
    assert fingerprint_of(tmp_path / "half.safetensors") == before


def test_fingerprint_changes_with_any_encoder_bit(copied):
    weights = copied().weights
    before, header, whole = fingerprint_of(weights), read_header(weights), weights.read_bytes()
    for name, info in header.items():
        flipped = bytearray(whole)
        flipped[info.start] ^= 1
        weights.write_bytes(flipped)
        assert (fingerprint_of(weights) != before) == is_encoder(name), name


def test_the_fingerprint_hashes_tensors_in_name_order(tmp_path):
    import xxhash

    big = torch.arange(3_000_000, dtype=torch.float32)
    save_file({"encoder.z": torch.zeros(1), "encoder.a": big}, tmp_path / "w.safetensors")
    hashes = [xxhash.xxh3_64_hexdigest(data) for data in (big.numpy().tobytes(), bytes(4))]
    rows = f'[["encoder.a","F32",[3000000],"{hashes[0]}"],["encoder.z","F32",[1],"{hashes[1]}"]]'
    assert fingerprint_of(tmp_path / "w.safetensors") == xxhash.xxh3_128_hexdigest(rows.encode())


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        ({"weight_map": {"t": "gone.safetensors"}}, "an incomplete model"),
        ({"weight_map": {"t": "../outside.safetensors"}}, "an incomplete model"),
        ({"weight_map": 3}, "not an index of weights"),
        ({}, "not an index of weights"),
    ],
)
def test_an_index_that_does_not_fit_is_rejected(tmp_path, index, kind):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"t": torch.ones(1)}, tmp_path / "outside.safetensors")
    (folder / "w.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match=f"is {kind}"):
        weights_in(folder, "w.safetensors")


@pytest.mark.parametrize("read", [read_header, read_json])
def test_unreadable_weights_are_rejected(tmp_path, read):
    with pytest.raises(EncoderError) as caught:
        read(tmp_path)
    assert caught.value.what == f"{tmp_path.name} cannot be read"
    assert caught.value.fix == f"ls -l {tmp_path}"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
        (b"[1]", "not a JSON object"),
    ],
)
def test_a_foreign_json_header_is_rejected(tmp_path, content, kind):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError) as caught:
        read_json(path)
    assert caught.value.what == f"config.json is {kind}"
    assert caught.value.fix


WANTED = Wanted(argument="model", takes="", files=("*.json", "vae/*"))


def test_hub_ids_are_recognized():
    assert is_hub_id("org/name.v1")
    assert not any(is_hub_id(word) for word in ("name", "./org/name", "~/x", "../a", "a/b/c", "a b/c"))
    assert expanded("~nobody-of-this-name/x").name == "x"


@pytest.mark.parametrize(("revision", "offline"), [("", False), ("abc", False), ("abc", True)])
def test_the_commit_of_an_earlier_build_is_asked_for(monkeypatch, revision, offline):
    calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **words: calls.append(words) or "folder")
    assert download("org/name", WANTED, revision=revision, offline=offline).name == "folder"
    files = ["*.json", "vae/*"]
    assert calls == [{"revision": revision or None, "allow_patterns": files, "local_files_only": offline}]


def test_a_repository_that_cannot_be_downloaded_is_rejected_with_the_fix(monkeypatch):
    def closed(name, **options):
        raise ConnectionError("403: ask for access\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", closed)
    with pytest.raises(ModelNotFoundError) as caught:
        download("org/name", WANTED)
    assert caught.value.what == "--model=org/name: not in the local hub cache, and it cannot be downloaded"
    assert caught.value.why == "403: ask for access"
    assert "`hf download org/name --local-dir FOLDER`" in caught.value.fix
    assert "`hf auth login`" in caught.value.fix
