"""DATA that is easily misunderstood, as the commands see it: each file is a sample's, rejected or in a note."""

import json
import os
import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_archives import png, rows_of
from small_cache import SMALL

from latentcache import BuildSettings, build_cache, open_cache
from latentcache.errors import LatentcacheError
from latentcache.fields.table import table_values
from latentcache.store.snapshot import open_snapshot

IMAGES, TOKENS = SMALL, ("--tokenizer", "stub")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def build(run, data, tmp_path):
    """Build the cache of DATA; the result is the JSON object."""

    def command(*words):
        return run("build", data, "--out", tmp_path / "cache", *words, "--json").json

    return command


@pytest.fixture
def captions(tmp_path):
    """Read the caption of each sample from the current snapshot."""

    def read():
        samples = open_snapshot(tmp_path / "cache").samples
        return dict(zip(samples.names, samples.inputs["caption"].text, strict=True))

    return read


def put(path, content=""):
    """Write text, bytes, or a value as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(content)
    return path


def lines_of(*values):
    return "".join(json.dumps(value) + "\n" for value in values)


def reasons(report, category="note"):
    return {item["path"]: item["reason"] for item in report["items"] if item["category"] == category}


def samples_of(report):
    """Samples, rejected samples and exit status."""
    return report["counts"]["samples"], report["counts"]["quarantined"], report["exit_code"]


def run_fix(run, data, fix, *more):
    """Run the command, or add the first option, that an error names as its fix."""
    words = next((part for part in fix.split("`") if part.startswith("latentcache ")), "")
    option = next((word.strip("`,;.") for word in fix.split() if word.startswith("--")), "")
    return run(*(shlex.split(words)[1:] if words else ("build", data, option)), *more, "--json").json


# folders without number


def table_of(names):
    return lines_of(*({"file_name": name, "text": f"caption of {name}"} for name in names))


def test_a_table_at_the_root_of_thousands_of_folders(build, captions, data):
    image = png(90)
    names = [f"{number:04}/a.png" for number in range(4200)]
    for name in names:
        put(data / name, image)
    put(data / "metadata.jsonl", table_of(names))
    first = build(*IMAGES)
    assert (samples_of(first), first["counts"]["no_caption"], first["items"]) == ((4200, 0, 0), 0, [])
    assert captions() == {name: f"caption of {name}" for name in names}
    again = build()
    assert (again["counts"]["no_caption"], again["counts"]["encoded"], again["items"]) == (0, 0, [])


# splits


def images_of(split):
    return {f"{split}-{number}": (png(30 + 50 * number + len(split)), f"{split} {number}") for number in range(2)}


def folders(root, split):
    for stem, (data, text) in images_of(split).items():
        put(root / split / f"{stem}.png", data)
        put(root / split / f"{stem}.txt", text)


def texts_of(split):
    return [{"text": f"{split} {number}"} for number in range(2)]


def records(root, split):
    put(root / f"{split}.jsonl", lines_of(*texts_of(split)))


FORMS = {"folders": (folders, IMAGES), "records": (records, TOKENS)}


def saved(root, splits, *, is_images):
    """A dictionary of data sets as ``datasets`` saves it: arrow files in a folder for each split."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}) if is_images else None
    rows = {split: rows_of(images_of(split)).to_pylist() if is_images else texts_of(split) for split in splits}
    data_sets = {split: datasets.Dataset.from_list(images, features=features) for split, images in rows.items()}
    datasets.DatasetDict(data_sets).save_to_disk(root)


@pytest.fixture(params=[*FORMS, "arrow", "record_arrow"])
def splits(request, data):
    """Write splits in one form; the result is the options of a build."""

    def write(*names):
        if request.param.endswith("arrow"):
            saved(data, names, is_images=request.param == "arrow")
            return IMAGES if request.param == "arrow" else TOKENS
        form, words = FORMS[request.param]
        for name in names:
            form(data, name)
        return words

    return write


def is_of(split, name):
    return name.startswith((f"{split}/", f"{split}-", f"{split}."))


def split_of(cache, *splits):
    """The splits that the samples of a cache are from."""
    names = list(open_snapshot(cache).samples.names)
    return len(names), {split for split in splits for name in names if is_of(split, name)}


def files_of(data, split):
    return sum(is_of(split, path.relative_to(data).as_posix()) for path in data.rglob("*") if path.is_file())


def left_out(report):
    """Files that notes count, by reason."""
    counts = {}
    for item in report["items"]:
        counts[item["reason"]] = counts.get(item["reason"], 0) + item.get("count", 1)
    return counts


