import re
from pathlib import Path

import pytest

import latentcache
from latentcache.sources.causes import CAUSES, HINTS, sniff_cause


def test_every_word_has_one_cause_with_a_fix():
    assert 25 < len(CAUSES) < 35
    assert all(10 < len(cause.fix) < 160 and cause.words for cause in CAUSES)
    assert len(HINTS) == sum(len(cause.words) for cause in CAUSES)


def test_every_cause_word_in_the_code_of_the_folder_is_in_the_table():
    folder = Path(latentcache.__file__).parent / "sources"
    calls = re.compile(r'(?:rejected\([\w.+" /]+, |unusable\(|_unusable\(|fault\()"([a-z0-9-]+)"')
    found = {word for path in folder.glob("*.py") for word in calls.findall(path.read_text())}
    assert len(found) > 10
    assert found <= set(HINTS)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "empty"),
        (b"\0", "zeros"),
        (b"\n <!DOCTYPE HTML>\n<title>404</title>", "html"),
        (b"\xef\xbb\xbf<html><body>", "html"),
        (b'<?xml version="1.0"?><!DOCTYPE html PUBLIC "x"><html xmlns="x"><svg>', "html"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs"),
        (b'<?xml version="1.0"?>\n<!-- made by hand -->\n<svg xmlns="http://www.w3.org/2000/svg">', "svg"),
        (b"<Error><Code>AccessDenied</Code></Error>", "unknown"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "heic-needs-plugin"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "truncated"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp41", "unknown"),
        (b"\xff\x0a\x00", "jxl-needs-plugin"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "jxl-needs-plugin"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "eps"),
        (b"junk\n%PDF-1.7", "pdf"),
        (b"\xff\xd8\xff\xe0", "truncated"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "truncated"),
        (b"RIFF\0\0\0\0WAVEfmt ", "unknown"),
        (b"hello", "unknown"),
    ],
)
def test_unsupported_files_are_named_by_their_first_bytes(data, cause):
    assert sniff_cause(data) == cause
    assert cause in HINTS
