import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from latentcache.cli import app as front_door
from latentcache.cli.app import COMMANDS, application

PROGRAM = [sys.executable, "-m", "latentcache"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented_in_the_help(run, name):
    """``--help`` names all options; ``--help-all`` explains them."""
    named = run(name, "--help").out
    text = run(name, "--help-all").out or named
    for parameter in typer.main.get_command(application()).commands[name].params:
        word = parameter.opts[-1] if parameter.opts[-1][0] == "-" else parameter.metavar or parameter.name.upper()
        assert word in named
        assert parameter.help.split()[0] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_is_short_and_ends_with_three_examples(run, name):
    text, _, examples = run(name, "--help").out.partition("\nExamples:\n")
    options = text.partition("\nExplained by")[0]
    assert len(re.findall("^  -", options, re.M)) <= 22  # 20, --help and --help-all
    words = [shlex.split(line) for line in examples.splitlines() if line]
    assert [line[:2] for line in words] == [["latentcache", "build" if "--part" in line else name] for line in words]
    assert len(words) == 3
    known = {option for parameter in commands()[name].params for option in parameter.opts}
    assert {word for line in words for word in line if word.startswith("-")} - known <= {"--model", "--part"}


def commands():
    return typer.main.get_command(application()).commands


def test_the_help_is_as_wide_as_the_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    assert 150 < max(map(len, run("build", "--help").out.splitlines())) <= 180


def test_the_help_of_build_begins_with_model_and_resolution(run):
    options = re.findall(r"^  (--\S+)", run("build", "--help").out, re.M)
    assert options[:2] == ["--model", "--resolution"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("build", "x", "--res", "256"), "(Possible options: --resolution)"),
        (("build", "x", "--tokeniser", "t"), "(Possible options: --tokenizer)"),
    ],
)
def test_a_mistyped_option_is_recognized(run, words, meant):
    assert meant in run(*words, "--json").error["what"]


def test_version(run):
    done = run("--version")
    assert (done.status, done.out) == (0, "latentcache 0.2.0\n")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["build"], "Missing argument"),
        (["build", "x", "--batch-size", "x"], "Invalid value for '--batch-size'"),
        (["build", "x", "--bach-size", "4"], "No such option: --bach-size"),
        (["build", "x", "y"], "unexpected extra argument"),
        (["bild", "x"], "No such command 'bild'"),
    ],
)
def test_usage_errors_are_json_as_well(run, words, what):
    done = run(*words, "--json")
    assert (done.status, done.json["command"]) == (2, words[0])
    assert done.error["slug"] == "usage"
    assert what in done.error["what"]
    assert done.error["fix"].endswith("--help")


@pytest.mark.parametrize("words", [["build", ""], ["verify", ""], ["build", "x", "--out", ""]])
def test_an_empty_path_is_a_usage_error(run, words):
    done = run(*words, "--json")
    assert (done.status, done.json["command"], done.error["slug"]) == (2, words[0], "usage")
    assert "empty" in done.error["what"]


def test_an_error_is_four_lines_on_stderr(run, tmp_path):
    done = run("verify", tmp_path / "none")
    assert (done.status, done.out) == (3, "")
    lines = done.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error[cache-not-found]", "  where", "  why", "  fix"]


def test_a_bug_exits_70_with_its_location(run, monkeypatch, shared):
    cache = shared[1]

    def broken(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("latentcache.verify.verify.check_cache", broken)
    done = run("verify", cache, "--json")
    assert done.status == 70
    assert done.json["error"]["slug"] == "bug"
    assert "RuntimeError" in done.json["error"]["what"]
    assert "test_app.py:" in done.json["error"]["where"]
    assert "LATENTCACHE_DEBUG=1" in done.json["error"]["fix"]
    assert len(done.err.splitlines()) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_outside_a_build_is_reported(run, monkeypatch, shared, number):
    cache = shared[1]

    def waiting(*_, **__):
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr("latentcache.verify.verify.check_cache", waiting)
    done = run("verify", cache, "--json")
    assert (done.status, done.error["slug"]) == (128 + number, "interrupted")
    assert done.error["what"] == f"interrupted by {number.name}"


def test_a_signal_after_the_json_output_is_ignored(run, monkeypatch, shared):
    cache = shared[1]
    emit = front_door.console.emit

    def late(*words, **options):
        emit(*words, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("latentcache.cli.console.emit", late)
    assert run("verify", cache, "--json").json["counts"]["ok"] == 4


@pytest.mark.parametrize("words", [["info", "--json"], ["verify"]])
def test_a_closed_stdout_is_no_error(shared, words):
    """``latentcache ... | true`` prints no traceback and exits with the same status."""
    cache = shared[1]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PROGRAM, words[0], cache, *words[1:]], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["info"]])
def test_an_output_that_cannot_be_written_is_reported(shared, words):
    cache = shared[1]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, words[0], cache, *words[1:]], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 3
    assert done.stderr.startswith("error[output]: the output cannot be written\n")
    assert "Traceback" not in done.stderr
