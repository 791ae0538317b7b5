"""Folders with repeats and class words, read by the rules of kohya's sd-scripts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_folders import notes, put, rows

from latentcache.errors import SourceAmbiguousError
from latentcache.sources.layout import ImageSet, balanced
from latentcache.sources.options import Part, SourceOptions
from latentcache.sources.scan import scan


def test_repeats_class_words_and_first_lines(tmp_path):
    put(tmp_path, {"10_ohwx man/a.jpg": "x", "10_ohwx man/a.txt": "one\ntwo", "10_ohwx man/b.jpg": "x"})
    put(tmp_path, {"1_reg/c.jpg": "x", "1_reg/d.jpg": "x", "1_reg/d.caption": "face", "1_reg/e.json": "{}"})
    listing = scan(tmp_path)
    assert listing.layout.word == "kohya"
    assert listing.layout.why == "10_ohwx man/ reads as 10 repeats of 'ohwx man'"
    assert rows(listing) == [
        ("10_ohwx man/a.jpg", "one", 10),
        ("10_ohwx man/b.jpg", "ohwx man", 10),
        ("1_reg/c.jpg", "reg", 1),
        ("1_reg/d.jpg", "face", 1),
    ]
    assert listing.samples.columns["image_set"].tolist() == [0, 0, 1, 1]
    assert listing.images.captions == {"sidecar .txt": 1, "sidecar .caption": 1, "class words": 2}
    assert (listing.no_caption, listing.images.set_samples) == (0, (2, 2))
    again = scan(tmp_path, known=scan(tmp_path, hash_all=True).samples)
    assert (rows(again), again.images.captions) == (rows(listing), listing.images.captions)
    once = scan(tmp_path, SourceOptions(repeats=False))
    assert once.samples.names == listing.samples.names
    assert "repeats" not in once.samples.columns
    assert [image_set.repeats for image_set in once.layout.sets] == [1, 1]


def test_lines_that_are_not_used_are_counted(tmp_path):
    put(tmp_path, {f"10_dog/{name}.jpg": "x" for name in "abc"})
    put(tmp_path, {"10_dog/a.txt": "one\n", "10_dog/b.txt": "two\n\nmore", "10_dog/c.txt": "three\nmore"})
    listing = scan(tmp_path, hash_all=True)
    detail = "2 caption files are longer than the first line, which is used, the first is 10_dog/b.txt"
    notes = [(note.name, note.reason, note.count, note.detail) for note in listing.notes]
    assert notes == [("10_dog/b.txt", "caption-lines", 2, detail)]
    again = scan(tmp_path, known=listing.samples)
    assert again.notes == listing.notes
    for lines in ("first", "all"):
        assert scan(tmp_path, SourceOptions(caption_lines=lines)).notes == ()


def test_folders_of_images_and_of_regularization_images(tmp_path):
    put(tmp_path, {"img/5_cat/a.jpg": "x", "reg/2_a cat/b.jpg": "x", "log/x.txt": "log", "img/5_cat/deep/c.jpg": "x"})
    listing = scan(tmp_path)
    assert rows(listing) == [("img/5_cat/a.jpg", "cat", 5), ("reg/2_a cat/b.jpg", "a cat", 5)]
    assert [image_set.is_reg for image_set in listing.layout.sets] == [False, True]
    assert notes(listing) == [("img/5_cat/deep/c.jpg", "outside-sets"), ("log/x.txt", "caption-unused")]


def reference_repeats(train: int, repeats: list[int]) -> list[int]:
    """Compute repeats of regularization images as the trainer does: one after another until they suffice."""
    served = [0] * len(repeats)
    while sum(served) < train:
        for number, first in enumerate(repeats):
            served[number] += 1 if served[number] else first
            if sum(served) >= train:
                break
    return served


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=3))
def test_regularization_images_are_as_many_as_training_images(train, reg):
    sets = [ImageSet(folder="", balance="x", repeats=train)]
    sets += [ImageSet(folder="", balance="x", repeats=repeats, is_reg=True) for _, repeats in reg]
    listing = balanced(sets, [1, *(count for count, _ in reg)])
    numbers = [n for at, (count, _) in enumerate(reg, 1) if count for n in listing[at].tolist()]
    assert numbers == (
        reference_repeats(train, repeats) if (repeats := [n for count, n in reg for _ in range(count)]) else []
    )


def test_regularization_images_that_the_trainer_leaves_out(tmp_path):
    put(tmp_path, {"img/2_cat/a.jpg": "x", **{f"reg/1_a cat/{name}.jpg": "x" for name in "abcd"}})
    listing = scan(tmp_path)
    assert [(name, count) for name, _, count in rows(listing)] == [
        ("img/2_cat/a.jpg", 2), ("reg/1_a cat/a.jpg", 1), ("reg/1_a cat/b.jpg", 1),
    ]  # fmt: skip
    assert [(note.name, note.reason, note.count) for note in listing.notes] == [
        ("reg/1_a cat/c.jpg", "reg-unused", 2)
    ]
    parts = [scan(tmp_path, SourceOptions(part=Part(index=number, of=2))) for number in range(2)]
    both = [row for part in parts for row in rows(part)] if all(len(part.samples) for part in parts) else []
    assert sorted(both) == rows(listing)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("other/b.jpg", "1 image in other/ would be left out"),
        ("b.jpg", "1 image is in no such folder"),
        ("2024_trip/b.jpg", "2024 is hardly a number of repeats"),
        ("001_b/b.jpg", "001 is hardly a number of repeats"),
    ],
)
def test_ambiguous_folder_names(tmp_path, name, why):
    put(tmp_path, {"10_cat/a.jpg": "x", name: "x"})
    with pytest.raises(SourceAmbiguousError) as caught:
        scan(tmp_path)
    assert caught.value.what == f"DATA can be read as kohya or folder: {tmp_path}"
    assert caught.value.why.endswith(f"folder: {why}")
    assert caught.value.fix == "add --layout=kohya or --layout=folder"
    assert str(caught.value).endswith("fix: add layout='kohya' or layout='folder'")
    plain = scan(tmp_path, SourceOptions(layout="folder"))
    assert sorted(plain.samples.names) == sorted(["10_cat/a.jpg", name])
    assert "repeats" not in plain.samples.columns
    assert "10_cat/a.jpg" in scan(tmp_path, SourceOptions(layout="kohya")).samples.names
