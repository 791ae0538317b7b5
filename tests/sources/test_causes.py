import re
from pathlib import Path

import latentcache
from latentcache.sources.causes import CAUSES, HINTS


def test_every_word_has_one_cause_with_a_fix():
    assert 25 < len(CAUSES) < 35
    assert all(10 < len(cause.fix) < 160 and cause.words for cause in CAUSES)
    assert len(HINTS) == sum(len(cause.words) for cause in CAUSES)


def test_every_cause_word_in_the_code_of_the_folder_is_in_the_table():
    folder = Path(latentcache.__file__).parent / "sources"
    calls = re.compile(r'(?:rejected\([\w.+" /]+, |unusable\(|_unusable\(|fault\()"([a-z0-9-]+)"')
    words = {word for path in folder.glob("*.py") for word in calls.findall(path.read_text())}
    assert len(words) > 10
    assert words <= set(HINTS)
