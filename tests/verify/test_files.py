import os

from small_cache import draw

from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.verify.files import FileCheck, Question, removed, unusable_now
from latentcache.verify.selection import Deadline


def question(path, number=0):
    memo = StatMemo.of(path.stat(), seen_ns=1 << 62)
    return Question(name=path.name, memo=memo, content=content_hash(path.read_bytes()), number=number)


def test_files_as_they_were_have_nothing_to_be_said(tmp_path):
    asked = [question(draw(tmp_path / f"{number}.png", seed=number), number) for number in range(200)]
    check = FileCheck(root=tmp_path, deadline=Deadline(None))
    assert check.ask(asked) == {}
    assert (check.hashed, check.unasked) == (200, [])


def test_findings_come_under_their_numbers(tmp_path):
    asked = [question(draw(tmp_path / f"{number}.png"), number) for number in range(3)]
    draw(tmp_path / "0.png", seed=9)
    os.utime(tmp_path / "1.png", (1, 1))
    found = FileCheck(root=tmp_path, deadline=Deadline(None)).ask(asked)
    assert {number: finding.category for number, finding in found.items()} == {0: "stale", 1: "touched"}


def test_without_time_nothing_is_read_and_all_is_said(tmp_path):
    asked = [question(draw(tmp_path / f"{number}.png"), number) for number in range(3)]
    check = FileCheck(root=tmp_path, deadline=Deadline(0))
    assert check.ask(asked) == {}
    assert (check.hashed, sorted(check.unasked)) == (0, [0, 1, 2])


def test_other_bytes_are_told_by_their_pixels(tmp_path):
    asked = [question(draw(tmp_path / f"{number}.png"), number) for number in range(3)]
    for number in range(3):
        draw(tmp_path / f"{number}.png", seed=9)
    answers = {0: True, 1: False, 2: None}
    check = FileCheck(root=tmp_path, deadline=Deadline(None), pixels_of=lambda number, data: answers[number])
    found = check.ask(asked)
    assert {finding.reason for finding in found.values()} == {"source-changed"}
    assert "the pixels are the same" in found[0].found
    assert found[0].hint.startswith("a build stores the latents it has")
    assert len(found[1].found) == 32
    assert "needs torch" in found[2].found


def test_causes_become_categories():
    assert removed("a", "gone").reason == "source-removed"
    assert unusable_now("a", "permission", "").category == "unverifiable"
    assert unusable_now("a", "vanished", "").reason == "source-removed"
    assert unusable_now("a", "caption-encoding", "").reason == "caption-changed"
    assert unusable_now("a", "empty", "").reason == "source-changed"
    assert all(unusable_now("a", cause, "why").expected for cause in ("permission", "caption-encoding", "empty"))
