import pytest
from test_export import tokens

from latentcache.cli.export_forms import TAKEN

__all__ = ["tokens"]
SAID = {"length": 64, "view": "padded", "for": "plain", "overflow": "drop", "padding-side": "right"}


@pytest.mark.parametrize("form", ["megatron", "datatrove", "mds"])
@pytest.mark.parametrize("flag", SAID)
def test_a_flag_that_a_format_does_not_take(run, tokens, tmp_path, form, flag):
    length = ("--length", 64) if form == "mds" and flag != "length" else ()
    view = ("--view", "padded") if flag == "overflow" and form == "mds" else ()
    done = run("export", tokens, tmp_path / "out", "--to", form, *length, *view, f"--{flag}", SAID[flag], "--json")
    if flag in TAKEN[form]:
        assert done.status == 0
        return
    assert (done.status, done.error["what"], done.error["fix"]) == (
        2,
        f"--{flag} with --to {form}",
        f"leave --{flag} out",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["hf-disk", "mds"])
def test_rows_have_a_length(run, tokens, tmp_path, form):
    done = run("export", tokens, tmp_path / "out", "--to", form, "--json")
    assert (done.status, done.error["fix"]) == (2, "--length N")


def test_packed_shards_are_refused_before_anything_is_planned(run, tokens, tmp_path):
    plans = tokens / "plans"
    before = sorted(plans.iterdir()) if plans.exists() else []
    done = run("export", tokens, tmp_path / "out", "--to", "mds", "--length", 64, "--view", "packed", "--json")
    assert (done.status, done.error["fix"]) == (2, "--view blocks|padded")
    assert (sorted(plans.iterdir()) if plans.exists() else []) == before


def test_a_part_without_documents(run, tokens, tmp_path):
    done = run("export", tokens, tmp_path / "out", "--to", "megatron", "--validation", 0.000001, "--json")
    assert (done.status, done.error["slug"]) == (1, "plan")
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_is_named(run, tokens, tmp_path):
    assert run("export", tokens, tmp_path / "out", "--to", "datatrove").status == 0
    assert (tmp_path / "out/train/00000_tokens.ds.metadata").read_text().startswith("stub|2\n")
