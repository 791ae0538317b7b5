from pathlib import Path

import pytest

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.pipeline.settings import BuildSettings
from latentcache.sources.options import SourceOptions


@pytest.mark.parametrize(
    ("arguments", "option"),
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
def test_invalid_values_are_rejected_by_option(arguments, option):
    with pytest.raises(UsageError) as caught:
        BuildSettings(data=Path("x"), **arguments)
    assert str(caught.value).startswith(option)
    assert caught.value.fix


def test_settings_of_a_field_may_be_a_mapping():
    latents = BuildSettings(data=Path("x"), fields={"latents": {"model": "stub", "resolutions": (64,)}}).fields[
        "latents"
    ]
    assert repr(latents) == "LatentsSettings(model='stub', resolutions=(64,))"
    images = BuildSettings(data="x", fields={"latents": {"buckets": ["64x96", (32, 48)]}}, source={"masks": "none"})
    assert images.fields["latents"].buckets == (Size(64, 96), Size(32, 48))
    assert (images.data, images.source) == (Path("x"), SourceOptions(masks="none"))


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        ({"data": 3}, "data=3: must be Path", "leave data out"),
        ({"strict": "yes"}, "strict='yes': must be bool", "leave strict"),
        ({"workers": True}, "workers=True: must be int", "leave workers"),
        ({"fields": ["latents"]}, "fields=['latents']: must be dict", "leave "),
        ({"fields": {"latents": 3}}, "fields={'latents': 3}: must be dict", "fields={'latents': {}}"),
        ({"source": "folder"}, "source='folder': must be dict", "leave "),
        ({"source": {"layout": 3}}, "source={'layout': 3}: layout=3: must be str", "leave source"),
        ({"source": {"layuot": "folder"}}, "source={'layuot': 'folder'}: layuot='folder': unknown", "leave source"),
        ({"source": {"caption_lines": "x"}}, "caption_lines='x': unknown", "caption_lines='first'|'all'"),
        ({"modell": "stub"}, "modell='stub': unknown; known are model, ", "leave modell out"),
        ({"resolutions": 64}, "resolutions=64: must be list[int | dict]", "leave resolutions out, or give PIXELS"),
        ({"resolutions": ["64"]}, "resolutions=['64']: must be int", "leave resolutions"),
        ({"buckets": ["64"]}, "buckets='64': not a size", "buckets=['64x64']"),
        ({"buckets": 64}, "buckets=64: must be list", "leave buckets"),
        ({"latents": 3}, "latents=3: must be str", "leave latents"),
        ({"flip": 1}, "flip=1: must be bool", "leave flip"),
        ({"crop": "left"}, "crop='left': not a known value", "leave crop out, or give center or top or"),
        ({"crop_variants": 129}, "crop_variants=129: must be 1 to 128", "leave crop_variants out"),
        ({"fps": 0}, "fps=0: must be 1 or more", "leave fps out"),
    ],
)  # fmt: skip
def test_types_and_values_are_checked_and_named_in_python(arguments, what, fix):
    of_build = arguments.keys() <= {"data", "strict", "workers", "fields", "source"}
    with pytest.raises(UsageError) as caught:
        BuildSettings(**{"data": "x", **(arguments if of_build else {"fields": {"latents": arguments}})})
    assert caught.value.what_python.startswith(what)
    assert str(caught.value).partition("fix: ")[2].startswith(fix)
