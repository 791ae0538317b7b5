import errno
import signal

import pytest
import typer

from latentcache.cli.failures import Signalled, as_known
from latentcache.errors import EmptyPlanError, UsageError


def test_an_error_of_ours_stays_as_it_is():
    error = EmptyPlanError("nothing")
    assert as_known(error) is error


@pytest.mark.parametrize(
    ("error", "exit_code", "slug"),
    [
        (typer.BadParameter("no"), 2, UsageError.slug),
        (Signalled(signal.SIGTERM), 143, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (typer.Abort(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "full"), 3, "disk-full"),
        (OSError(errno.EACCES, "no", "file"), 3, "system"),
        (MemoryError(), 3, "memory"),
        (ZeroDivisionError("x"), 70, "bug"),
    ],
)
def test_every_error_has_a_status_and_words(error, exit_code, slug):
    known = as_known(error)
    assert (known.exit_code, known.slug) == (exit_code, slug)
    assert known.what
    assert known.fix


def test_what_is_no_build_does_not_say_that_it_goes_on():
    assert as_known(Signalled(signal.SIGTERM)).fix == "run the same command again"


def test_a_bug_says_where():
    with pytest.raises(KeyError) as caught:
        raise KeyError("x")
    assert __file__ in as_known(caught.value).where
