"""Configuration files of trainers, each read by its trainer's rules."""

import pytest
from made_folders import notes, put, rows

from latentcache.errors import SourceError, SourceNotFoundError, UsageError
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import scan

KOHYA = """
[general]
caption_extension = ".txt"
shuffle_caption = true
flip_aug = true

[[datasets]]
resolution = 768
batch_size = 4
num_repeats = 2

  [[datasets.subsets]]
  image_dir = "cats"
  class_tokens = "a cat"
  caption_prefix = "photo,"

  [[datasets.subsets]]
  image_dir = "cats"

  [[datasets.subsets]]
  image_dir = "reg"
  is_reg = true
  num_repeats = 1
  conditioning_data_dir = "edges"

[[datasets]]
resolution = 512
  [[datasets.subsets]]
  image_dir = "cats"
  num_repeats = 5
"""


def kohya(root):
    put(root, {"cats/a.jpg": "x", "cats/a.txt": "one\ntwo", "cats/b.jpg": "x", "cats/sub/c.jpg": "x"})
    put(root, {"reg/d.jpg": "x", "edges/d.png": "x", "dataset.toml": KOHYA})


def partners(listing, name):
    """Sample -> its mask or control image."""
    files, positions = list(listing.samples.files.names), listing.samples.inputs[name].file.tolist()
    return {sample: files[at] for sample, at in zip(listing.samples.names, positions, strict=True) if at >= 0}


def test_kohya_dataset_toml(tmp_path):
    kohya(tmp_path)
    listing = scan(tmp_path / "dataset.toml")
    assert rows(listing) == [("cats/a.jpg", "photo, one", 7), ("cats/b.jpg", "photo, a cat", 7), ("reg/d.jpg", "", 4)]
    assert (listing.layout.word, listing.root) == ("kohya-config", tmp_path)
    assert listing.layout.resolutions == (512, 768)
    sets = [image_set.as_json() for image_set in listing.layout.sets]
    assert [(values["folder"], values["repeats"], values.get("is_reg", False)) for values in sets] == [
        ("cats", 2, False),
        ("reg", 1, True),
        ("cats", 5, False),
    ]
    assert {reason for _, reason in notes(listing)} == {
        "caption-lines", "config", "config-ignored", "in-two-sets", "no-caption", "outside-sets",
    }  # fmt: skip
    assert partners(listing, "control") == {"reg/d.jpg": "edges/d.png"}
    details = {note.reason: note.detail for note in reversed(listing.notes)}
    assert details["config"] == "subset cats is left out, as by the trainer: it is there twice in one data set"
    two = "2 images have the captions of 0:cats, not those of 1:cats, the first is cats/a.jpg"
    assert details["in-two-sets"] == two
    ignored = "batch_size = 4, flip_aug = True, shuffle_caption = True"
    assert details["config-ignored"] == f"3 settings of dataset.toml have no effect here: {ignored}"
    assert rows(scan(tmp_path)) == rows(listing)
    plain = scan(tmp_path, SourceOptions(layout="folder"))
    assert len(plain.samples) == 5


def test_captions_that_kohya_draws(tmp_path):
    text = """
[[datasets]]
  [[datasets.subsets]]
  image_dir = "a"
  caption_extension = ".txt"
  enable_wildcard = true
  caption_separator = ";"
  secondary_separator = ";;;"
  caption_tag_dropout_rate = 0.1
  caption_dropout_every_n_epochs = 3
"""
    put(tmp_path, {"a/x.jpg": "x", "a/x.txt": "a {red|blue} cat\na dog", "a/y.jpg": "x", "a/y.txt": "{one}"})
    put(tmp_path, {"dataset.toml": text})
    listing = scan(tmp_path)
    assert rows(listing) == [("a/x.jpg", "a {red|blue} cat\0a dog", 1), ("a/y.jpg", "{one}", 1)]
    (note,) = listing.notes
    assert (note.reason, note.count) == ("config-ignored", 4)
    assert "caption_separator = ';'" in note.detail


