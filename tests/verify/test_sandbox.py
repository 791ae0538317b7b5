import json
import os
import subprocess
import sys

import pytest

from latentcache.errors import CacheDamagedError, CacheNotFoundError
from latentcache.verify import sandbox
from latentcache.verify.selection import Depth, parse_selection
from latentcache.verify.verify import verify_cache

FULL = Depth(full=True, untrusted=True)
#: What a field is makes no difference here: the child runs the check that is tested for every kind.
pytestmark = pytest.mark.parametrize("case", ["lines"], indirect=True)


def check(case, depth=FULL, **more):
    return verify_cache(case.cache, depth=depth, **more)


def test_the_report_is_that_of_a_check_without_the_data(case):
    case.damage(2)
    case.write(3, "other")
    report = check(case)
    assert report.counts["corrupt"] == case.sharing(2)
    assert report.counts["stale"] == 0
    here = verify_cache(case.cache, depth=Depth(full=True))
    assert next(one.key for one in here.findings if one.category == "corrupt") == report.findings[0].key
    assert "verify" in report.findings[0].fix
    assert json.dumps(report.as_json())


def test_data_that_is_named_is_compared(case):
    case.write(3, "other")
    assert check(case, data=case.data).counts["stale"] == 1
    assert check(case, Depth(selection=parse_selection("3"), untrusted=True)).checked["samples"] == 3


def test_a_link_a_pipe_or_a_huge_file_ends_it_before_anything_is_parsed(case, monkeypatch):
    monkeypatch.setattr(sandbox, "COMMAND", (sys.executable, "-c", "raise SystemExit('it was parsed')"))
    made = case.cache / "shards" / "x"
    for make in (lambda: made.symlink_to("/etc/passwd"), lambda: os.mkfifo(made)):
        make()
        with pytest.raises(CacheDamagedError) as caught:
            check(case)
        assert str(made) in str(caught.value)
        made.unlink()
    with (case.cache / "BUILDING").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CacheDamagedError, match="no cache should"):
        check(case)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("raise SystemExit('out of luck')", "out of luck"),
        ("print('{}')", "status 0"),
        ("print('x' * 1000)", "status 0"),
    ],
)
def test_a_child_that_ends_early_is_an_error_and_never_a_fine_cache(case, monkeypatch, code, why):
    monkeypatch.setattr(sandbox, "COMMAND", (sys.executable, "-c", code))
    with pytest.raises(CacheDamagedError) as caught:
        check(case)
    assert why in caught.value.why
    assert caught.value.exit_code == 3


def test_a_crafted_snapshot_is_an_error_without_a_traceback(case):
    manifest = case.paths.snapshot(1) / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text('{"format": {"name": "latentcache", "version": 1}}')
    with pytest.raises(CacheDamagedError):
        check(case)
    (case.cache / "CURRENT").unlink()
    (case.cache / "BUILDING").write_text("{}")
    with pytest.raises(CacheNotFoundError):
        check(case)


def test_talk_on_stderr_does_not_block_it(case, monkeypatch):
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    assert check(case).counts["ok"] == 8


def test_a_module_in_the_working_directory_is_not_imported(case, tmp_path, monkeypatch):
    for name in ("json", "numpy", "latentcache"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert check(case).counts["ok"] == 8
    assert not (tmp_path / "owned").exists()


def test_its_work_is_in_no_argument(case, monkeypatch):
    started, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: started.append(args[0]) or run(*args, **more))
    check(case)
    assert started == [sandbox.COMMAND]
    assert not any("cache" in word and "/" in word for word in sandbox.COMMAND[1:])


def test_it_has_limits(case):
    limits = sandbox.limits_for(case.paths)
    assert limits["memory_bytes"] < 3 << 30
    code = (
        "from latentcache.verify import sandbox; import resource; "
        f"sandbox._limit({limits!r}); print(*(resource.getrlimit(k)[0] for k in "
        "(resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_CPU)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(limits["memory_bytes"]), "0", "0", str(limits["cpu_s"])]
