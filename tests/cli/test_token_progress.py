import pytest

from latentcache.cli import token_progress
from latentcache.cli.token_progress import TokenTalk
from latentcache.pipeline.token_report import TokenProgress


@pytest.fixture
def progress():
    return TokenProgress(
        total=10, done=5, characters=4000, characters_total=8000, tokens=1000, refused=1, committed=4
    )


def test_a_line_says_rates_and_what_is_left(progress):
    found = token_progress._line(progress, 2.0)
    assert found == "0:02 left, 2 documents/s, 2.0 kB/s, 500 tokens/s, 1 refused"
    assert token_progress._line(TokenProgress(total=3), 1.0).startswith("-:-- left")


def test_lines_come_now_and_then(progress, capsys, monkeypatch):
    talk = TokenTalk(quiet=False)
    talk.advanced(progress)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("latentcache.cli.progress._LINE_S", 0.0)
    talk.advanced(progress)
    assert capsys.readouterr().err.startswith("5/10 ")
    quiet = TokenTalk(quiet=True)
    quiet.advanced(progress)
    quiet.warned("look")
    assert capsys.readouterr().err == "warning: look\n"
    assert quiet.progress is progress


def test_a_terminal_gets_a_bar(progress, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("latentcache.cli.progress._BAR_S", 0.0)
    talk = TokenTalk(quiet=False)
    talk.advanced(progress)
    talk.close()
    talk.close()