def test_kohya_metadata_is_refused_with_the_way_out(tmp_path):
    put(tmp_path, {"img/a.jpg": "x", "img/meta_cap.json": {"a.jpg": {"caption": "a cat", "tags": "1cat, sofa"}}})
    subset = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "img"\nmetadata_file = "img/meta_cap.json"\n'
    put(tmp_path, {"dataset.toml": subset})
    for name in "img", "img/meta_cap.json", "dataset.toml":
        with pytest.raises(SourceError, match="metadata files of kohya are not read") as caught:
            scan(tmp_path / name)
        assert "metadata.jsonl" in caught.value.fix
    assert rows(scan(tmp_path / "img", SourceOptions(layout="folder"))) == [("a.jpg", "", 1)]
    put(tmp_path, {"img/metadata.jsonl": '{"file_name": "a.jpg", "text": "a cat"}\n'})
    (tmp_path / "img/meta_cap.json").unlink()
    assert rows(scan(tmp_path / "img")) == [("a.jpg", "a cat", 1)]


def test_kohya_adds_prefix_and_suffix_to_an_empty_caption_too(tmp_path):
    put(tmp_path, {"img/a.jpg": "x", "img/a.caption": "one", "img/b.jpg": "x"})
    subset = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "img"\ncaption_prefix = "pre"\ncaption_suffix = "suf"\n'
    put(tmp_path, {"dataset.toml": subset})
    listing = scan(tmp_path / "dataset.toml")
    assert rows(listing) == [("a.jpg", "pre one suf", 1), ("b.jpg", "pre  suf", 1)]
    assert listing.no_caption == 0
    put(tmp_path, {"dataset.toml": f'{subset}class_tokens = "words"\n'})
    assert rows(scan(tmp_path / "dataset.toml"))[1] == ("b.jpg", "pre words suf", 1)


