"""Whole samples as safetensors, webdataset and mds: every tensor is that of a loader, and the README reads them."""

import json
import re
import tarfile
from dataclasses import replace

import pytest
import small_tokens
import torch
from captioned_images import draw_captioned, draw_sets, files_below
from read_formats import read_mds_samples
from safetensors.torch import load
from small_cache import build, draw

from latentcache import open_cache
from latentcache.export import shards

FORMATS = ("safetensors", "webdataset", "mds")


def code_of(folder):
    """Python of the README, at most ten lines."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.S)
    assert len(code.splitlines()) <= 10
    return code


def read_safetensors(folder, monkeypatch):
    code = code_of(folder).rstrip() + "\n        samples.append((sample, about))\n"
    samples = []
    monkeypatch.chdir(folder)
    exec(code, {"samples": samples})
    return samples


def read_webdataset(folder, monkeypatch):
    samples = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, ending = member.name.partition(".")
                samples.setdefault(key, {})[ending] = archive.extractfile(member).read()
    assert list(samples) == [f"{number:08d}" for number in range(len(samples))]
    return [(load(sample["safetensors"]), json.loads(sample["json"])) for sample in samples.values()]


def read_mds(folder, monkeypatch):
    samples = read_mds_samples(folder)
    abouts = [sample.pop("about") for sample in samples]
    tensors = [{name: torch.tensor(values) for name, values in sample.items()} for sample in samples]
    return list(zip(tensors, abouts, strict=True))


READERS = dict(zip(FORMATS, (read_safetensors, read_webdataset, read_mds), strict=True))


def change(monkeypatch, form, **changes):
    """Change the container of a format."""
    monkeypatch.setitem(shards.CONTAINERS, form, replace(shards.CONTAINERS[form], **changes))


RECIPE = (
    "--model", "stub", "--resolution", 128, "--bucket-step", 32, "--flip", "--latents", "moments",
    "--storage-dtype", "bfloat16", "--text-encoder", "stub", "--fields", "latents,mask,prompt_embeds",
)  # fmt: skip


@pytest.fixture
def images(run, tmp_path):
    """Moments in bfloat16 with flips, masks, captions and their embeddings, a column of a table; one has no mask."""
    folder, rows = draw_captioned(tmp_path / "cats"), []
    for number in range(4):
        (folder / f"p{number}.txt").unlink()
        rows.append({"file_name": f"p{number}.png", "text": "caf\u00e9 " * (number + 1), "label": number})
        draw(folder / f"p{number}-masklabel.png", (96, 64), seed=number)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("build", folder, "--out", tmp_path / "cache", *RECIPE).status == 0
    return folder, tmp_path / "cache", tmp_path / "out"


@pytest.mark.parametrize("form", FORMATS)
def test_every_value_is_that_of_a_loader(run, images, form, monkeypatch):
    change(monkeypatch, form, shard_bytes=1 if form == "safetensors" else 14_000)
    _, cache, out = images
    done = run("export", cache, out, "--to", form, "--json")
    assert (done.status, done.json["samples"], done.json["unused"]) == (0, 4, 8)
    assert len([name for name in files_below(out) if name.endswith((".tar", ".mds"))]) == (
        0 if form == "safetensors" else 2
    )
    samples = READERS[form](out, monkeypatch)
    loader = open_cache(cache).read(augment=False).loader(batch_size=1, seed=None, prefetch=0)
    assert len(samples) == 4
    for number, (tensors, about) in enumerate(samples):
        batch = loader.batch([number])
        held = batch["prompt_embeds_mask"][0]
        expected = {name: batch[name][0] for name in ("latents", "mask")}
        expected["prompt_embeds"] = batch["prompt_embeds"][0][held]
        assert tensors.keys() == expected.keys()
        for name, values in tensors.items():
            assert torch.equal(values.to(expected[name].dtype), expected[name])
            assert values.dtype == (torch.float32 if form == "mds" else expected[name].dtype)
        assert about == {
            "name": batch["names"][0],
            "caption": batch["captions"][0],
            **{name: batch[name][0].tolist() for name in ("original_size", "target_size", "crop_top_left")},
            "table": {"label": number},
            "keys": {name: bytes(key[0].tolist()).hex() for name, key in batch["keys"].items()},
        }
    assert run("verify", out).status == 0
    assert ("float32 and uint8 here" in (out / "README.md").read_text()) == (form == "mds")


@pytest.mark.parametrize("form", FORMATS)
def test_a_later_export_writes_what_changed(run, images, form):
    data, cache, out = images
    words = ("export", cache, out, "--to", form, "--json")
    first = run(*words).json
    before = {name: (out / name).read_bytes() for name in files_below(out)}
    assert run(*words).json["written"] == 0
    again = run("export", cache, out.with_name("again"), *words[3:])
    assert again.status == 0
    same = {name: (out.with_name("again") / name).read_bytes() for name in before if "latentcache" not in name}
    assert same.items() <= before.items()
    draw(data / "p4.png", (300, 300), seed=9)
    (data / "p4-masklabel.png").write_bytes((data / "p3-masklabel.png").read_bytes())
    with (data / "metadata.jsonl").open("a") as table:
        table.write(json.dumps({"file_name": "p4.png", "text": "new", "label": 4}) + "\n")
    assert run("build", data, "--out", cache, *RECIPE).status == 0
    later = run(*words).json
    assert (later["samples"], later["written"]) == (5, 2 if form != "mds" else 3)
    name = next(name for name in files_below(out) if name.endswith((".safetensors", ".tar", ".mds")))
    (out / name).write_bytes(b"")
    assert run("verify", out, "--json").json["findings"][0]["path"] == name
    assert run(*words).json["written"] == (1 if form != "mds" else 2)
    assert run("verify", out).status == 0
    assert run("export", "--undo", out).status == 0
    assert not out.exists()
    assert first["files"] > 1


@pytest.mark.parametrize("form", FORMATS)
def test_an_interrupted_export_goes_on(run, images, form, monkeypatch):
    _, cache, out = images
    change(monkeypatch, form, shard_bytes=1)
    words, write = ("export", cache, out, "--to", form, "--json"), shards.CONTAINERS[form].write

    def failing(path, samples, columns):
        samples = list(samples)
        if samples[0].number == 2:
            raise KeyboardInterrupt
        write(path, samples, columns)

    change(monkeypatch, form, write=failing)
    assert run(*words).status == 130
    assert not out.exists()
    change(monkeypatch, form, write=write)
    done = run(*words).json
    assert (done["samples"], done["kept"]) == (4, 2)
    assert run("verify", out).status == 0


def test_new_mds_shards_have_no_old_index(run, images, monkeypatch):
    data, cache, out = images
    words = ("export", cache, out, "--to", "mds", "--json")
    assert run(*words).status == 0
    (data / "p0.png").unlink()
    assert run("build", data, "--out", cache, *RECIPE, "--allow-failed", 1).status == 0
    with monkeypatch.context() as patch:
        patch.setattr(shards.Columns, "index", lambda self, shards: {}[None])
        assert run(*words).status != 0
    assert not (out / "index.json").exists()
    assert run(*words).json["samples"] == 3
    assert len(read_mds(out, monkeypatch)) == 3


@pytest.mark.parametrize("form", FORMATS)
def test_whole_documents(run, tmp_path, form, monkeypatch):
    talks = [
        {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": "yes " * n}]}
        for n in range(1, 6)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    small_tokens.build(tmp_path / "data.jsonl", tmp_path / "cache")
    assert run("export", tmp_path / "cache", tmp_path / "out", "--to", form).status == 0
    documents = open_cache(tmp_path / "cache").documents()
    rows = open_cache(tmp_path / "cache").rows(pad=128)
    samples = READERS[form](tmp_path / "out", monkeypatch)
    assert [about["name"] for _, about in samples] == [f"data.jsonl:{n}" for n in range(1, 6)]
    for number, (tensors, _) in enumerate(samples):
        ids, mask = tensors["input_ids"], tensors["loss_mask"]
        assert ids.tolist() == documents.read(number).tolist()
        learned = rows.batch([number])["labels"][0][: len(ids)] != -100
        assert torch.equal(mask.bool(), torch.as_tensor(learned))
        assert 0 < mask.sum() < len(mask)


def test_what_a_data_set_says_of_its_images_is_there(run, tmp_path, monkeypatch):
    build(draw_sets(tmp_path / "data"), tmp_path / "cache")
    assert run("export", tmp_path / "cache", tmp_path / "out", "--to", "safetensors").status == 0
    abouts = [about for _, about in read_safetensors(tmp_path / "out", monkeypatch)]
    told = {about["name"].partition("/")[0]: (about["repeats"], about["class_words"]) for about in abouts}
    assert told == {"2_cats": (2, "cats"), "1_dogs": (1, "dogs")}
    assert len(abouts) == 10


def test_bytes_of_a_name_that_is_not_utf8_survive(run, tmp_path, monkeypatch):
    draw(tmp_path / "cats/a.png")
    (tmp_path / "cats/a.png").rename(tmp_path / "cats" / b"\xff.png".decode("utf-8", "surrogateescape"))
    build(tmp_path / "cats", tmp_path / "cache")
    for form in FORMATS:
        out = tmp_path / form
        assert run("export", tmp_path / "cache", out, "--to", form).status == 0
        ((_, about),) = READERS[form](out, monkeypatch)
        assert about["name"].encode("utf-8", "surrogateescape") == b"\xff.png"


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("--to", "mds", "--validation", "0.1"), "--validation", "rows with --pad N or --chunk N"),
        (("--to", "safetensors", "--copy"), "--copy: not available", "leave --copy out"),
    ],
)
def test_wrong_settings_are_rejected_before_writing(run, images, words, what, fix):
    _, cache, out = images
    error = run("export", cache, out, *words, "--json").error
    assert what in error["what"]
    assert error["fix"].endswith(fix)
    assert not out.exists()


def test_a_demo_cache_needs_force(run, tmp_path):
    draw(tmp_path / "cats/a.png")
    build(tmp_path / "cats", tmp_path / "cache", model="demo")
    words = ("export", tmp_path / "cache", tmp_path / "out", "--to", "webdataset")
    error = run(*words, "--json").error
    assert "a demo encoder made it" in error["what"]
    assert error["fix"].endswith("--model MODEL; or --force to try the files")
    assert run(*words, "--force").status == 0
