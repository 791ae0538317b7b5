import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.sources.sample import SampleColumns
from latentcache.store.columns import StringColumn
from latentcache.verify import abreast as module
from latentcache.verify.abreast import abreast

NAMES = st.sets(st.binary(min_size=1, max_size=2).filter(lambda raw: b"\0" not in raw).map(os.fsdecode), max_size=30)


def columns(names):
    stats = np.arange(5 * len(names), dtype=np.uint64).reshape(-1, 5)
    return SampleColumns(names, [""] * len(names), stats)


def in_order(names):
    return sorted(names, key=os.fsencode)


@given(NAMES, NAMES, st.lists(st.integers(1, 7)))
def test_every_sample_and_every_file_is_met_once(mine, theirs, sizes):
    mine, left = in_order(mine), in_order(theirs)
    several = []
    for size in sizes:
        several.append(columns(left[:size]))
        left = left[size:]
    several.append(columns(left))
    there, absent, fresh, numbers = {}, [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE", 3)
        for stretch in abreast(StringColumn.of(mine), several):
            own = range(stretch.samples.start, stretch.samples.stop)
            numbers += own
            for number, place in zip(own, stretch.place.tolist(), strict=True):
                if place < 0:
                    absent.append(mine[number])
                else:
                    there[mine[number]] = stretch.found.names[place]
            fresh += [stretch.found.names[position] for position in stretch.fresh]
    assert numbers == list(range(len(mine)))
    assert there == {name: name for name in mine if name in theirs}
    assert absent == [name for name in mine if name not in theirs]
    assert fresh == [name for name in in_order(theirs) if name not in mine]


def test_the_same_names_are_not_looked_up(monkeypatch):
    monkeypatch.setattr(module, "_looked_up", lambda names, samples, found: iter(()))
    names = [f"{number:04d}" for number in range(90)]
    stretches = list(abreast(StringColumn.of(names), [columns(names[:40]), columns(names[40:])]))
    assert [(s.samples, len(s.place)) for s in stretches] == [(slice(0, 40), 40), (slice(40, 90), 50)]
