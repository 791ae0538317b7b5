import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from described import described_tokenizer
from described_models import as_cached
from made_templates import CHATML, untagged
from made_tokenizers import byte_level, save
from transformers import AutoTokenizer

from latentcache.encoders.text.describe import describe
from latentcache.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from latentcache.fields.input_ids import InputIdsSettings
from latentcache.fields.protocol import DescribeContext
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, SampleTable
from latentcache.fields.tokenizer import tokenizer_fingerprint

ROLES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@pytest.fixture
def folder(tmp_path):
    return save(byte_level(), tmp_path / "bpe", template=untagged(CHATML), roles=ROLES)


def test_the_recipe_of_a_tokenizer_folder(folder):
    description = described_tokenizer(folder)
    recipe = description.recipe
    assert recipe.tokenizer == tokenizer_fingerprint(description.provenance["parts"])
    assert (recipe.num_ids, recipe.dtype) == (600, "uint16")
    assert (recipe.bos_id, recipe.eos_id, recipe.pad_id) == (0, 2, 0)
    assert (recipe.loss, recipe.chat_template, recipe.add_bos, recipe.add_eos) == ("all", "", False, True)
    assert described_tokenizer(folder, chat=True).recipe.loss == "assistant"


def test_texts_start_with_the_bos_of_the_tokenizer(tmp_path):
    folder = save(byte_level(), tmp_path, roles=ROLES, bos_first="<|endoftext|>")
    assert described_tokenizer(folder).recipe.add_bos
    assert not described_tokenizer(folder, add_bos=False).recipe.add_bos
    folder = save(byte_level(), tmp_path, roles=ROLES, bos_first="<|endoftext|>", add_bos_token=False)
    assert not described_tokenizer(folder).recipe.add_bos


def test_a_template_is_part_of_the_recipe_of_conversations_only(folder, tmp_path):
    default = described_tokenizer(folder, chat=True)
    (tmp_path / "other").write_text(untagged(CHATML) + " ")
    changed = described_tokenizer(folder, chat=True, chat_template=tmp_path / "other")
    assert default.recipe.chat_template != changed.recipe.chat_template
    assert described_tokenizer(folder, chat_template=tmp_path / "other").recipe.chat_template == ""


def test_the_date_of_a_template_is_in_the_recipe(folder, tmp_path):
    (tmp_path / "t").write_text("{{ strftime_now('%Y') }}")
    default = described_tokenizer(folder, chat=True, chat_template=tmp_path / "t")
    assert default.recipe.template_options == (("strftime_now", '"2024-07-26"'),)
    dated = described_tokenizer(
        folder, chat=True, chat_template=tmp_path / "t", template_options=(("strftime_now", '"2025-01-02"'),)
    )
    assert "2025" in dated.producer["chat_template"]
    with pytest.raises(UsageError):
        described_tokenizer(
            folder, chat=True, chat_template=tmp_path / "t", template_options=(("strftime_now", '"today"'),)
        )


def test_conversations_without_a_template_are_an_error_with_the_option(tmp_path):
    folder = save(byte_level(), tmp_path, roles=ROLES)
    with pytest.raises(UsageError) as caught:
        described_tokenizer(folder, chat=True)
    assert "--chat-template" in caught.value.fix


def test_a_missing_end_token_is_an_error(tmp_path):
    folder = save(byte_level(), tmp_path)
    with pytest.raises(UsageError, match="eos_token"):
        described({"tokenizer": str(folder)})
    assert described({"tokenizer": str(folder)}, samples=None).recipe.eos_id is None, "no texts are known"
    assert described_tokenizer(folder, add_eos=False).recipe.eos_id is None
    save(byte_level(), tmp_path, template=untagged(CHATML))
    assert described({"tokenizer": str(folder)}, chat=True).recipe.add_eos, "conversations need none"
    mixed = replace(samples(chat=True), columns={"form": np.array([1, 0], np.uint8)})
    with pytest.raises(UsageError, match="eos_token"):
        described({"tokenizer": str(folder)}, samples=mixed)


def test_a_rejected_tokenizer_file_gives_the_reason(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {"type": "Unheard"}
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedModelError) as caught:
        described_tokenizer(folder)
    assert caught.value.why