def test_train_is_read_and_the_other_split_is_counted(run, build, splits, data, tmp_path):
    words = splits("train", "test")
    report = build(*words)
    assert split_of(tmp_path / "cache", "train", "test") == (2, {"train"})
    assert (report["exit_code"], left_out(report)) == (0, {"split-unused": files_of(data, "test")})
    other = run("build", data, "--out", tmp_path / "other", *words, "--split", "test", "--json").json
    assert split_of(tmp_path / "other", "train", "test") == (2, {"test"})
    assert (other["exit_code"], left_out(other)) == (0, {"split-unused": files_of(data, "train")})
    wrong = run("build", data, "--out", tmp_path / "wrong", *words, "--split", "more", "--json").json
    assert wrong["exit_code"] == 2
    assert run_fix(run, data, wrong["error"]["fix"], "--out", tmp_path / "wrong", *words)["exit_code"] == 0


def test_several_splits_without_train_need_a_choice(run, build, splits, data, tmp_path):
    words = splits("validation", "test")
    report = build(*words)
    assert report["exit_code"] == 2
    assert "--split" in report["error"]["fix"]
    assert run_fix(run, data, report["error"]["fix"], "--out", tmp_path / "cache", *words)["exit_code"] == 0
    count, chosen = split_of(tmp_path / "cache", "validation", "test")
    assert (count, len(chosen)) == (2, 1)


def test_a_file_that_is_no_data_changes_nothing_when_it_grows(build, data, tmp_path):
    folders(data, "a")
    put(data / "README.md", "about")
    build(*IMAGES)
    put(data / "README.md", "about these images")
    assert build()["snapshot"] == 1
    put(data / "a/a-0.txt", "another caption")
    assert build()["snapshot"] == 2


# links


def plain(root):
    put(root / "sub/a.png", png(60))
    put(root / "sub/a.txt", "a caption")
    put(root / "b.png", png(90))
    return IMAGES


def with_table(root):
    put(root / "sub/a.png", png(60))
    put(root / "metadata.csv", "file_name,text\nsub/a.png,a caption\n")
    return IMAGES


def some_records(root):
    put(root / "a.jsonl", lines_of({"text": "one"}, {"text": "two"}))
    put(root / "sub/b.jsonl", lines_of({"text": "three"}))
    return TOKENS


def as_links(root, targets, *, only=""):
    """Move files to a folder of targets, and leave links to them."""
    targets.mkdir(parents=True)
    for number, path in enumerate(sorted(root.rglob("*"))):
        if path.is_file() and path.name.endswith(only):
            target = path.rename(targets / f"{number:040x}")
            path.symlink_to(os.path.relpath(target, path.parent))


def test_blobs_of_another_folder_are_outside(run, tmp_path):
    snapshot = tmp_path / "datasets--who--what/snapshots/0123456789abcdef"
    snapshot.mkdir(parents=True)
    words = plain(snapshot)
    as_links(snapshot, tmp_path / "datasets--who--other/blobs")
    report = run("build", snapshot, "--out", tmp_path / "cache", *words, "--json").json
    assert report["exit_code"] in (1, 2)
    assert "--follow-links" in json.dumps(report)


@pytest.mark.parametrize("form", [plain, with_table, some_records])
def test_links_out_of_the_data_are_rejected_unless_they_are_allowed(run, data, tmp_path, form):
    words = form(data)
    count = run("build", data, "--out", tmp_path / "plain", *words, "--json").json["counts"]["samples"]
    as_links(data, tmp_path / "elsewhere", only=".csv" if form is with_table else "")
    links = {path.relative_to(data).as_posix() for path in data.rglob("*") if path.is_symlink()}
    if form is not with_table:
        form(data / "files")
        count *= 2
    report = run("build", data, "--out", tmp_path / "cache", *words, "--json").json
    if form is with_table:  # without it the images would have no captions
        assert report["exit_code"] == 2
        assert "--follow-links" in report["error"]["fix"]
    else:
        rejected = [item for item in report["items"] if item["category"] == "quarantined"]
        assert {(item["path"], item["reason"]) for item in rejected} == {(name, "outside-root") for name in links}
        assert all("--follow-links" in item["hint"] + item.get("fix", "") for item in rejected)
    allowed = run("build", data, "--out", tmp_path / "cache", *words, "--follow-links", "--json").json
    assert samples_of(allowed) == (count, 0, 0)
    assert run("verify", tmp_path / "cache", "--full").status == 0


def test_a_linked_folder_outside_is_rejected_unless_it_is_allowed(build, data, tmp_path):
    put(data / "a.png", png(60))
    put(tmp_path / "elsewhere/b.png", png(90))
    (data / "more").symlink_to(tmp_path / "elsewhere")
    report = build(*IMAGES)
    assert (reasons(report, "quarantined"), report["exit_code"]) == ({"more": "outside-root"}, 1)
    assert samples_of(build("--follow-links")) == (2, 0, 0)


