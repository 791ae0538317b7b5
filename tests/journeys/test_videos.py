import sys

import numpy as np
import pytest
import torch
from commands import look, noise
from made_videos import KINDS, plain_frames, write_sound, write_video

from latentcache import open_cache

SMALL = ("--model", "stub", "--resolution", "64", "--bucket-step", "32")


@pytest.fixture
def data(tmp_path):
    """A video of each format with its caption, a rotated one and an image."""
    folder = tmp_path / "data"
    for number, ending in enumerate(KINDS):
        write_video(folder / f"{number}{ending}", 9 + number, seed=number)
        (folder / f"{number}.txt").write_text(f"video {number}")
    write_video(folder / "turned.mp4", 9, height=48, width=160, rotation=90, audio=True)
    (folder / "image.png").write_bytes(noise(1, 64, 96))
    return folder


def build(data, *words):
    done = look("build", data, "--out", data.parent / "cache", *words, "--json")
    return done.json


def reasons(report):
    return {item["path"]: item["reason"] for item in report["items"] if item["category"] == "quarantined"}


def block_means(frames):
    """Compute the stub's output for frames (F, H, W, 3): (4, f, H/8, W/8)."""
    count, height, width, _ = frames[::4].shape
    blocks = frames[::4].reshape(count, height // 8, 8, width // 8, 8, 3).astype(np.float64).mean(axis=(2, 4))
    means = np.concatenate([blocks, blocks.mean(axis=3, keepdims=True)], axis=3) / 127.5 - 1
    return means.transpose(3, 0, 1, 2)


def test_batches_of_clips_have_an_axis_of_frames(data, tmp_path):
    words = ("--model", "stub", "--bucket", "64x96", "--bucket", "160x48", "--frames", "5", "--frames", "9")
    assert build(data, *words)["counts"]["encoded"] == 6
    cache = open_cache(tmp_path / "cache")
    batches = list(cache.loader(batch_size=4, remainder="partial"))
    shapes = {tuple(batch["latents"].shape) for batch in batches}
    assert shapes == {(4, 4, 3, 8, 12), (1, 4, 1, 8, 12), (1, 4, 3, 20, 6)}
    for batch in batches:
        assert batch["target_size"].tolist()[0] == [8 * side for side in batch["latents"].shape[-2:]]
        for name, latents, caption in zip(batch["names"], batch["latents"], batch["captions"], strict=True):
            if name[0].isdigit():
                frames = plain_frames(data / name)[0][:9]
                assert np.abs(latents.float().numpy() - block_means(frames)).max() < 2e-3
                assert caption == f"video {name[0]}"
    plan = look("plan", tmp_path / "cache", "--batch-size", "2", "--json").json["buckets"]
    buckets = [(bucket.get("frames"), bucket["height"], bucket["width"], bucket["samples"]) for bucket in plan]
    assert buckets == [(9, 160, 48, 1), (9, 64, 96, 4), (None, 64, 96, 1)]
    same = look("plan", data, *words, "--batch-size", "2", "--json").json["buckets"]
    assert same == plan


def test_flips_of_a_video(tmp_path):
    write_video(tmp_path / "data" / "a.mkv", 13)
    build(tmp_path / "data", "--model", "stub", "--bucket", "64x96", "--frames", "5", "--flip")
    loader = open_cache(tmp_path / "cache").loader(batch_size=1)
    frames, served = plain_frames(tmp_path / "data" / "a.mkv")[0][:5], []
    for epoch in range(8):
        loader.set_epoch(epoch)
        served += [batch["latents"][0].float().numpy() for batch in loader]
    expected = [block_means(frames), block_means(frames[:, :, ::-1])]
    for clip in expected:
        assert min(np.abs(clip - latents).max() for latents in served) < 2e-3


def test_bad_videos_are_rejected(data):
    whole = (data / "0.mp4").read_bytes()
    (data / "cut.mp4").write_bytes(whole[: len(whole) // 3])
    (data / "page.mp4").write_text("<html>not found</html>")
    (data / "empty.mkv").touch()
    (data / "zeros.mp4").write_bytes(bytes(5000))
    write_sound(data / "sound.mp4")
    write_video(data / "short.mp4", 4)
    write_video(data / "tiny.mp4", 9, height=8, width=8)
    write_video(data / "times.mp4", 9, times=[0, 10, 400, 410, 900, 1400, 1410, 1900, 2000])
    report = build(data, *SMALL, "--frames", "5")
    expected = {"cut.mp4": "decoder-error", "page.mp4": "html", "empty.mkv": "empty"}
    expected |= {
        "zeros.mp4": "zeros",
        "sound.mp4": "no-video",
        "short.mp4": "too-few-frames",
        "tiny.mp4": "too-small",
    }
    assert reasons(report) == expected
    assert (report["exit_code"], report["counts"]["encoded"]) == (1, 7)
    checked = look("verify", data.parent / "cache", "--full", "--reencode", "100", "--json").json
    counts = {name: number for name, number in checked["counts"].items() if number}
    assert (counts["ok"], counts["quarantined"], checked["exit_code"]) == (7, 7, 1)


def test_without_pyav_images_are_built(data, monkeypatch):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "av", None)
        report = build(data, *SMALL, "--frames", "5")
    assert report["counts"]["encoded"] == 1
    assert set(reasons(report).values()) == {"needs-pyav"}
    assert len(reasons(report)) == 5
    (hint,) = {item["hint"] for item in report["items"] if item["category"] == "quarantined"}
    assert "pip install 'latentcache[video]'" in hint
    report = build(data)
    assert (report["counts"]["encoded"], report["exit_code"], reasons(report)) == (5, 0, {})


def test_without_frames_videos_are_a_note(data, monkeypatch):
    (data / "cut.mp4").write_bytes((data / "0.mp4").read_bytes()[:100])
    for word in ("build", "build again"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "av", None)
            report = build(data, *SMALL)
        assert (report["exit_code"], reasons(report), report["counts"]["samples"]) == (0, {}, 1), word
        notes = [item for item in report["items"] if item["reason"] == "no-frame-count"]
        assert {item["category"] for item in notes} == {"note"}
        assert sum(item.get("count", 1) for item in notes) == 6
        assert all("--frames" in item["hint"] for item in notes)
    checked = look("verify", data.parent / "cache", "--full", "--json").json
    assert (checked["exit_code"], checked["counts"]["ok"]) == (0, 1)
    (data / "image.png").unlink()
    report = build(data)
    assert (report["exit_code"], "--frames" in report["error"]["fix"]) == (2, True)


def test_a_cache_of_images_gets_videos_when_frames_are_requested(data):
    report = build(data, *SMALL)
    assert (report["counts"]["encoded"], report["exit_code"], reasons(report)) == (1, 0, {})
    report = build(data, "--frames", "5")
    assert (report["counts"]["encoded"], reasons(report)) == (6, {})
    assert build(data, "--frames", "9")["counts"]["encoded"] == 5, "the image stays"
    assert build(data, "--frames", "5")["counts"] | {"no_caption": 0} == build(data)["counts"] | {"no_caption": 0}
    info = look("info", data.parent / "cache", "--json").json["fields"]["latents"]
    assert info["about"]["clips"] == "5 frames"
    write_video(data / "0.mp4", 9, seed=77)
    (data / "1.txt").write_text("another caption")
    checked = look("verify", data.parent / "cache", "--json").json["items"]
    assert {(item["path"], item["reason"]) for item in checked} == {
        ("0.mp4", "source-changed"),
        ("1.mov", "caption-changed"),
    }
    assert build(data)["counts"]["encoded"] == 1


def test_a_video_has_one_mask_for_all_frames_and_no_control_image(tmp_path):
    write_video(tmp_path / "data" / "a.mp4", 9)
    write_video(tmp_path / "data" / "c.mp4", 9, seed=1)
    for name in ("b.png", "b-masklabel.png", "b-condlabel.png", "a-masklabel.png", "a-condlabel.png"):
        (tmp_path / "data" / name).write_bytes(noise(2, 64, 96))
    words = ("--model", "stub", "--bucket", "64x96", "--frames", "5", "--fields")
    report = build(tmp_path / "data", *words, "latents,mask")
    assert (report["exit_code"], reasons(report)) == (0, {})
    assert [item["path"] for item in report["items"] if item["reason"] == "no-mask"] == ["c.mp4"]
    batches = open_cache(tmp_path / "cache").loader(batch_size=1, fields=["latents", "mask"])
    served = {batch["names"][0]: batch for batch in batches}
    assert {name: tuple(batch["latents"].shape[2:]) for name, batch in served.items()} == {
        "a.mp4": (2, 8, 12), "b.png": (1, 8, 12), "c.mp4": (2, 8, 12)
    }  # fmt: skip
    assert {tuple(batch["mask"].shape) for batch in served.values()} == {(1, 1, 1, 8, 12)}
    assert torch.equal(served["a.mp4"]["mask"], served["b.png"]["mask"]), "one mask image"
    assert bool((served["c.mp4"]["mask"] == 1).all())
    report = build(tmp_path / "data", *words, "latents,mask,control")
    assert reasons(report) == {"a.mp4": "no-frame-count", "c.mp4": "no-control"}
