"""``doctor`` names each problem, and each printed ``fix:`` command works."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from small_cache import SMALL, draw

from latentcache.cli import doctor
from latentcache.encoders import versions
from latentcache.store.snapshot import open_snapshot

BIN = Path(sys.executable).parent


def checks(done):
    return {check["name"]: check for check in done.json["checks"]}


def run_build(check, folder):
    """Run the fix of a check in a shell in another folder; return the exit status."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", check["fix"]], cwd=folder, env=environment, capture_output=True, check=False)
    return done.returncode


def test_a_working_machine(run, data):
    done = run("doctor", data, *SMALL, "--json")
    assert done.status == 0
    value = done.json
    assert set(value) == {"schema", "command", "exit_code", "error", "data", "checks"}
    found = checks(done)
    assert list(found) == ["packages", "device", "limits", "disk", "latents", "data", "space", "time"]
    assert all({"name", "state", "text"} <= set(check) for check in value["checks"])
    assert found["packages"]["versions"]["torch"]
    assert isinstance(found["packages"]["compiled_reader"], bool)
    assert (found["data"]["samples"], found["data"]["entries_to_make"]) == (4, 4)
    assert (found["time"]["field"], found["time"]["probed"]) == ("latents", 4)
    assert found["time"]["seconds"] >= 0
    assert not data.with_name("data.latentcache").exists()
    assert list(Path("/tmp").glob("latentcache-doctor-*")) == []


def test_text_fits_one_screen(run, data):
    done = run("doctor", data, *SMALL)
    assert done.status == 0
    lines = done.out.splitlines()
    assert len(lines) <= 24
    assert lines[0].startswith("ok       packages  python ")
    assert "(estimate from " in done.out
    assert lines[-1] == "ready"


def test_network_and_local_file_systems(run, data, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "file_system", lambda path: "nfs4")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    done = run("doctor", data, *SMALL, "--json")
    check = checks(done)["disk"]
    assert (done.status, check["state"]) == (0, "warning")
    assert run_build(check, tmp_path) == 0
    assert (tmp_path / "data.latentcache" / "CURRENT").exists()


def test_a_missing_package(run, monkeypatch, tmp_path):
    version = versions._version
    monkeypatch.setattr(versions, "_version", lambda name: "" if name == "numpy" else version(name))
    done = run("doctor", "--json")
    check = checks(done)["packages"]
    assert (done.status, check["state"], check["fix"]) == (3, "problem", "pip install numpy")
    fix = {"fix": f"{shlex.quote(sys.executable)} -m {check['fix']} --no-index --quiet"}
    assert run_build(fix, tmp_path) == 0, "it is installed"


def test_named_encoders_are_described_without_data(run):
    found = checks(run("doctor", "--model", "demo", "--tokenizer", "stub", "--chat-template", "t", "--json"))
    assert (found["latents"]["state"], found["latents"]["text"][:5]) == ("warning", "demo ")
    assert "--chat-template: the stub tokenizer has its own turns" in found["input_ids"]["text"]
    found = checks(run("doctor", "--resolution", "256", "--tokenizer", "stub", "--json"))
    assert found["input_ids"]["text"].startswith("stub ("), "its name once"
    assert "latents" not in found, "no encoder was named"


def broken(folder):
    """(arguments of ``doctor``, failing checks) for data that a build would reject."""
    names = ("some images", "it's kohya", "listed", "bare", "page")
    for name in names[:3]:
        for number in range(2):
            draw(folder / name / "1_x" / f"{number}.png", (64, 64), seed=number)
        (folder / name / "1_x" / "bad.png").write_bytes(b"\x89PNG")
    (folder / "listed/1_x/metadata.csv").write_text("file_name,text\n0.png,a\n1.png,b\nbad.png,c\nnone.png,d\n")
    (folder / "bare").mkdir()
    (folder / "page.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (folder / "gone.toml").write_text('[[sets]]\npath = "nowhere"\n')
    more = ("--layout", "folder", "--caption-ext", ".tags", "--default-caption", "a 'b'", "--controls", "none")
    yield (folder / names[0], *SMALL), {"data"}
    yield (folder / names[1], *SMALL, *more, "--flip", "--fields", "latents"), {"data"}
    yield (folder / names[2] / "1_x", *SMALL, "--layout", "imagefolder"), {"data"}
    yield (folder / "bare",), {"data"}
    yield (folder / "not there",), {"data", "disk"}
    yield (folder / "gone.toml",), {"data"}
    yield (folder / "page.jsonl", "--tokenizer", "stub"), {"data"}
    yield (folder / names[0], *SMALL, "--layout", "kohya", "--masks", "nowhere"), {"data"}
    yield (folder / names[0], "--model", folder / "nowhere"), {"latents", "data"}
    yield (folder / names[0], *SMALL, "--device", "cuda:7"), {"device", "data"}
    yield ("--device", "cuda:7"), {"device"}


def test_every_fix_is_a_command_with_the_arguments_that_were_given(run, tmp_path, monkeypatch):
    from latentcache.encoders.versions import cuda_count

    if cuda_count():
        pytest.skip("a device is there")
    monkeypatch.chdir(tmp_path)
    carried = 0
    for number, (words, wanted) in enumerate(broken(tmp_path)):
        out = ("--out", tmp_path / f"cache {number}")
        done = run("doctor", *words, *out, "--json")
        problems = {name: check for name, check in checks(done).items() if check["state"] == "problem"}
        assert set(problems) == wanted, (words, problems)
        assert done.status == (3 if "device" in wanted else 1)
        assert all(check.get("fix") or check.get("hint") for check in problems.values()), problems
        for check in checks(done).values():
            if "fix" not in check:
                continue
            assert not re.search(r"\b(CACHE|DATA|MODEL|FILE|NAME|PATH|FOLDER|N)\b", check["fix"]), check
            first, *command = shlex.split(check["fix"])
            assert first == "latentcache", check
            assert "".join(map(str, out)) in "".join(command)
            allowed = ("--allow-failed", "2") if check["name"] == "device" else ()
            assert run(*command, *allowed).status == 0, check
            if check["name"] == "data" and "--layout" in words:
                recorded = open_snapshot(out[1]).source["options"]
                assert recorded["layout"] == words[words.index("--layout") + 1]
            carried += 1
    assert carried == 5


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [
        ("/dev/sda / ext4 rw 0 0\nhost:/x /data nfs4 rw 0 0\n", "nfs4"),
        ("/dev/sda / ext4 rw 0 0\nhost:/x /dat nfs4 rw 0 0\n", "ext4"),
        ("/dev/sda / ext4 rw 0 0\nx /data/set\\040a fuse.sshfs rw 0 0\n", "ext4"),
        ("", ""),
    ],
)
def test_the_file_system_of_a_path(mounts, kind, tmp_path):
    (tmp_path / "mounts").write_text(mounts)
    assert doctor.file_system(Path("/data/set"), tmp_path / "mounts") == kind