def test_simpletuner(tmp_path):
    put(tmp_path, {"one/my_cat.jpg": "x", "one/deep/b.jpg": "x", "two/c.jpg": "x", "two/c.txt": "first\n\nsecond"})
    put(tmp_path, {"masks/my_cat.png": "x", "masks/b.png": "x", "three/d.jpg": "x", "two/e.jpg": "x"})
    put(tmp_path, {"one/edges/c.jpg": "x"})
    local = {"type": "local", "resolution": 1.0}
    backends = [
        local | {"id": "one", "instance_data_dir": "one", "repeats": 4.0, "caption_strategy": "filename",
                 "conditioning_data": ["m", "gone", "away", "lost"]},
        local | {"id": "two", "instance_data_dir": "two", "caption_strategy": "textfile", "repeats": 0,
                 "instance_prompt": "sks", "prepend_instance_prompt": True},
        local | {"id": "three", "instance_data_dir": "three", "caption_strategy": "instanceprompt",
                 "instance_prompt": ["a dog", "dog"]},
        local | {"id": "m", "instance_data_dir": "masks", "dataset_type": "conditioning",
                 "conditioning_type": "mask"},
        local | {"id": "unused", "instance_data_dir": "one/edges", "dataset_type": "conditioning"},
        {"id": "text", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache"},
        {"id": "far", "type": "aws", "aws_bucket_name": "x", "disabled": True},
    ]  # fmt: skip
    put(tmp_path, {"multidatabackend.json": backends})
    listing = scan(tmp_path / "multidatabackend.json")
    assert rows(listing) == [
        ("one/deep/b.jpg", "b", 5),
        ("one/my_cat.jpg", "my cat", 5),
        ("three/d.jpg", "a dog\0dog", 1),
        ("two/c.jpg", "sks first\0sks second", 1),
        ("two/e.jpg", "", 1),
    ]
    assert listing.images.captions == {"file name": 2, "instance prompt": 1, "sidecar .txt": 1, "none": 1}
    assert listing.layout.word == "simpletuner"
    assert ("masks/b.png", "mask") in notes(listing), "it is not of one/deep/b.jpg: paths decide"
    assert any("far (disabled)" in note.detail for note in listing.notes)
    absent = [note.detail.split()[-4] for note in listing.notes if note.detail.endswith("is not there")]
    assert absent == ["gone", "away", "lost"]
    assert ("one/edges/c.jpg", "control") in notes(listing), "no data set names its folder"
    first = rows(scan(tmp_path, SourceOptions(caption_lines="first")))[2:4]
    assert first == [("three/d.jpg", "a dog", 1), ("two/c.jpg", "sks first", 1)]
    assert [item.label for item in listing.layout.sets] == ["one", "two", "three"]
    assert rows(scan(tmp_path)) == rows(listing)


def test_masks_that_options_replace_are_no_samples(tmp_path):
    put(tmp_path, {"a/x.png": "x", "a/masks/x.png": "x", "b/y.png": "x"})
    mask = {"id": "m", "instance_data_dir": "a/masks", "dataset_type": "conditioning", "conditioning_type": "mask"}
    put(tmp_path, {"multidatabackend.json": [BACKEND, BACKEND | {"id": "b", "instance_data_dir": "b"}, mask]})
    for masks in "a/masks", "none", "alpha":
        listing = scan(tmp_path, SourceOptions(masks=masks))
        assert list(listing.samples.names) == ["a/x.png", "b/y.png"]


@pytest.mark.parametrize(
    ("backend", "what", "fix"),
    [
        ({"type": "aws"}, "data set far has the type aws", '"disabled": true'),
        ({"type": "webshart"}, "data set far has the type webshart", "copy its images here"),
        ({"caption_strategy": "parquet"}, "caption_strategy 'parquet' is not read", "give textfile"),
    ],
)
def test_simpletuner_sets_that_are_not_read(tmp_path, backend, what, fix):
    put(tmp_path, {"a/c.jpg": "x"})
    put(tmp_path, {"multidatabackend.json": [BACKEND, BACKEND | {"id": "far"} | backend]})
    with pytest.raises(SourceError, match=what) as caught:
        scan(tmp_path)
    assert fix in caught.value.fix


SUBSET = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\n'
BACKEND = {"id": "one", "instance_data_dir": "a", "caption_strategy": "filename"}


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("dataset.toml", f"{SUBSET}num_repeats = 2.5\n", "num_repeats"),
        ("dataset.toml", f'{SUBSET}num_repeats = "many"\n', "num_repeats"),
        ("dataset.toml", f'{SUBSET}is_reg = "false"\n', "is_reg"),
        ("dataset.toml", f'{SUBSET}class_tokens = ["a"]\n', "class_tokens"),
        ("dataset.toml", "[[datasets]]\nsubsets = 5", "another kind"),
        ("dataset.toml", "a = " + "[" * 100_000, "cannot be read"),
        ("multidatabackend.json", [BACKEND | {"repeats": 1.5}], "repeats"),
        ("multidatabackend.json", [BACKEND | {"repeats": -1}], "repeats"),
        ("concepts.json", [{"path": "a", "text": {"prompt_source": "samples"}}], "prompt_source"),
        ("concepts.json", '[{"path": "a", "text": {}, "balancing": 1e400}]', "another kind"),
        ("concepts.json", [{"path": "a", "text": 5}], "another kind"),
    ],
)
def test_a_value_that_the_trainer_does_not_take_is_an_error(tmp_path, name, config, words):
    put(tmp_path, {"a/x.jpg": "x", "a/metadata.csv": "file_name,text\nx.jpg,a\n", name: config})
    with pytest.raises(SourceError, match=f"{name}.*{words}"):
        scan(tmp_path)


def test_onetrainer(tmp_path):
    put(tmp_path, {"a/x.jpg": "x", "a/x.txt": "\nfirst\nsecond", "a/x-masklabel.png": "m", "a/sub/no.jpg": "x"})
    put(tmp_path, {"b/deep/the file.jpg": "x", "c/y.jpg": "x", "d/z.jpg": "x"})
    put(tmp_path, {"prompts.txt": "one prompt\nanother\n"})
    alone = [{"path": "a", "text": {"prompt_source": "concept", "prompt_path": "prompts.txt"}}]
    put(tmp_path, {"alone.json": alone})
    assert rows(scan(tmp_path / "alone.json")) == [("x.jpg", "one prompt\0another", 1)], "the prompt is outside"
    text = {"prompt_source": "sample", "prompt_path": "", "enable_tag_shuffling": True, "tag_delimiter": ","}
    concepts = [
        {"name": "A", "path": "a", "balancing": 3.0, "text": text, "loss_weight": 0.5},
        {"path": "b", "include_subdirectories": True, "text": {"prompt_source": "filename"}, "balancing": 0.5},
        {"path": "c", "text": {"prompt_source": "concept", "prompt_path": "prompts.txt"}, "type": "PRIOR_PREDICTION",
         "image": {"enable_random_flip": True, "enable_random_hue": False, "random_hue_max_strength": 0.1}},
        {"path": "d", "enabled": False, "text": text},
    ]  # fmt: skip
    put(tmp_path, {"concepts.json": concepts})
    listing = scan(tmp_path / "concepts.json")
    assert rows(listing) == [
        ("a/x.jpg", "first\0second", 3),
        ("b/deep/the file.jpg", "the file", 1),
        ("c/y.jpg", "one prompt\0another", 1),
    ]
    assert [item.is_reg for item in listing.layout.sets] == [False, False, True]
    assert "prompts.txt" not in dict(notes(listing))
    details = {note.reason: note.detail for note in listing.notes}
    ignored = "d (disabled), enable_tag_shuffling = True, image.enable_random_flip = True, loss_weight = 0.5"
    assert details["config-ignored"] == f"4 settings of concepts.json have no effect here: {ignored}"


