"""Captions beside pictures: which file counts, how it is decoded, what is refused."""

import codecs
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UnusableSampleError
from latentcache.sources.captions import caption_fault, decode_caption, read_caption, sidecars
from latentcache.sources.walk import walk_pictures

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\ufeff"))


def caption_of(root, picture):
    walk = walk_pictures(root)
    return read_caption(sidecars(picture, walk), walk)


def refusal_of(root, picture="a.jpg"):
    with pytest.raises(UnusableSampleError) as caught:
        caption_of(root, picture)
    assert caught.value.fix
    return caught.value.slug, caught.value.what


def test_txt_comes_before_caption_and_none_is_empty(tmp_path):
    for name in ("sub/a.jpg", "sub/b.jpg", "sub/c.jpg", "a.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "sub/a.txt").write_text("first")
    (tmp_path / "sub/a.caption").write_text("first \n")
    (tmp_path / "sub/b.CAPTION").write_text("second")
    (tmp_path / "sub/c.jpg.txt").write_text("not a caption")
    assert caption_of(tmp_path, "sub/a.jpg").text == "first"
    assert caption_of(tmp_path, "sub/a.jpg").note is None
    assert caption_of(tmp_path, "sub/b.jpg").text == "second"
    assert caption_of(tmp_path, "sub/c.jpg").text == ""
    assert caption_of(tmp_path, "a.jpg").text == ""


def test_two_caption_files_that_differ_are_noted(tmp_path):
    (tmp_path / "a.jpg").touch()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.caption").write_text("two")
    caption = caption_of(tmp_path, "a.jpg")
    assert caption.text == "one"
    assert (caption.note.name, caption.note.cause) == ("a.caption", "caption-conflict")
    assert caption.note.detail == "a.txt is used; a.caption says something else"
    (tmp_path / "a.caption").write_bytes(b"\xff")
    assert caption_of(tmp_path, "a.jpg").note.detail == "a.txt is used; a.caption cannot be read"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a cat\n", "a cat"),
        (b"\xef\xbb\xbfa cat", "a cat"),
        (b" \r\n a\r\nb\n\nc \r\n\r\n", "a\nb\n\nc"),
        ("é 猫 \U0001f431".encode(), "é 猫 \U0001f431"),
        (codecs.BOM_UTF16_LE + "é猫\r\nb".encode("utf-16-le"), "é猫\nb"),
        (codecs.BOM_UTF16_BE + "é\U0001f431".encode("utf-16-be"), "é\U0001f431"),
        (b"", ""),
        (b"\xef\xbb\xbf", ""),
        (codecs.BOM_UTF16_LE, ""),
        (b" \n", ""),
    ],
)
def test_decoding(tmp_path, data, text):
    (tmp_path / "a.jpg").touch()
    (tmp_path / "a.txt").write_bytes(data)
    assert caption_of(tmp_path, "a.jpg").text == text


@pytest.mark.parametrize(
    ("data", "cause", "what"),
    [
        (b"caf\xe9 au lait", "caption-encoding", "expected UTF-8, found byte 0xe9 at offset 3"),
        (b"\xef\xbb\xbfab\xff", "caption-encoding", "expected UTF-8, found byte 0xff at offset 5"),
        (b"\xff\xfea\0b", "caption-encoding", "expected UTF-16, found byte 0x62 at offset 4"),
        (b"a\0b", "caption-unicode", "a NUL at character 1"),
        (b"ab\xed\xa0\x80", "caption-unicode", "half a surrogate pair (U+D800) at character 2"),
        (b"\xff\xfe\x00\xd8a\0", "caption-unicode", "half a surrogate pair (U+D800) at character 0"),
    ],
)
def test_what_cannot_be_decoded_is_refused_with_its_place(tmp_path, data, cause, what):
    (tmp_path / "a.jpg").touch()
    (tmp_path / "a.txt").write_bytes(data)
    assert refusal_of(tmp_path) == (cause, f"caption file a.txt: {what}")


def test_a_caption_has_a_largest_size(tmp_path):
    (tmp_path / "a.jpg").touch()
    (tmp_path / "a.txt").write_bytes(b"x" * (1 << 20))
    assert len(caption_of(tmp_path, "a.jpg").text) == 1 << 20
    (tmp_path / "a.txt").write_bytes(b"x" * ((1 << 20) + 1))
    what = "caption file a.txt: it has 1048577 bytes, at most 1048576 are read"
    assert refusal_of(tmp_path) == ("caption-too-large", what)


def test_a_caption_that_is_no_file_of_the_folder_is_refused(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for name in "abcd":
        (root / f"{name}.jpg").touch()
    (tmp_path / "secret").write_text("secret")
    (root / "a.txt").symlink_to(tmp_path / "secret")
    os.mkfifo(root / "b.txt")
    (root / "c.txt").symlink_to("nowhere")
    (root / "d.txt").symlink_to("shared.txt")
    (root / "shared.txt").write_text("shared")
    outside = "caption file a.txt: it is a link to a place outside the data folder"
    assert refusal_of(root, "a.jpg") == ("outside-root", outside)
    assert refusal_of(root, "b.jpg")[0] == "not-regular"
    assert refusal_of(root, "c.jpg")[0] == "not-found"
    assert caption_of(root, "d.jpg").text == "shared"


@given(TEXTS, st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
def test_any_text_comes_back_in_every_encoding(text, encoding):
    assert decode_caption(text.encode(encoding), "a.txt") == text.strip().replace("\r\n", "\n")


@given(st.binary(max_size=40))
def test_any_bytes_are_a_caption_or_refused(data):
    try:
        outcome = caption_fault(decode_caption(data, "a.txt"))
    except UnusableSampleError as error:
        outcome = error.slug
    assert outcome in {"", "caption-encoding", "caption-unicode"}
