import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_builds import CASES, arrays_of, built, described, png_with_text

from latentcache.cli.app import main
from latentcache.fields.registry import field_kind
from latentcache.pipeline.build import plan_build
from latentcache.pipeline.reencode import reencode
from latentcache.pipeline.settings import BuildSettings
from latentcache.store.snapshot import open_snapshot

BUILD = """
import sys
from pathlib import Path
from latentcache.sources import known
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings
known.RACY_NS = 0  # as ``trusted``
settings = {"model": sys.argv[2], "resolutions": (64,), "compute_dtype": "float32"}
report = build_cache(BuildSettings(data=Path(sys.argv[1]), device="cpu", fields={"latents": settings}))
print(report.cache, report.encoded, report.fields["latents"].run.restarts, "torch" in sys.modules)
"""


def test_a_vae_is_loaded_and_hashed_once_and_its_noise_is_recorded(tmp_path, trusted, threads, monkeypatch, capsys):
    pytest.importorskip("diffusers")
    from tiny_vae import tiny_vae

    case, model = CASES["latents"], tiny_vae(tmp_path / "model")
    data = case.data(tmp_path / "data", 3)
    words = [sys.executable, "-c", BUILD, str(data), str(model)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    cache, *output = done.stdout.split()
    assert output == ["3", "0", "False"], "the build process never imports torch"
    noise = open_snapshot(Path(cache)).fields["latents"].noise
    assert noise["devices"]
    assert noise["largest"] >= 0
    case.path(data, 1).write_bytes(png_with_text(case.path(data, 1).read_bytes(), "another comment"))
    with monkeypatch.context() as patched:
        patched.setattr("latentcache.encoders.files.fingerprint", None)  # the snapshot stores it
        copied = built(case, data, fields={}, out=Path(cache))
    assert (copied.encoded, copied.cached) == (0, 3)
    assert dict(open_snapshot(copied.cache).fields["latents"].noise) == dict(noise)
    snapshot = open_snapshot(copied.cache)
    kind, rows = field_kind("latents"), snapshot.fields["latents"]
    stored = [array for arrays in arrays_of(copied.cache, "latents").values() for array in arrays]
    again = reencode(snapshot, data, "latents", [0, 1, 2], described(snapshot, "latents"), device="cpu")
    for row, result, device in again:
        assert not kind.compare(stored[row], result.array, {**rows.noise, "device": device}, rows.recipe).differs
    monkeypatch.chdir(tmp_path)
    spelled = {"latents": {"model": "./model", "resolutions": (96,)}}
    changed = plan_build(BuildSettings(data=data, out=Path(cache), fields=spelled)).fields["latents"].changed
    assert [name for name, _, _ in changed] == ["geometry.resolutions"], "another spelling is no other encoder"
    model.rename(tmp_path / "moved")
    assert main(["verify", cache, "--reencode", "3", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["slug"] == "model-not-found"
    assert main(["verify", cache, "--reencode", "3", "--model", str(tmp_path / "moved"), "--device", "cpu"]) == 0
    assert main(["verify", cache]) == 0