def test_the_stub_rejects_settings_that_it_would_ignore(tmp_path):
    (tmp_path / "t").write_text("x")
    with pytest.raises(UsageError, match="chat_template"):
        described_tokenizer("stub", chat=True, chat_template=tmp_path / "t")
    with pytest.raises(UsageError, match="template_options"):
        described_tokenizer("stub", chat=True, template_options=(("a", "1"),))
    with pytest.raises(UsageError, match="unknown option of the stub"):
        described_tokenizer("stub:delay_ms=x")


def samples(*, chat):
    none = np.zeros((1, 16), np.uint8)
    names = Strings.of(["a.jsonl:1"])
    files = Files(names=Strings.of(["a.jsonl"]), stat=np.zeros((1, 6), np.uint64), content=none)
    record = Input(content=none, file=np.zeros(1, np.int32), line=np.ones(1, np.uint32))
    return SampleTable(
        names=names, files=files, inputs={"record": record}, columns={"form": np.array([chat], np.uint8)}
    )


def described(settings=None, cached=None, *, chat=False, **context):
    context = {"samples": samples(chat=chat)} | context
    return describe(InputIdsSettings(**settings or {}), DescribeContext(**context, **cached or {}))


def test_without_a_tokenizer_there_is_an_error_with_the_option():
    with pytest.raises(UsageError, match="no tokenizer was given") as caught:
        described()
    assert "--tokenizer" in caught.value.fix


def test_conversations_are_detected_from_the_data(folder):
    assert described({"tokenizer": str(folder)}, chat=True).recipe.chat_template
    assert not described({"tokenizer": str(folder)}).recipe.chat_template
    first = described({"tokenizer": "stub"}, chat=True)
    assert described(cached=as_cached(first), samples=None).recipe == first.recipe


def test_settings_that_were_not_given_follow_the_cache(folder, tmp_path):
    (tmp_path / "t").write_text(untagged(CHATML) + " ")
    settings = {"chat_template": tmp_path / "t", "template_options": (("a", "1"),), "control_tokens": True}
    first = described({"tokenizer": str(folder), "loss": "all", "add_bos": True, **settings}, chat=True)
    assert described(cached=as_cached(first), chat=True).recipe == first.recipe
    assert described({"loss": "assistant"}, as_cached(first), chat=True).recipe.loss == "assistant"
    changed = described({"tokenizer": "stub"}, {"recipe": first.recipe}).recipe
    assert (changed.add_bos, changed.template_options) == (False, ())
    texts = described({"tokenizer": "stub"})
    assert described(cached=as_cached(texts), chat=True).recipe.loss == "assistant", "texts are no choice of loss"


def test_a_check_downloads_nothing(folder):
    first = described({"tokenizer": str(folder)})
    cached = {"recipe": first.recipe, "provenance": {**first.provenance, "tokenizer": "some/tokenizer"}}
    with pytest.raises(ModelNotFoundError, match="not in the local hub cache;"):
        described(cached=cached, check=True, samples=None)


@pytest.mark.parametrize(
    "settings", [{"chat_template": Path("nowhere")}, {"template_options": (("a", "1"),)}], ids=["file", "option"]
)
def test_settings_of_conversations_for_texts_are_rejected(folder, settings):
    with pytest.raises(UsageError, match="DATA has no conversations"):
        described({"tokenizer": str(folder), **settings})


def test_prompts_carry_no_loss_unless_requested():
    prompts = {"samples": samples(chat=2)}
    assert described({"tokenizer": "stub"}, **prompts).recipe.loss == "assistant"
    assert described({"tokenizer": "stub", "loss": "all"}, **prompts).recipe.loss == "all"
    assert not described({"tokenizer": "stub"}, **prompts).recipe.chat_template


def test_the_id_depends_on_nothing_but_the_tokenizer(folder, tmp_path):
    """The id is the same for a used tokenizer, another folder, extra files and another process."""
    first = described({"tokenizer": str(folder)}, chat=True).recipe.recipe_id
    used = AutoTokenizer.from_pretrained(str(folder))
    used(["some words", "more"], padding=True, truncation=True, max_length=3)
    used.save_pretrained(tmp_path / "used")
    (tmp_path / "used" / "config.json").write_text('{"model_type": "llama"}')
    assert described({"tokenizer": str(tmp_path / "used")}, chat=True).recipe.recipe_id == first
    code = (
        "import sys\n"
        "from latentcache.encoders.text.describe import InputIdsSettings, describe_tokenizer\n"
        "settings = InputIdsSettings(tokenizer=sys.argv[1])\n"
        "print(describe_tokenizer(settings, chat=True).recipe.recipe_id.hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first.hex()
