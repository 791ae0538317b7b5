"""The page on many machines: its files are copied and run, as far as one machine can."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from make_images import make_images
from page_blocks import DOCS, blocks
from s3_server import S3Server

from latentcache.store.snapshot import open_snapshot

PAGE = DOCS / "howto/many-machines.md"


@pytest.fixture
def folder(tmp_path):
    """The files of the page, and images."""
    for block in blocks(PAGE):
        (tmp_path / block.file).write_text(block.text)
    make_images(tmp_path / "images", count=12, side=64)
    return tmp_path


def run(folder, *words, **variables):
    known = {"DATA": "images", "MODEL": "stub", "PARTS": "parts", "CACHE": "whole", "DISK": "disk", "RANKS": "2"}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    around = os.environ | known | variables | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, cwd=folder, env=around, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def numbers_of(text):
    first, last = re.search(r"--array=(\d+)-(\d+)", text).groups()
    return range(int(first), int(last) + 1)


def test_the_tasks_of_the_array_make_one_cache(folder):
    numbers = numbers_of((folder / "encode.sbatch").read_text())
    assert f'"$1/{len(numbers)}"' in (folder / "part.sh").read_text()
    for number in numbers:
        if number == numbers[-1]:
            status, text = run(folder, "sh", "merge.sh")
            assert (status, f"{number}/{len(numbers)}" in text) == (2, True), text
        assert run(folder, "sh", "encode.sbatch", SLURM_ARRAY_TASK_ID=str(number))[0] == 0
    assert run(folder, "sh", "encode.sbatch", SLURM_ARRAY_TASK_ID=str(numbers[0]))[0] == 0  # submitted again
    assert run(folder, "sh", "merge.sh")[0] == 0
    assert len(open_snapshot(folder / "whole").samples) == 12


@pytest.mark.slow
def test_the_nodes_of_torchrun_train_from_the_url_that_is_pushed(folder, tmp_path_factory):
    assert run(folder, "latentcache", "build", "images", "--model", "stub", "--out", "whole")[0] == 0
    server = S3Server(tmp_path_factory.mktemp("s3") / "data")
    try:
        server.make_bucket("bucket")
        status, text = run(folder, "sh", "train.sh", URL="s3://bucket/whole", **server.environment())
        assert status == 0, text
        assert sorted(re.findall(r"rank (\d): \d+ steps", text)) == ["0", "1"]
        assert len(list((folder / "disk").glob("shards/*/data.mdb"))) == len(open_snapshot(folder / "whole").shards)
    finally:
        server.close()


def test_the_array_is_submitted_before_its_merge(folder):
    (folder / "sbatch").write_text('#!/bin/sh\necho "sbatch $*" >> calls\necho 7\n')
    (folder / "sbatch").chmod(0o755)
    assert run(folder, "sh", "submit.sh")[0] == 0
    first, second = (folder / "calls").read_text().splitlines()
    assert first == "sbatch --parsable encode.sbatch"
    assert second == "sbatch --dependency=afterok:7 --wrap sh merge.sh"


def test_the_pods_of_the_indexed_job_run_each_part(folder):
    job = yaml.safe_load((folder / "encode.yaml").read_text())["spec"]
    (pod,) = job["template"]["spec"]["containers"]
    assert (job["completionMode"], job["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")
    assert f'"$1/{job["completions"]}"' in (folder / "part.sh").read_text()
    (folder / "images").rename(folder / "shared images")
    values = {one["name"]: one["value"] for one in pod["env"]}
    assert set(values) == {"DATA", "MODEL", "PARTS"}
    command = [word.replace("/shared", str(folder)) for word in pod["command"]]
    for index in (0, job["completions"] - 1):
        variables = {"DATA": "shared images", "JOB_COMPLETION_INDEX": str(index)}
        assert run(folder, *command, **variables)[0] == 0
        assert (folder / "parts" / f"part{index}" / "CURRENT").exists()
