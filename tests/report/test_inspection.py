"""``inspect`` names each problem of the machine, and its fix works."""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from small_cache import SMALL, data, run

from latentcache.encoders import devices
from latentcache.encoders.devices import cuda_count
from latentcache.report import inspection

__all__ = ["data", "run"]
BIN = Path(sys.executable).parent


def checks(done):
    return {check["name"]: check for check in done.json["checks"]}


def run_in_shell(command, folder):
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, check=False)
    return done.returncode


def test_the_machine_without_data(run):
    done = run("inspect", "--machine", "--json")
    assert set(done.json) == {"schema", "command", "exit_code", "error", "data", "checks"}
    by_name = checks(done)
    assert list(by_name) == ["packages", "reader", "device", "limits", "disk"]
    assert by_name["packages"]["versions"]["torch"]
    assert by_name["reader"]["compiled_reader"] or by_name["reader"]["fix"]
    text = run("inspect", "--machine").out.splitlines()
    assert text[0].startswith("ok       packages  python ")
    assert text[-1] == "ready"


def test_data_or_machine(run, data):
    assert run("inspect", "--json").error["fix"].startswith("latentcache inspect DATA")
    assert run("inspect", data, "--machine", "--json").error["slug"] == "usage"


def test_a_network_file_system(run, data, tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "file_system", lambda path: "nfs4")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    done = run("inspect", data, *SMALL, "--json")
    check = checks(done)["disk"]
    assert (done.status, check["state"]) == (0, "warning")
    assert run_in_shell(check["fix"], tmp_path) == 0
    assert (tmp_path / "data.latentcache" / "CURRENT").exists()


def test_a_missing_package(run, monkeypatch, tmp_path):
    version = devices._version
    monkeypatch.setattr(devices, "_version", lambda name: "" if name == "numpy" else version(name))
    done = run("inspect", "--machine", "--json")
    check = checks(done)["packages"]
    assert (done.status, check["state"], check["fix"]) == (3, "problem", "pip install numpy")
    fix = f"{shlex.quote(sys.executable)} -m {check['fix']} --no-index --quiet"
    assert run_in_shell(fix, tmp_path) == 0, "it is installed"


@pytest.mark.skipif(cuda_count() > 0, reason="a device is there")
def test_a_missing_device(run, data):
    done = run("inspect", data, *SMALL, "--device", "cuda:7", "--json")
    assert (done.status, done.error["slug"]) == (3, "device")
    checked = checks(run("inspect", "--machine", "--device", "cuda:7", "--json"))["device"]
    assert (checked["slug"], checked["state"]) == ("device", "problem")


def test_a_device_is_not_called_by_its_model(monkeypatch):
    monkeypatch.setattr(inspection, "cuda_count", lambda: 1)
    monkeypatch.setattr(inspection, "devices_for", lambda device, needs_torch: ["cuda:0"])
    report = {"torch": "2.9", "cuda": "12.8", "usable": True, "name": "H100", "free_bytes": 1, "total_bytes": 2}
    check = inspection.device_check("auto", lambda question: report, lambda more: "")
    assert (check["name"], check["state"], check["text"].partition(",")[0]) == ("device", "ok", "H100")


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
    assert inspection.file_system(Path("/data/set"), tmp_path / "mounts") == kind
