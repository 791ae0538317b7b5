from pathlib import Path

import pytest

from latentcache.errors import UsageError
from latentcache.pipeline.settings import BuildSettings


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": "cpu*0"}, "device"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"decode_threads": 0}, "decode_threads"),
        ({"host_memory": 0}, "host_memory"),
        ({"max_pixels": -1}, "max_pixels"),
        ({"commit_every": 0}, "commit_every"),
        ({"workers": -1}, "workers=-1"),
        ({"allow_failed": "all"}, "allow_failed='all'"),
        ({"allow_failed": "101%"}, "allow_failed"),
        ({"allow_failed": "1.5"}, "allow_failed"),
        ({"part": "4/4"}, "part='4/4'"),
        ({"part": "1/0"}, "part"),
        ({"part": "one"}, "part"),
    ],
)
def test_values_that_cannot_be_are_refused_by_their_option(given, option):
    with pytest.raises(UsageError) as caught:
        BuildSettings(data=Path("x"), **given)
    assert caught.value.what.startswith(option)
    assert caught.value.fix


def test_settings_of_a_field_may_be_a_mapping():
    said = BuildSettings(data=Path("x"), fields={"latents": {"model": "stub", "resolutions": (64,)}}).fields[
        "latents"
    ]
    assert (said.model, said.resolutions, said.flip) == ("stub", (64,), None)
    with pytest.raises(UsageError, match="modell"):
        BuildSettings(data=Path("x"), fields={"latents": {"modell": "stub"}})