def test_onetrainer_concepts_that_do_not_train(tmp_path):
    put(tmp_path, {"a/x.jpg": "x", "a/x-masklabel.jpg": "m", "a/y-condlabel.png": "m"})
    put(tmp_path, {"b/y.jpg": "x", "c/z.jpg": "x"})
    text = {"prompt_source": "filename"}
    concepts = [
        {"path": "a", "text": text},
        {"path": "b", "text": text, "balancing": 0},
        {"path": "c", "text": text, "type": "VALIDATION"},
    ]
    put(tmp_path, {"concepts.json": concepts})
    listing = scan(tmp_path / "concepts.json")
    assert rows(listing) == [("a/x.jpg", "x", 1)]
    details = {note.reason: note.detail for note in listing.notes}
    assert details["config-ignored"] == "1 setting of concepts.json has no effect here: b (balancing 0)"
    assert details["split-unused"] == "1 file of the split validation; train is read, the first is c/z.jpg"
    assert details["mask"] == "1 mask belongs to no image, the first is a/x-masklabel.jpg"
    assert details["control"] == "1 control image belongs to no image, the first is a/y-condlabel.png"
    assert rows(scan(tmp_path / "concepts.json", SourceOptions(split="validation"))) == [("c/z.jpg", "z", 1)]


def test_musubi_tuner(tmp_path):
    put(
        tmp_path, {"one/a.jpg": "x", "one/a.txt": "first", "one/sub/b.jpg": "x", "edges/a.png": "x", "two/c.png": "x"}
    )
    config = """
    [general]
    caption_extension = ".txt"
    num_repeats = 3
    [[datasets]]
    image_directory = "one"
    cache_directory = "cache/small"
    control_directory = "edges"
    resolution = 512
    [[datasets]]
    image_directory = "one"
    cache_directory = "cache/large"
    resolution = 1024
    num_repeats = 2
    [[datasets]]
    image_directory = "two"
    num_repeats = 1
    fp_latent_window_size = 9
    """
    put(tmp_path, {"data.toml": config})
    listing = scan(tmp_path / "data.toml")
    assert rows(listing) == [("one/a.jpg", "first", 3), ("two/c.png", "", 1)]
    assert listing.layout.word == "musubi"
    assert partners(listing, "control") == {"one/a.jpg": "edges/a.png"}
    details = " ".join(note.detail for note in listing.notes)
    assert "several values of num_repeats: the first counts" in details
    assert "fp_latent_window_size = 9" in details
    put(tmp_path, {"data.toml": '[[datasets]]\nimage_jsonl_file = "x.jsonl"\n'})
    with pytest.raises(SourceError, match="image_directory: expected a path"):
        scan(tmp_path / "data.toml")


