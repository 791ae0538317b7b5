import warnings

import pytest
from make_images import make_images
from page_blocks import DOCS, Block, blocks, run_console, run_page

from latentcache import BuildSettings, build_cache

#: tests/trainers runs the trainer pages: they need more libraries and other caches.
HOWTOS = [page for page in sorted((DOCS / "howto").glob("*.md")) if not page.name.startswith("train-")]
RUNNABLE = {"console", "python"}


def run(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*demo encoder")
        warnings.filterwarnings("ignore", category=ResourceWarning)
        return run_page(page, folder)


def test_the_tutorial(tmp_path, monkeypatch, capsys):
    names = run(DOCS / "tutorial" / "first-cache.md", tmp_path, monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert all(line.startswith("(4, 4, ") for line in printed)
    assert set(names["batch"]) == {
        *("latents", "captions", "names", "keys"),
        *("original_size", "crop_top_left", "target_size"),
    }


def test_the_tutorial_of_tokens(tmp_path, monkeypatch, capsys):
    names = run(DOCS / "tutorial" / "first-token-cache.md", tmp_path, monkeypatch)
    assert names["shapes"] == {(4, 160)}
    assert capsys.readouterr().out.startswith("40 documents\n40 rows")


@pytest.mark.parametrize(
    "page", [page for page in HOWTOS if {b.language for b in blocks(page)} & RUNNABLE], ids=lambda page: page.stem
)
def test_a_howto(page, tmp_path, monkeypatch):
    """Create the twelve images and the cache that a page assumes."""
    make_images(tmp_path / "images", count=12, side=256)
    build_cache(BuildSettings(data=tmp_path / "images", fields={"latents": {"resolutions": (256,)}}))
    run(page, tmp_path, monkeypatch)


def test_page_blocks_check_output_and_status(tmp_path):
    run_console(Block("console", "$ false\n$ echo $?\n1\n", 1), tmp_path)
    with pytest.raises(AssertionError, match="one"):
        run_console(Block("console", "$ echo one\ntwo\n", 1), tmp_path)
