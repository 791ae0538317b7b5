import pytest
from small_builds import piece, recipe_of

from latentcache.errors import UnusableSampleError
from latentcache.identity.stat import StatMemo
from latentcache.pipeline.work import Progress, refuse, refused_by
from latentcache.sources.causes import HINTS
from latentcache.sources.sample import Sample

MEMO = StatMemo(size=1, mtime_ns=2, ctime_ns=3, inode=4, device=5)
SAMPLE = Sample(name="a/b.jpg", caption="", stat=MEMO)


@pytest.mark.parametrize("cause", ["truncated", "non-finite", "out-of-memory", "storage-overflow"])
def test_a_refusal_has_the_hint_of_its_cause(cause):
    item = refuse(SAMPLE, cause, "the numbers", stat=MEMO, content=b"c" * 16)
    assert (item.name, item.cause, item.detail, item.hint) == ("a/b.jpg", cause, "the numbers", HINTS[cause])
    assert (item.stat, item.content) == (MEMO, b"c" * 16)


def test_a_hint_that_is_given_wins():
    assert refuse(SAMPLE, "truncated", hint="do this").hint == "do this"


def test_an_error_becomes_a_refusal_with_its_words():
    error = UnusableSampleError("it has 0 bytes", slug="empty", fix="get it again")
    item = refused_by(SAMPLE, error, stat=MEMO)
    assert (item.cause, item.detail, item.hint, item.stat) == ("empty", "it has 0 bytes", "get it again", MEMO)


def test_a_listed_file_that_is_not_found_has_vanished():
    item = refused_by(SAMPLE, UnusableSampleError("it cannot be read", slug="not-found", fix="put the file there"))
    assert (item.cause, item.hint) == ("vanished", HINTS["vanished"])


def test_a_piece_has_the_pixels_of_its_bucket():
    one = piece(1, recipe_of(), height=64, width=96)
    assert one.pixels.shape == (one.placement.bucket.height, one.placement.bucket.width, 3)


def test_progress_begins_with_nothing():
    progress = Progress(total=3)
    assert (progress.looked, progress.encoded, progress.cached, progress.quarantined) == (0, 0, 0, 0)