# records beside images


@pytest.fixture
def chats_and_a_logo(data):
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    put(data / "chats.jsonl", lines_of({"messages": chat}, {"messages": [chat[0], chat[1] | {"content": "hi"}]}))
    put(data / "logo.png", png(60))


def test_real_records_beside_images_need_a_choice(build, chats_and_a_logo, tmp_path):
    report = build()
    assert report["exit_code"] == 2
    assert all(option in report["error"]["fix"] for option in ("--model", "--tokenizer"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("words", "count", "other"), [(TOKENS, 2, "logo.png"), (IMAGES, 1, "chats.jsonl")])
def test_the_model_or_the_tokenizer_decides(build, chats_and_a_logo, words, count, other):
    report = build(*words)
    assert (samples_of(report), list(reasons(report))) == ((count, 0, 0), [other])
    again = build()
    assert (samples_of(again), reasons(again)) == ((count, 0, 0), reasons(report))


def test_a_list_of_records_beside_an_image_is_read_with_a_tokenizer(build, data):
    put(data / "texts.json", [{"text": "one"}, {"text": "two"}])
    put(data / "logo.png", png(60))
    report = build(*TOKENS)
    assert (samples_of(report), list(reasons(report))) == ((2, 0, 0), ["logo.png"])


# tables

TABLE_FORMS = ["csv", "jsonl", "parquet"]


def put_table(folder, form, *rows):
    path = folder / f"metadata.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif form == "jsonl":
        put(path, lines_of(*rows))
    else:
        put(path, "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_two_columns_of_captions_or_images_need_a_choice(build, captions, data, form):
    put(data / "a.png", png(60))
    put_table(data, form, {"file_name": "a.png", "text": "a text", "prompt": "a prompt"})
    report = build(*IMAGES)
    assert report["exit_code"] == 2
    assert "--caption-column" in report["error"]["fix"]
    for column in ("prompt", "text"):
        assert build(*IMAGES, "--caption-column", column)["exit_code"] == 0
        assert captions() == {"a.png": f"a {column}"}
    put_table(data, form, {"image": "a.png", "path": "a.png", "text": "a cat"})
    assert build(*IMAGES)["error"]["fix"] == "name it: --image-column=image"


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_the_columns_that_are_named_are_read(build, captions, data, form):
    put(data / "a.png", png(60))
    put_table(data, form, {"file_name": "no.png", "photo": "a.png", "text": "no", "description": "a cat"})
    words = ("--image-column", "photo", "--caption-column", "description")
    assert samples_of(build(*IMAGES, *words)) == (1, 0, 0)
    assert captions() == {"a.png": "a cat"}


@pytest.mark.parametrize("option", ["--image-column", "--caption-column"])
@pytest.mark.parametrize("form", TABLE_FORMS)
def test_a_named_column_that_is_not_there_is_an_error(build, data, form, option):
    put(data / "a.png", png(60))
    put_table(data, form, {"file_name": "a.png", "text": "one"})
    error = build(*IMAGES, option, "nope")["error"]
    assert "columns: file_name, text" in error["why"]
    assert error["fix"].startswith(f"name one of these columns with {option}")


def columns_in_batches(cache):
    """Label and score of each sample, as a loader gives them."""
    images = {}
    for batch in open_cache(cache).loader(batch_size=1):
        (name,), (label,), (score,) = (batch[column] for column in ("names", "label", "score"))
        images[name] = label, score
    return images


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_a_label_is_a_column_and_no_caption(run, build, captions, data, tmp_path, form):
    put(data / "a.png", png(60))
    put(data / "ab.png", png(90))
    rows = [{"file_name": f"{stem}.png", "label": f"kind {stem}", "score": len(stem)} for stem in ("a", "ab")]
    put_table(data, form, *rows)
    report = build(*IMAGES)
    assert (samples_of(report), report["counts"]["no_caption"]) == ((2, 0, 0), 2)
    assert captions() == {"a.png": "", "ab.png": ""}
    (note,) = report["items"]
    assert note["found"] == "it has no column of captions; columns of the samples: label, score"
    expected = {"a.png": ("kind a", 1), "ab.png": ("kind ab", 2)}
    if form == "csv":  # where all cells are texts
        expected = {name: (label, str(score)) for name, (label, score) in expected.items()}
    assert columns_in_batches(tmp_path / "cache") == expected
    put_table(data, form, {**rows[0], "label": "another kind"}, rows[1])
    (item,) = run("verify", tmp_path / "cache", "--json").json["items"][:1]
    assert (item["path"], item["reason"]) == ("a.png", "column-changed")
    again = build()
    assert again["counts"]["encoded"] == 0
    assert columns_in_batches(tmp_path / "cache") == {**expected, "a.png": ("another kind", expected["a.png"][1])}
    assert run("verify", tmp_path / "cache", "--json").json["exit_code"] == 0


def test_a_column_with_the_name_of_a_batch_key_is_a_warning(build, data, tmp_path):
    put(data / "a.png", png(60))
    put_table(data, "jsonl", {"file_name": "a.png", "text": "a cat", "keys": 7})
    build(*IMAGES)
    with pytest.warns(UserWarning, match="batches lack the column keys of the metadata table"):
        open_cache(tmp_path / "cache").loader(batch_size=1)


def test_columns_of_a_table_are_those_of_the_whole_in_each_part(run, data, tmp_path):
    stems = [f"{number}{'x' * number}" for number in range(8)]
    for number, stem in enumerate(stems):
        put(data / f"{stem}.png", png(40 + 20 * number))
    put_table(data, "jsonl", *({"file_name": f"{stem}.png", "label": stem, "score": len(stem) / 2} for stem in stems))
    for part in ("0/2", "1/2"):
        assert run("build", data, "--out", tmp_path / part[0], *IMAGES, "--part", part).status == 0
    assert run("merge", tmp_path / "0", tmp_path / "1", "--out", tmp_path / "cache").status == 0
    columns = open_snapshot(tmp_path / "cache").samples.columns
    assert table_values(columns["table.label"]) == stems
    assert table_values(columns["table.score"]).tolist() == [len(stem) / 2 for stem in stems]


@pytest.mark.parametrize("value", [["a", "b"], {"a": 1}, "x" * 300, "\0"])
def test_a_column_that_is_not_kept_is_noted(build, data, value):
    put(data / "a.png", png(60))
    put(data / "b.png", png(90))
    put_table(
        data, "jsonl", {"file_name": "a.png", "text": "one", "more": value}, {"file_name": "b.png", "text": "two"}
    )
    (note,) = build(*IMAGES)["items"]
    assert (note["reason"], note["found"].partition(":")[0]) == ("text-column", "columns that are not used")


# JSON lists


def test_a_list_is_read_up_to_a_broken_item(build, data, tmp_path):
    put(data / "a.json", '[{"text": "one"},\n {"text": "two"},\n {"text": }, {"text": "four"}]')
    put(data / "b.json", [{"text": "five"}])
    report = build(*TOKENS)
    assert report["exit_code"] == 1
    assert list(open_snapshot(tmp_path / "cache").samples.names) == ["a.json:1", "a.json:2", "b.json:1"]
    (item,) = report["items"]
    assert (item["category"], item["path"]) == ("quarantined", "a.json")
    assert all(words in item["found"] for words in ("line 3", "column 11", "rest unread"))
    assert build()["items"] == report["items"]
    put(data / "a.json", [{"text": text} for text in ("one", "two", "three")])
    mended = build()
    assert (samples_of(mended), mended["counts"]["encoded"]) == ((4, 0, 0), 1)


# names and words in errors


@pytest.mark.parametrize("name", ["my--data", "a.b--c-d", "--split=x", "leave --model out", "_dash-es--and_"])
def test_paths_and_words_are_not_rewritten_in_python(tmp_path, name):
    path = tmp_path / name
    for data in (path / "nothing", path):
        with pytest.raises(LatentcacheError) as caught:
            build_cache(BuildSettings(data=data, out=tmp_path / "cache", fields={"latents": {"model": "stub"}}))
        assert str(data) in str(caught.value)
        path.mkdir(exist_ok=True)


def test_a_fix_is_a_command_in_a_shell_and_code_in_python(run, build, data):
    for split in ("validation", "test"):
        records(data, split)
    assert "--split" in build(*TOKENS)["error"]["fix"]
    with pytest.raises(LatentcacheError) as caught:
        build_cache(BuildSettings(data=data, fields={"input_ids": {"tokenizer": "stub"}}))
    assert "--split" not in str(caught.value)
    assert "split=" in caught.value.fix


@pytest.mark.parametrize("text", ["[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'gone'\n", "["])
def test_a_wrong_configuration_is_named_in_python_too(build, data, text):
    put(data / "a.png", png(60))
    put(data / "dataset.toml", text)
    assert "--layout=folder" in build(*IMAGES)["error"]["fix"]
    assert build(*IMAGES, "--layout=folder")["exit_code"] == 0
    with pytest.raises(LatentcacheError) as caught:
        build_cache(BuildSettings(data=data, out=data.with_name("other"), fields={"latents": {"model": "stub"}}))
    assert "layout='folder'" in str(caught.value)
    assert "--" not in str(caught.value)