def test_ai_toolkit(tmp_path):
    texts = {"a.txt": "a, b,c", "b.txt": "[trigger] runs", "c.txt": "an ohwx, here", "d.txt": ""}
    put(tmp_path, {f"cats/{name}": text for name, text in texts.items()})
    put(tmp_path, {f"cats/{name}.jpg": "x" for name in "abcde"} | {"masks/a.png": "x", "reg/sub/r.png": "x"})
    put(tmp_path, {"reg/sub/r.txt": "a [name],cat"})
    config = """
    job: extension
    config:
      name: lora
      process:
      - type: sd_trainer
        trigger_word: ohwx
        datasets:
        - {folder_path: cats, num_repeats: 2, mask_path: masks, resolution: [512, 768], caption_dropout_rate: 0.05}
        - {folder_path: reg, is_reg: true, resolution: [512, 768]}
    """
    put(tmp_path, {"job.yaml": config})
    listing = scan(tmp_path / "job.yaml")
    assert rows(listing) == [
        ("cats/a.jpg", "ohwx a, b, c", 2),
        ("cats/b.jpg", "ohwx runs", 2),
        ("cats/c.jpg", "an ohwx, here", 2),
        ("cats/d.jpg", "ohwx ", 2),
        ("cats/e.jpg", "ohwx ", 2),
        ("reg/sub/r.png", "a ohwx, cat", 1),
    ]
    assert partners(listing, "mask") == {"cats/a.jpg": "masks/a.png"}
    assert [item.is_reg for item in listing.layout.sets] == [False, True]
    put(tmp_path, {"job.yaml": "a: [1\n"})
    with pytest.raises(SourceError, match=r"job.yaml cannot be read"):
        scan(tmp_path / "job.yaml")


def test_control_images_that_ai_toolkit_made(tmp_path):
    put(tmp_path, {"a.jpg": "x", "_controls/a.depth.jpg": "d", "sub/b.jpg": "x", "sub/_controls/b.jpg": "d"})
    listing = scan(tmp_path)
    assert [name for name, _, _ in rows(listing)] == ["a.jpg", "sub/b.jpg"]
    assert notes(listing) == [("_controls/a.depth.jpg", "control")]


def test_paths_of_a_configuration(tmp_path, monkeypatch):
    put(tmp_path, {"conf/dataset.toml": KOHYA})
    with pytest.raises(SourceNotFoundError) as caught:
        scan(tmp_path / "conf/dataset.toml")
    assert caught.value.what == "dataset.toml: image_dir = 'cats' does not exist"
    kohya(tmp_path / "data")
    monkeypatch.chdir(tmp_path / "data")
    listing = scan(tmp_path / "conf/dataset.toml")
    assert (listing.root, listing.samples.names[0]) == (tmp_path / "data", "cats/a.jpg")
    kohya(tmp_path / "conf")
    with pytest.raises(SourceError, match="is there twice"):
        scan(tmp_path / "conf/dataset.toml")
    put(tmp_path, {"conf/dataset.toml": "[general"})
    with pytest.raises(SourceError, match=r"dataset\.toml cannot be read"):
        scan(tmp_path / "conf/dataset.toml")
    put(tmp_path, {"conf/other.toml": "[x]\n"})
    with pytest.raises(UsageError, match="is not a data set configuration"):
        scan(tmp_path / "conf/other.toml")


def of_simpletuner(**asked):
    return "multidatabackend.json", [{"id": "a", "instance_data_dir": "a", **asked}]


def of_onetrainer(**asked):
    return "concepts.json", [{"path": "a", "text": {}, "image": {"resolution_override": "768", **asked}}]


def of_kohya(value):
    lines = ["[general]", f"resolution = {value}", "[[datasets]]", "[[datasets.subsets]]", 'image_dir = "a"']
    return "dataset.toml", "\n".join(lines)


@pytest.mark.parametrize(
    ("config", "resolutions", "is_noted"),
    [
        (of_simpletuner(resolution=1024, resolution_type="pixel_area"), (1024,), False),
        (of_simpletuner(resolution=1.0, resolution_type="area"), (), True),
        (of_simpletuner(resolution=1024, resolution_type="pixel"), (), True),
        (of_simpletuner(resolution=1024), (), True),
        (of_onetrainer(enable_resolution_override=True), (768,), False),
        (of_onetrainer(), (), False),
        (of_kohya("1024"), (1024,), False),
        (of_kohya("[768, 768]"), (768,), False),
        (of_kohya("[512, 768]"), (), True),
    ],
)
def test_a_resolution_is_followed_if_it_is_an_area_in_pixels(tmp_path, config, resolutions, is_noted):
    name, value = config
    put(tmp_path, {"a/x.jpg": "x", name: value})
    listing = scan(tmp_path)
    assert listing.layout.resolutions == resolutions
    assert ("config-ignored" in {note.reason for note in listing.notes}) == is_noted
