import codecs
import json

import pytest

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import content_hash
from latentcache.sources.captions import read_caption
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import scan


def rejection_of(root):
    with pytest.raises(UnusableSampleError) as caught:
        read_caption(str(root), "a.txt")
    assert caught.value.fix
    return caught.value.slug, caught.value.what


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
    (tmp_path / "a.txt").write_bytes(data)
    listing, content, memo = read_caption(str(tmp_path), "a.txt")
    assert (listing, content, memo is None) == (text, content_hash(data), not data)


@pytest.mark.parametrize(
    ("data", "cause", "message"),
    [
        (b"caf\xe9 au lait", "caption-encoding", "expected UTF-8, found byte 0xe9 at offset 3"),
        (b"\xef\xbb\xbfab\xff", "caption-encoding", "expected UTF-8, found byte 0xff at offset 5"),
        (b"\xff\xfea\0b", "caption-encoding", "expected UTF-16, found byte 0x62 at offset 4"),
        (b"a\0b", "caption-unicode", "a NUL at character 1"),
        (b"ab\xed\xa0\x80", "caption-encoding", "expected UTF-8, found byte 0xed at offset 2"),
    ],
)
def test_undecodable_captions_are_rejected_with_the_offset(tmp_path, data, cause, message):
    (tmp_path / "a.txt").write_bytes(data)
    assert rejection_of(tmp_path) == (cause, f"caption file a.txt: {message}")


@pytest.mark.parametrize(
    ("lines", "text", "expected"),
    [
        ("", "one\ntwo\n", "one\ntwo"),
        ("first", "one \ntwo", "one"),
        ("all", "one\n\n two \n", "one\0two"),
        ("", ["one", " two"], "one\0two"),
        ("first", ["one\nmore", "two"], "one"),
        ("all", ["one\nmore", "two"], "one\nmore\0two"),
    ],
)
def test_lines_and_lists_are_several_captions(tmp_path, lines, text, expected):
    name = "a.json" if isinstance(text, list) else "a.txt"
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / name).write_text(json.dumps({"caption": text}) if isinstance(text, list) else text)
    listing = scan(tmp_path, SourceOptions(caption_lines=lines, caption_prefix="<"))
    assert list(listing.samples.inputs["caption"].text) == ["\0".join("<" + item for item in expected.split("\0"))]
    again = scan(tmp_path, SourceOptions(caption_lines=lines), listing.samples)
    assert list(again.samples.inputs["caption"].text) == [expected]


def test_lists_in_tables_are_several_captions(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "b.jpg").write_bytes(b"x")
    rows = [{"file_name": "a.jpg", "text": ["one", "two"]}, {"file_name": "b.jpg", "text": ["one", 2]}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    listing = scan(tmp_path)
    assert list(listing.samples.inputs["caption"].text) == ["one\0two"]
    assert [(item.name, item.reason) for item in listing.rejected] == [("b.jpg", "table-row")]
    first = scan(tmp_path, SourceOptions(caption_lines="first"))
    assert list(first.samples.inputs["caption"].text) == ["one"]
