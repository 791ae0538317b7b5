import os
import sys
import threading

import pytest
from PIL import Image
from small_builds import RECIPE, draw, folder_of, recipe_of, within

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.pipeline import decoding as decoding_module
from latentcache.pipeline.budget import ByteBudget
from latentcache.pipeline.decoding import DecodePool, Decoder, bytes_per_pixel, raise_outcome
from latentcache.pipeline.ledger import Claims
from latentcache.pipeline.resize import pixel_hash
from latentcache.pipeline.scratch import Scratch
from latentcache.pipeline.survey import Memory, survey
from latentcache.pipeline.work import Failed, Looked
from latentcache.sources.resolve import scan
from latentcache.store.catalog import Catalog

EMPTY = Catalog([])


class Alone:
    """The ledger of a build that has nobody else."""

    def __init__(self):
        self.claims = Claims(lambda key: False)
        self.waiting = set()

    def take(self, seen, keys):
        return list(filter(self.claims.take, keys))

    def fates(self, index, pixels):
        return ["wait" if found in self.waiting else "encode" for found in pixels]


def decoder_for(data, *, recipe=None, limit=1 << 30, max_pixels=10**8):
    recipe = recipe or recipe_of()
    return Decoder(
        root=data,
        recipe=recipe,
        tables=recipe.geometry.tables(),
        max_pixels=max_pixels,
        ledger=Alone(),
        budget=ByteBudget(limit),
    )


def planned_in(data, recipe=None):
    return survey(scan(data), recipe or recipe_of(), EMPTY, Memory({}, {}), max_pixels=10**8).todo


def outcomes_of(decoder, todo, num_threads=2):
    """What a pool says of a plan; pieces are released as the device loop would."""
    pool, found = DecodePool(decoder=decoder, num_threads=num_threads), []
    pool.start(todo)
    for _ in todo:
        outcome = within(10, lambda: raise_outcome(pool.outcomes.get()))
        found.append(outcome)
        if isinstance(outcome, Looked):
            decoder.budget.release(sum(piece.pixels.nbytes for piece in outcome.pieces))
    pool.stop()
    return sorted(found, key=lambda outcome: outcome.index)


def test_the_key_is_made_from_the_bytes_that_were_decoded(tmp_path):
    draw(tmp_path / "a.png", 1, height=80, width=70)
    (planned,) = planned_in(tmp_path)
    draw(tmp_path / "a.png", 2, height=200, width=100)  # edited since it was planned
    looked = decoder_for(tmp_path).look(planned)
    data = (tmp_path / "a.png").read_bytes()
    assert (looked.content, looked.size) == (content_hash(data), Size(200, 100))
    assert looked.memo.size == len(data)
    (piece,) = looked.pieces
    assert piece.content == looked.content
    assert piece.pixels.shape == (piece.placement.bucket.height, piece.placement.bucket.width, 3)


