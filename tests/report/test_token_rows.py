import json
import shutil

import pytest
from made_tokenizers import byte_level, save
from small_cache import run
from small_tokens import build, texts, write_texts

from latentcache.loader.cache import open_cache
from latentcache.report.page import render, report_facts
from latentcache.report.sample import token_facts

__all__ = ["run"]


@pytest.fixture
def chats(tmp_path):
    lines = []
    for number in range(6):
        turns = [
            {"role": "user", "content": f"question {number} <script>alert(1)</script>"},
            {"role": "assistant", "content": "answer " * (number + 1)},
        ]
        lines.append(json.dumps({"messages": turns}))
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    build(tmp_path / "chat.jsonl", tmp_path / "cache")
    return tmp_path / "cache"


def text_of(row, **wanted):
    return "".join(
        segment["text"] for segment in row["segments"] if all(segment[key] == wanted[key] for key in wanted)
    )


def test_rows_are_decoded_as_they_are_trained(chats):
    (facts,) = token_facts(open_cache(chats), {"pack": 256})
    assert facts["documents"] == 6
    assert facts["packing_efficiency"] == open_cache(chats).rows(pack=256).packing_efficiency
    row = facts["rows"][0]
    assert row["documents"] == max(segment["document"] for segment in row["segments"])
    assert set(text_of(row, loss=True, special=False)) == set("answer ")
    assert "<turn>" in text_of(row, special=True, loss=False)
    assert "question" in text_of(row, loss=False, special=False)
    assert row["learned"] == sum(
        len(segment["text"]) if not segment["special"] else 1 for segment in row["segments"] if segment["loss"]
    )


def test_padding_and_truncation_are_said(chats):
    (facts,) = token_facts(open_cache(chats), {"pad": 64, "overflow": "truncate_right"})
    cut = next(row for row in facts["rows"] if row["left_out"])
    assert cut["tokens"] == 64
    (facts,) = token_facts(open_cache(chats), {})
    padded = next(row for row in facts["rows"] if row["padding"])
    assert padded["segments"][-1]["text"] == f"{padded['padding']} x padding"
    assert facts["note"].startswith("one document a row of 128 tokens")


def test_a_layout_that_makes_no_row_says_why(chats):
    (facts,) = token_facts(open_cache(chats), {"pack": 32})
    assert facts["rows"] == []
    assert "longer than 32" in facts["note"]


def test_lengths_and_efficiency(tmp_path):
    write_texts(tmp_path / "data.jsonl", texts(40))
    build(tmp_path / "data.jsonl", tmp_path / "c")
    (facts,) = token_facts(open_cache(tmp_path / "c"), {})
    assert sum(bar["count"] for bar in facts["histogram"]) == 40
    assert facts["efficiency"][0]["pack"] > facts["efficiency"][0]["pad"] > 0
    assert facts["learned"] == facts["tokens"]


def test_texts_never_become_markup(chats):
    page = render(report_facts(chats))
    assert page.count("<script>") == 1
    assert "alert(1)&lt;/script&gt;" in page


def test_a_real_tokenizer_is_decoded_while_it_is_there(tmp_path):
    folder = save(byte_level(), tmp_path / "tokenizer", roles={"eos_token": "<|endoftext|>"})
    write_texts(tmp_path / "data.jsonl", ["caf\u00e9 and functions", "a second <|im_end|> text"])
    build(tmp_path / "data.jsonl", tmp_path / "c", tokenizer=str(folder))
    (facts,) = token_facts(open_cache(tmp_path / "c"), {})
    assert facts["decoded"]
    assert text_of(facts["rows"][0], special=False) == "caf\u00e9 and functions"
    assert text_of(facts["rows"][1], special=False) == "a second <|im_end|> text"
    assert next(segment["text"] for segment in facts["rows"][0]["segments"] if segment["special"]) == "<|endoftext|>"
    shutil.rmtree(folder)
    (facts,) = token_facts(open_cache(tmp_path / "c"), {})
    assert facts["undecoded"].startswith("ids are shown: ")
    assert facts["rows"][0]["segments"][0]["text"].split()[0].isdecimal()


def test_show_marks_the_loss(run, chats):
    done = run("show", chats, "chat.jsonl:2")
    assert done.status == 0
    assert "\u27e6answer answer <end>\u27e7" in done.out
    assert "loss      15 of " in done.out


def test_rows_in_a_notebook(chats):
    shown = open_cache(chats).rows(pack=256)._repr_html_()
    assert "carries loss" in shown
    assert "&lt;script&gt;" in shown
