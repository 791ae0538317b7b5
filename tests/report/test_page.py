import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
from damaged import damage_payload
from made_videos import write_video
from PIL import Image
from small_cache import SMALL, build, cache, data, draw, run, shared
from tiny_vae import tiny_vae

from latentcache.fields.registry import load
from latentcache.loader.cache import open_cache
from latentcache.report.figures import Stored, caption_facts, compare_facts, crop_facts, crops_of, set_facts
from latentcache.report.page import render, report_facts, snapshot_at
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot

__all__ = ["cache", "data", "run", "shared"]
HOSTILE = "a<b>&\"'<script>alert(1)</script>"


def smooth(path, colors, size=(96, 64)):
    """Draw a ramp between two colors; ``size`` is (width, height)."""
    ramp = np.linspace(*np.array(colors, dtype=np.float64), size[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.tile(ramp[None], (size[1], 1, 1)).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """A cache of 24 ramps, a black image, and an image twice."""
    folder = tmp_path_factory.mktemp("gallery")
    draw_colors = np.random.default_rng(1)
    for number in range(24):
        shape = [(96, 64), (64, 96), (200, 64)][number % 3]
        smooth(folder / "data" / f"p{number:02}.png", draw_colors.integers(0, 256, (2, 3)), shape)
        (folder / "data" / f"p{number:02}.txt").write_text(f"trigger, tag {number % 4}, only {number}")
    smooth(folder / "data" / "black.png", [[0, 0, 0], [0, 0, 0]])
    (folder / "data" / "black.txt").write_text("")
    smooth(folder / "data" / "twin.png", [[9, 200, 30], [220, 30, 90]])
    smooth(folder / "data" / "twin2.png", [[9, 200, 31], [220, 30, 90]])
    for name in ("twin", "twin2"):
        (folder / "data" / f"{name}.txt").write_text("trigger, equal")
    build(folder / "data", folder / "cache")
    return folder


def page_of(folder, **options):
    facts = report_facts(folder, **options)
    return facts, render(facts)


def test_a_page_shows_every_part_of_a_cache(gallery):
    facts, page = page_of(gallery / "cache")
    assert facts["missing"] == []
    assert facts["cache"]["counts"]["samples"] == 27
    assert facts["verify"]["counts"] == {"ok": 27}
    assert (facts["sheet"]["shown"], len(facts["sheet"]["cards"])) == (27, 27)
    assert facts["plan"]["steps_per_epoch"] == sum(bucket["batches"] for bucket in facts["plan"]["buckets"])
    assert page.count('class="card"') == 27
    assert "1</b><span>field<" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert len(page) < 5_000_000
    json.dumps(facts)


def test_the_worst_crops_come_first_and_n_limits_the_images(gallery):
    facts, page = page_of(gallery / "cache", images=5)
    losses = [card["loss"] for card in facts["sheet"]["cards"]]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 5
    assert losses[0] > 0.1
    assert "5 of 27 samples" in page
    assert facts["sheet"]["preview"], "it is fitted on some more images"
    none, page = page_of(gallery / "cache", images=0)
    assert none["sheet"] is None
    assert "data:image" not in page


def test_the_preview_is_fitted_and_measured_on_other_images(gallery):
    sheet = report_facts(gallery / "cache")["sheet"]
    assert sheet["preview"]["r2"] > 0.98  # the stub's latents are means of colors
    assert sheet["preview"]["fitted"] + sheet["preview"]["held"] == 27
    assert all(card["stored"] for card in sheet["cards"])


def test_a_latent_of_another_image_is_marked(gallery, tmp_path, monkeypatch):
    shutil.copytree(gallery, tmp_path / "moved")
    monkeypatch.setattr("latentcache.report.page.find_data", lambda *_: tmp_path / "moved" / "data")
    Image.new("RGB", (96, 64), "white").save(tmp_path / "moved" / "data" / "black.png")
    cards = report_facts(tmp_path / "moved" / "cache", verify=False)["sheet"]["cards"]
    marked = [card["name"] for card in cards if {"kind": "bad", "text": "latent unlike its image"} in card["marks"]]
    assert marked == [cards[0]["name"]] == ["black.png"]


def test_findings_of_a_changed_image_stand_at_its_card(data, tmp_path):
    build(data, tmp_path / "c")
    draw(data / "p2.png", (80, 80), seed=99)
    facts = report_facts(tmp_path / "c")
    (group,) = facts["verify"]["groups"]
    assert (group["category"], group["reason"], group["count"]) == ("stale", "source-changed", 1)
    assert group["fixes"][0].startswith("latentcache build ")
    first = facts["sheet"]["cards"][0]
    assert (first["name"], first["marks"][0]["text"]) == ("p2.png", "source-changed")
    assert report_facts(tmp_path / "c", verify=False)["verify"] is None


def test_a_file_that_an_export_links_is_not_marked(data, tmp_path):
    build(data, tmp_path / "c")
    (tmp_path / "link.png").hardlink_to(data / "p2.png")
    facts = report_facts(tmp_path / "c")
    assert facts["verify"]["counts"]["touched"] == 1
    marks = [mark["text"] for card in facts["sheet"]["cards"] for mark in card["marks"]]
    assert not any("stat-changed" in text for text in marks)


def test_crops_are_counted_for_every_image(gallery):
    snapshot = open_snapshot(gallery / "cache")
    crops = crops_of(snapshot)
    facts = crop_facts(crops, snapshot)
    assert facts["items"] == 27
    assert facts["most_loss"] == pytest.approx(1 - (crops.bucket.prod(1) / crops.resize.prod(1)).min())
    assert facts["over_quarter"] == int((crops.loss > 0.25).sum())
    box = crops.box(0)
    assert box["width"] * box["height"] / 10_000 == pytest.approx(1 - crops.loss[0], abs=1e-3)


def test_captions_as_a_trainer_sees_them(gallery):
    facts = caption_facts(open_snapshot(gallery / "cache"))
    assert (facts["captions"], facts["missing"], facts["missing_names"]) == (26, 1, ["black.png"])
    assert facts["tag_kind"] == "tags"
    assert facts["tags"][0] == {"text": "trigger", "count": 26, "share": 1.0}
    assert [(group["text"], group["count"]) for group in facts["equal"]] == [("trigger, equal", 2)]


def test_sets_have_their_share_with_repeats(tmp_path):
    for name, count in (("10_cats", 1), ("1_dogs", 5)):
        for number in range(count):
            draw(tmp_path / "data" / name / f"{number}.png", seed=number + count)
    build(tmp_path / "data", tmp_path / "c")
    sets = {part["name"]: part for part in set_facts(open_snapshot(tmp_path / "c"))}
    assert {name: (part["repeats"], round(part["share"], 3)) for name, part in sets.items()} == {
        "10_cats": (10, 0.667),
        "1_dogs": (1, 0.333),
    }


def test_regularization_sets_are_named(run, tmp_path):
    for name in ("cats", "reg"):
        for number in range(4):
            draw(tmp_path / "data" / name / f"{number}.png", seed=number + len(name))
    text = "".join(
        f'[[datasets.subsets]]\nimage_dir = "{tmp_path / "data" / name}"\nis_reg = {is_reg}\n'
        for name, is_reg in (("cats", "false"), ("reg", "true"))
    )
    (tmp_path / "data" / "dataset.toml").write_text(f"[[datasets]]\nresolution = 64\n{text}")
    done = run("build", tmp_path / "data", *SMALL, "--out", tmp_path / "c")
    assert done.status == 0, done.err
    sets = {part["name"]: part for part in set_facts(open_snapshot(tmp_path / "c"))}
    assert {name: part["regularization"] for name, part in sets.items()} == {"cats": False, "reg": True}


def test_the_audit_names_constant_and_similar_images(gallery):
    (audit,) = report_facts(gallery / "cache", images=0)["audit"]
    assert (audit["looked_at"], audit["entries"]) == (27, 27)
    assert audit["constant"] == ["black.png"]
    assert ["twin.png", "twin2.png"] in audit["copies"]
    assert len(audit["channels"]) == 4


def test_a_damaged_entry_is_shown_with_its_name(data, tmp_path):
    build(data, tmp_path / "c")
    name = damage_payload(tmp_path / "c")
    facts, page = page_of(tmp_path / "c")
    (audit,) = facts["audit"]
    assert (audit["damaged"], audit["looked_at"]) == ([name], 3)
    assert "latentcache verify --repair" in page


def test_samples_that_lack_a_field_are_counted(run, data, tmp_path):
    run("build", data, *SMALL, "--text-encoder", "stub", "--out", tmp_path / "c")
    facts, page = page_of(tmp_path / "c")
    assert (facts["plan"]["samples_used"], facts["plan"]["excluded"]) == (3, 1)
    assert "1 sample without one of the fields" in page
    assert [(group["reason"], group["count"]) for group in facts["rejected"]] == [("no-caption", 1)]


def test_a_cache_without_its_data_shows_the_rest(data, tmp_path):
    build(data, tmp_path / "c")
    shutil.rmtree(data)
    facts, page = page_of(tmp_path / "c")
    assert [one["part"] for one in facts["missing"]] == ["Findings", "Images"]
    assert facts["sheet"]["no_preview"] == "the data of this cache is not here"
    assert page.count("image not here") == 4
    assert facts["captions"]["captions"] == 3


@pytest.mark.parametrize("damage", ["CURRENT", "manifest.json", "columns.safetensors"])
def test_what_cannot_be_read_is_said(data, tmp_path, damage):
    build(data, tmp_path / "c")
    (file,) = (tmp_path / "c").rglob(damage)
    if damage == "CURRENT":  # as a first build that has not ended leaves it
        rows = open_snapshot(tmp_path / "c").fields["latents"]
        begun = {"recipe": dict(rows.recipe_json), "provenance": dict(rows.provenance)}
        file.unlink()
        CachePaths(tmp_path / "c").building.write_text(json.dumps({"samples": 4, "fields": {"latents": begun}}))
    else:
        file.write_bytes(b"x" * 100)
    facts, page = page_of(tmp_path / "c")
    assert facts["missing"]
    assert "cannot be shown" in page


def test_a_field_of_an_unknown_kind_is_shown_as_far_as_it_goes(data, tmp_path, monkeypatch):
    build(data, tmp_path / "c")
    monkeypatch.setattr("latentcache.store.snapshot.field_kind", lambda name: None)
    facts, page = page_of(tmp_path / "c")
    assert facts["cache"]["counts"]["samples"] == 4
    assert "this kind is not installed" in page


def test_names_and_captions_never_become_markup(tmp_path):
    for number in range(3):
        draw(tmp_path / "data" / f"{number}<img src=x onerror=alert(1)>.png", seed=number)
        (tmp_path / "data" / f"{number}<img src=x onerror=alert(1)>.txt").write_text(HOSTILE)
    (tmp_path / "data" / "<i>broken.png").write_bytes(b"no image")
    build(tmp_path / "data", tmp_path / "c")
    facts, page = page_of(tmp_path / "c")
    assert HOSTILE in facts["sheet"]["cards"][0]["captions"]
    assert page.count("<script>") == 1
    for markup in ("<img src=x", "<b>&", "<i>broken", "alert(1)</script>"):
        assert markup not in page


def test_a_name_that_is_not_utf8_is_shown(tmp_path):
    draw(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "a.png").rename(tmp_path / "data" / b"caf\xe9.png".decode("utf-8", "surrogateescape"))
    build(tmp_path / "data", tmp_path / "c")
    assert "caf\ufffd.png" in page_of(tmp_path / "c")[1].encode().decode()


def test_two_caches_are_compared(data, tmp_path):
    build(data, tmp_path / "a")
    draw(data / "p0.png", seed=50)
    (data / "p3.png").unlink()
    draw(data / "new.png", seed=51)
    build(data, tmp_path / "b", resolutions=(96,))
    facts = compare_facts(snapshot_at(tmp_path / "a"), snapshot_at(tmp_path / "b"))
    counts = {kind: (facts[kind]["count"], facts[kind]["names"]) for kind in ("added", "removed", "changed")}
    assert counts == {"added": (1, ["new.png"]), "removed": (1, ["p3.png"]), "changed": (1, ["p0.png"])}
    assert facts["shared_content"] == 2
    assert [one["setting"] for one in facts["recipes"]] == ["geometry.resolutions"]


def test_two_snapshots_are_compared(run, data, tmp_path):
    folder = tmp_path / "c"
    build(data, folder)
    draw(data / "p9.png", seed=9)
    build(data, folder)
    done = run("report", folder / "snapshots" / "000001", folder, "--out", tmp_path / "r.html")
    assert (done.status, done.err) == (0, "")
    page = (tmp_path / "r.html").read_text()
    assert "1 added" in page


def test_a_snapshot_alone_is_refused_with_the_reports_that_work(run, cache, tmp_path):
    error = run("report", cache / "snapshots" / "000001", "-o", tmp_path / "r.html", "--json").error
    assert error["what"].endswith("000001: a snapshot is shown beside another one only")
    for command in error["fix"].split("; or "):
        assert run(*command.split()[1:], "-o", tmp_path / "r.html").status == 0


@pytest.mark.usefixtures("threads")
def test_the_last_lines_say_that_the_scaling_is_unusual(run, data, tmp_path):
    build(data, tmp_path / "c", model=str(tiny_vae(tmp_path / "vae")))
    done = run("report", tmp_path / "c", "-o", tmp_path / "r.html")
    assert "after scaling, models expect about 1" in done.out
    assert "nothing unusual" not in done.out


def test_the_command_writes_one_file(run, cache, tmp_path):
    out = tmp_path / "page.html"
    done = run("report", cache, "-o", out, "--batch-size", "2", "--json")
    assert (done.status, done.json["out"], done.json["bytes"]) == (0, str(out), out.stat().st_size)
    assert done.json["facts"]["plan"]["batch_size"] == 2
    assert "data:image" not in done.out
    assert run("report", cache, "-o", tmp_path).err.startswith("error[usage]: --out=")


def test_no_cache_is_an_error(run, tmp_path):
    assert run("report", tmp_path / "none", "-o", tmp_path / "r.html", "--json").error["slug"] == "cache-not-found"
    assert not (tmp_path / "r.html").exists()


def test_notebooks_show_the_same_parts(shared):
    opened = open_cache(shared[1])
    assert "4</b><span>samples" in opened._repr_html_()
    plan = opened.plan(batch_size=2)._repr_html_()
    assert f"{opened.plan(batch_size=2).steps} steps per epoch at batch size 2" in plan
    assert opened.loader(batch_size=2)._repr_html_() == plan


def test_one_sample_by_name_or_number(run, shared):
    folder = shared[1]
    done = run("show", folder, "p2.png")
    assert done.status == 0
    assert "p2.png\n" in done.out
    assert "size      80 x 80 pixels" in done.out
    assert "caption   caption 2" in done.out
    assert "4 x 8 x 8" in done.out
    assert run("show", folder, 2).out == done.out
    sample = run("show", folder, "p2.png", "--json").json["sample"]
    assert sample["fields"]["latents"]["items"][0]["shape"] == [4, 8, 8]
    assert repr(open_cache(folder)["p2.png"]) == repr(open_cache(folder)[2]) == done.out.rstrip("\n")
    assert "p3.png" in repr(open_cache(folder)[-1])
    assert "<table" in open_cache(folder)[0]._repr_html_()
    with pytest.raises(IndexError, match="4 samples"):
        open_cache(folder)[4]
    wrong = run("show", folder, "p22.png", "--json")
    assert (wrong.status, wrong.error["slug"]) == (2, "usage")
    assert "p2.png" in wrong.error["fix"]


def test_a_damaged_sample_is_shown_as_such(run, data, tmp_path):
    build(data, tmp_path / "c")
    name = damage_payload(tmp_path / "c")
    done = run("show", tmp_path / "c", name)
    assert done.status == 1
    assert "DAMAGED" in done.out


def test_a_rejected_sample_says_why(run, data, tmp_path):
    (data / "bad.png").write_bytes(b"<html>")
    run("build", data, *SMALL, "--out", tmp_path / "c")
    error = run("show", tmp_path / "c", "bad.png", "--json").error
    assert "rejected" in error["why"]


@pytest.mark.usefixtures("threads")
def test_latents_are_decoded_by_the_model(data, tmp_path):
    model = tiny_vae(tmp_path / "vae")
    build(data, tmp_path / "c", model=str(model), latents="moments")
    cards = report_facts(tmp_path / "c", decode=2, verify=False)["sheet"]["cards"]
    assert [[one["label"] for one in card["stored"]] for card in cards] == [["decoded"]] * 2 + [[]] * 2
    snapshot = open_snapshot(tmp_path / "c")
    rows = snapshot.fields["latents"]
    decode = load(rows.kind.decoder)(rows.recipe, rows.provenance)
    latent = Stored(snapshot).latent(rows, 0)
    vae = diffusers.AutoencoderKL.from_pretrained(model).eval()
    with torch.inference_mode():
        expected = vae.decode(torch.from_numpy(latent[None, :, 0])).sample[0].permute(1, 2, 0)
    (frame,) = decode(latent)
    assert np.abs(frame - ((expected + 1) * 127.5).clamp(0, 255).numpy()).max() <= 0.51
    tiny_vae(model, seed=8)
    assert "not the model" in report_facts(tmp_path / "c", decode=2)["sheet"]["no_decode"]
    shutil.rmtree(model)
    assert report_facts(tmp_path / "c", decode=2)["sheet"]["no_decode"]


def test_masks_are_shown_beside_their_images(run, tmp_path):
    for number in range(9):
        draw(tmp_path / "data" / f"p{number}.png", seed=number)
    (tmp_path / "data" / "masks").mkdir()
    Image.new("L", (96, 64), 200).save(tmp_path / "data" / "masks" / "p0.png")
    run("build", tmp_path / "data", *SMALL, "--masks", "masks", "--out", tmp_path / "c")
    cards = report_facts(tmp_path / "c")["sheet"]["cards"]
    assert [one["label"] for one in cards[0]["stored"]] == ["latents", "mask"]


def test_videos_are_film_strips(run, tmp_path):
    pytest.importorskip("av")
    for number in range(8):
        write_video(tmp_path / "data" / f"v{number}.mp4", seed=number)
    run("build", tmp_path / "data", *SMALL, "--frames", 9, "--out", tmp_path / "c")
    facts, page = page_of(tmp_path / "c")
    assert facts["missing"] == []
    assert [card["frames"] for card in facts["sheet"]["cards"]] == [6] * 8
    assert facts["sheet"]["cards"][0]["stored"][0]["aspect"] == pytest.approx(3 * 1.5, rel=0.3)
    assert "film strip" in page