def test_a_file_that_is_gone_since_the_scan_has_vanished(tmp_path):
    draw(tmp_path / "a.png", 1)
    (planned,) = planned_in(tmp_path)
    (tmp_path / "a.png").unlink()
    failed = decoder_for(tmp_path).look(planned)
    assert isinstance(failed, Failed)
    assert failed.refusal.cause == "vanished"
    assert "run again" in failed.refusal.hint


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda data: data[:-400], "truncated"),
        (lambda data: b"", "empty"),
        (lambda data: b"<!doctype html><html>not found</html>", "html"),
    ],
)
def test_what_became_of_a_file_is_a_refusal_with_its_cause_and_hint(tmp_path, change, cause):
    path = draw(tmp_path / "a.jpg", 1)
    (planned,) = planned_in(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    failed = decoder_for(tmp_path).look(planned)
    assert failed.refusal.cause == cause
    assert failed.refusal.hint
    assert failed.refusal.content == (content_hash(path.read_bytes()) if path.stat().st_size else b"")


def test_a_picture_that_shrank_below_use_is_refused_with_the_hint_of_its_cause(tmp_path):
    path = draw(tmp_path / "a.png", 1)
    (planned,) = planned_in(tmp_path)
    draw(path, 1, height=8, width=8)
    refusal = decoder_for(tmp_path).look(planned).refusal
    assert (refusal.cause, refusal.hint) == ("too-small", "use a larger picture, or remove it")


def test_a_picture_that_memory_does_not_hold_is_refused(tmp_path, monkeypatch):
    draw(tmp_path / "a.png", 1)
    (planned,) = planned_in(tmp_path)

    def no_memory(*args, **options):
        raise MemoryError

    monkeypatch.setattr(decoding_module, "decode", no_memory)
    refusal = decoder_for(tmp_path).look(planned).refusal
    assert refusal.cause == "out-of-memory"
    assert refusal.content


def test_one_key_is_made_once_whoever_asks(tmp_path):
    draw(tmp_path / "a.png", 1)
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    decoder = decoder_for(tmp_path)
    first, second = (decoder.look(planned) for planned in planned_in(tmp_path))
    assert len(first.pieces) == 1
    assert second.pieces == ()
    assert first.content == second.content


def test_pieces_keep_their_pixels_when_the_next_picture_is_decoded(tmp_path):
    """Pictures of a bucket's size are not resampled, so a piece could be the very memory they were decoded into."""
    for number in range(4):
        draw(tmp_path / f"{number}.jpg", number, height=64, width=64)
    todo, decoder, scratch = planned_in(tmp_path), decoder_for(tmp_path), Scratch(1 << 20)
    pieces = [piece for planned in todo for piece in decoder.look(planned, scratch).pieces]
    assert len(scratch.memory(1)) == 64 * 64 * 3
    assert len({piece.pixel_hash for piece in pieces}) == 4
    assert [pixel_hash(piece.pixels) for piece in pieces] == [piece.pixel_hash for piece in pieces]


def test_committed_keys_need_no_work():
    claims = Claims(lambda key: key == b"old")
    assert [claims.take(key) for key in (b"old", b"new", b"new", b"other")] == [False, True, False, True]


def test_a_picture_is_cut_once_for_every_resolution(tmp_path):
    draw(tmp_path / "a.png", 1, height=200, width=200)
    recipe = recipe_of(resolutions=(64, 128))
    (planned,) = planned_in(tmp_path, recipe)
    looked = decoder_for(tmp_path, recipe=recipe).look(planned)
    assert [piece.pixels.shape[:2] for piece in looked.pieces] == [(64, 64), (128, 128)]


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("limit", [1, 10_000, 1 << 30])
def test_any_threads_and_any_budget_give_the_same_outcomes(tmp_path, num_threads, limit):
    folder_of(tmp_path, 12)
    todo = planned_in(tmp_path)
    decoder = decoder_for(tmp_path, limit=limit)
    outcomes = outcomes_of(decoder, todo, num_threads)
    assert [outcome.index for outcome in outcomes] == list(range(12))
    contents = [content_hash((tmp_path / f"{n:03}.png").read_bytes()) for n in range(12)]
    assert [outcome.content for outcome in outcomes] == contents
    assert decoder.budget._held == 0


def test_an_unexpected_exception_in_a_thread_reaches_whoever_waits(tmp_path, monkeypatch):
    folder_of(tmp_path, 3)

    def broken(*args, **options):
        raise ZeroDivisionError("a fault of our own")

    monkeypatch.setattr(decoding_module, "content_hash", broken)
    with pytest.raises(RuntimeError, match="decode thread") as caught:
        outcomes_of(decoder_for(tmp_path), planned_in(tmp_path))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_of_ours_in_a_thread_keeps_its_words():
    with pytest.raises(UsageError, match="that cannot be"):
        raise_outcome(UsageError("that cannot be"))


def test_stopping_wakes_threads_that_wait_for_memory(tmp_path):
    folder_of(tmp_path, 6)
    pool = DecodePool(decoder=decoder_for(tmp_path, limit=1), num_threads=3)
    pool.start(planned_in(tmp_path))
    within(10, pool.outcomes.get)  # nobody releases its pixels, so the others wait
    within(5, pool.stop)
    assert not any(thread.is_alive() for thread in pool._threads)


def test_stopping_does_not_wait_for_ever_for_a_decoder(tmp_path, monkeypatch):
    folder_of(tmp_path, 1)
    monkeypatch.setattr(decoding_module, "_LAST_S", 0.05)
    monkeypatch.setattr(decoding_module, "read_source", lambda path: within(1, lambda: __import__("time").sleep(0.5)))
    pool = DecodePool(decoder=decoder_for(tmp_path), num_threads=1)
    pool.start(planned_in(tmp_path))
    within(0.4, pool.stop)


def test_the_settings_of_these_tests_ask_for_the_stub():
    assert RECIPE.model == "stub"


@pytest.mark.parametrize(
    ("form", "each"), [("JPEG", 12), ("PNG", 17), ("WEBP", 25), ("AVIF", 25), ("TIFF", 17), ("GIF", 17)]
)
def test_memory_is_taken_by_what_the_file_is_not_by_its_name(tmp_path, form, each):
    path = tmp_path / "lies.jpg"
    Image.new("RGB", (64, 64)).save(path, format=form)
    assert bytes_per_pixel(path.read_bytes()[:12]) == each


@pytest.mark.skipif(sys.platform != "linux", reason="priorities belong to processes there")
def test_decode_threads_give_way_and_the_others_do_not():
    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def changed():
        decoding_module.give_way()
        return priority()

    before = priority()
    assert within(5, changed) == min(before + 10, 19)
    assert priority() == before
