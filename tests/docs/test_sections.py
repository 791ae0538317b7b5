"""Sections of pages run in a fresh folder with twelve images and their cache."""

import warnings

import pytest
from make_images import make_images
from page_blocks import DOCS, ROOT, Block, blocks, run_console, run_page

from latentcache import BuildSettings, build_cache

RUNNABLE = {"console", "python"}
#: Sections that other tests run, with more libraries, several ranks or other caches: page -> sections.
ELSEWHERE = {
    "guides/ray.md": {"Build"},
    "trainers/diffusers-lora.md": {"", "Flux"},
    "trainers/language-models.md": {
        "TRL", "LLaMA-Factory", "Unsloth", "axolotl", "Megatron, nanotron and llm-foundry",
    },
    "trainers/pytorch.md": {"Several ranks", "accelerate", "Lightning", "Trainer of transformers"},
    "trainers/tokens.md": {
        "", "Long documents", "Train", "The last batch", "Token counts", "Mix", "The Trainer of transformers",
    },
}  # fmt: skip
SECTIONS = sorted(
    {
        (page.relative_to(DOCS).as_posix(), block.section)
        for page in DOCS.rglob("*.md")
        for block in blocks(page)
        if block.language in RUNNABLE and not {"reference", "format"} & set(page.parts)
    }
)
HERE = [(page, section) for page, section in SECTIONS if section not in ELSEWHERE.get(page, ())]


def run(page, folder, monkeypatch, section=None):
    monkeypatch.chdir(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*demo encoder")
        warnings.filterwarnings("ignore", category=ResourceWarning)
        return run_page(DOCS / page, folder, section)


@pytest.mark.parametrize(("page", "section"), HERE, ids=lambda word: word.replace(" ", "-"))
def test_a_section(page, section, tmp_path, monkeypatch):
    if page != "quickstart.md":
        make_images(tmp_path / "images", count=12, side=256)
        build_cache(BuildSettings(data=tmp_path / "images", fields={"latents": {"resolutions": (256,)}}))
    run(page, tmp_path, monkeypatch, section)


def test_every_section_that_runs_elsewhere_exists():
    assert {(page, section) for page in ELSEWHERE for section in ELSEWHERE[page]} <= set(SECTIONS)


def test_languages_of_blocks_say_whether_they_run():
    """Blocks of ``sh`` and ``py`` need a model, data or a GPU that the tests do not have."""
    known = RUNNABLE | {"sh", "py", "text", "toml", "yaml", "json", "csv"}
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    assert [(page.name, b.line) for page in pages for b in blocks(page) if b.language not in known] == []


def test_page_blocks_check_output_and_status(tmp_path):
    run_console(Block("console", "$ false\n$ echo $?\n1\n", 1), tmp_path)
    with pytest.raises(AssertionError, match="one"):
        run_console(Block("console", "$ echo one\ntwo\n", 1), tmp_path)
