import json

import pytest

from latentcache.errors import SourceError, UsageError
from latentcache.sources.corpus import is_dataset_info, is_saved, read_dataset_info, saved_files

LOCAL = {
    "plain": {"file_name": "plain.json"},
    "named": {"file_name": "named.jsonl", "columns": {"prompt": "q", "response": "a"}},
    "talk": {
        "file_name": "talk.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}
REJECTED = {
    "hub": ({"hf_hub_url": "org/name"}, "hub-dataset"),
    "script": ({"script_url": "make.py"}, "script-dataset"),
    "pairs": ({"file_name": "plain.json", "ranking": True}, "not-for-sft"),
    "pixels": ({"file_name": "plain.json", "columns": {"images": "images"}}, "not-for-sft"),
    "gone": ({"file_name": "gone.json"}, "not-found"),
    "out": ({"file_name": "../out.json"}, "outside-root"),
    "odd": ({"file_name": "plain.json", "formatting": "csv"}, "record-field"),
    "nameless": ({}, "record-field"),
    "listed": ({"file_name": "plain.json", "columns": ["a"]}, "record-field"),
}


@pytest.fixture
def folder(tmp_path):
    info = LOCAL | {name: entry for name, (entry, _) in REJECTED.items()}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for entry in LOCAL.values():
        (tmp_path / entry["file_name"]).write_text("[]")
    return tmp_path


def test_local_entries_are_used_and_the_others_rejected_by_name(folder):
    datasets, rejected, _ = read_dataset_info(folder)
    assert [dataset.name for dataset in datasets] == list(LOCAL)
    assert {item.name: item.reason for item in rejected} == {name: cause for name, (_, cause) in REJECTED.items()}
    assert all(item.hint and item.name in item.detail for item in rejected)


def test_without_columns_and_tags_the_defaults_hold(folder):
    form = read_dataset_info(folder, ["plain"])[0][0].form
    assert (form.form, form.prompt, form.query, form.response, form.history) == (
        "alpaca", "instruction", "input", "output", "",
    )  # fmt: skip


def test_columns_and_tags_that_are_not_named_are_none(folder):
    form = read_dataset_info(folder, ["named"])[0][0].form
    assert (form.prompt, form.query, form.response, form.system) == ("q", "", "a", "")
    form = read_dataset_info(folder, ["talk"])[0][0].form
    assert (form.messages, form.role_tag, form.user_tag, form.system_tag) == ("messages", "role", "user", "")


@pytest.mark.parametrize(
    ("columns", "form", "text"),
    [
        ({"prompt": "body"}, "text", "body"),
        ({"prompt": "body", "response": "", "query": None}, "text", "body"),
        ({"prompt": "body", "query": "more"}, "alpaca", "text"),
        ({"prompt": "body", "system": "said"}, "alpaca", "text"),
        ({}, "alpaca", "text"),
    ],
)
def test_a_prompt_alone_is_text(tmp_path, columns, form, text):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json", "columns": columns}}))
    ((found,), _, _) = read_dataset_info(tmp_path)
    assert (found.form.form, found.form.text) == (form, text)


def test_names_give_the_order(folder):
    assert [d.name for d in read_dataset_info(folder, ["talk", "plain"])[0]] == ["talk", "plain"]


@pytest.mark.parametrize(("name", "words"), [("hub", "server"), ("script", "script"), ("nobody", "nobody")])
def test_an_entry_that_was_asked_for_and_cannot_be_used_is_an_error(folder, name, words):
    with pytest.raises(UsageError, match=words) as caught:
        read_dataset_info(folder, [name])
    assert caught.value.fix


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "{", '{"a": {}, "a": {}}'])
def test_a_file_that_is_none_is_an_error(tmp_path, text):
    (tmp_path / "dataset_info.json").write_text(text)
    with pytest.raises(SourceError):
        read_dataset_info(tmp_path)


def test_a_drawn_sample_is_noted(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json", "num_samples": 5}}))
    _, _, (note,) = read_dataset_info(tmp_path)
    assert note.reason == "all-samples"


def test_what_datasets_leaves_beside_saved_data_is_another_file(folder):
    assert is_dataset_info(folder)
    (folder / "state.json").write_text("{}")
    assert not is_dataset_info(folder)


def test_the_files_that_a_saved_data_set_names(tmp_path):
    assert not is_saved(tmp_path)
    names = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(names))
    assert is_saved(tmp_path)
    assert list(saved_files(tmp_path)) == ["b.arrow", "a.arrow"]
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(SourceError, match=r"state\.json"):
        list(saved_files(tmp_path))


def test_of_a_saved_dict_the_files_of_train(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    (tmp_path / "train").mkdir()
    (tmp_path / "train/state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    assert is_saved(tmp_path)
    assert list(saved_files(tmp_path)) == ["train/a.arrow"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UsageError) as caught:
        list(saved_files(tmp_path))
    assert "test" in caught.value.fix
