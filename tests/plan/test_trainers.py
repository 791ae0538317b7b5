"""Steps of other trainers, and suggestions for them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from latentcache.geometry.like.kohya import KohyaTable, KohyaTrainer
from latentcache.geometry.like.onetrainer import OneTrainer, OneTrainerTable
from latentcache.geometry.like.simpletuner import SimpleTuner, SimpleTunerTable
from latentcache.geometry.sizes import Size
from latentcache.plan.trainers import TrainerRun

sizes = st.dictionaries(
    st.tuples(st.just(1), st.builds(Size, st.integers(200, 1500), st.integers(200, 1500))),
    st.integers(1, 9),
    min_size=1,
)
TRAINER = KohyaTrainer()
TABLES = (KohyaTable(resolution=Size(512, 512)),)


@given(sizes=sizes, batch=st.integers(1, 8), ranks=st.integers(1, 4), accum=st.integers(1, 3))
def test_every_image_is_in_a_batch(sizes, batch, ranks, accum):
    plan = TrainerRun(trainer=TRAINER, tables=TABLES, upscale=True, batch=batch, ranks=ranks, accum=accum).plan(
        [sizes]
    )
    total = sum(sizes.values())
    assert sum(bucket.samples for bucket in plan.buckets) == total
    assert plan.batches * batch - plan.short == total
    assert plan.steps == -(-plan.batches // (ranks * accum))
    assert 0 <= plan.cropped < 1


@given(sizes=sizes, batch=st.integers(2, 8))
def test_a_suggestion_loses_less(sizes, batch):
    run = TrainerRun(trainer=TRAINER, tables=TABLES, upscale=True, batch=batch)
    now, suggestion = run.plan([sizes]), run.suggestion([sizes])
    if suggestion is not None:
        change, plan = suggestion
        size = int(change.rpartition(" ")[2]) if change.startswith("train_batch_size") else batch
        assert plan.short / (plan.batches * size) + plan.cropped < now.short / (now.batches * batch) + now.cropped


def test_an_image_smaller_than_a_step_is_counted():
    plan = TrainerRun(trainer=TRAINER, tables=TABLES, upscale=False, batch=2).plan(
        [Counter({(1, Size(40, 500)): 3, (1, Size(600, 600)): 1})]
    )
    assert (plan.unused, plan.batches, plan.short) == (3, 1, 1)


@given(sizes=sizes, batch=st.integers(1, 8), ranks=st.integers(1, 4), accum=st.integers(1, 3))
def test_onetrainer_drops_what_fills_no_batch_on_every_rank(sizes, batch, ranks, accum):
    tables = (OneTrainerTable(resolution=Size(512, 512)),)
    run = TrainerRun(trainer=OneTrainer(), tables=tables, upscale=True, batch=batch, ranks=ranks, accum=accum)
    plan = run.plan([sizes])
    assert plan.batches * batch + plan.dropped == sum(sizes.values())
    assert all(bucket.dropped < batch * ranks for bucket in plan.buckets)
    assert plan.steps == plan.batches // ranks // accum
    assert plan.short == 0


def test_a_bucket_that_stops_the_trainer_is_counted_and_the_suggestion_mends_it():
    tables = (SimpleTunerTable(resolution=Size(512, 512)),)
    run = TrainerRun(trainer=SimpleTuner(), tables=tables, upscale=True, batch=4, accum=2)
    sizes = Counter({(1, Size(512, 512)): 9, (1, Size(512, 1024)): 5})
    assert (run.plan([sizes]).too_small, run.plan([sizes]).batches) == (1, 5)
    assert run.suggestion([sizes])[1].too_small == 0


def test_a_step_larger_than_the_shortest_side_is_not_suggested():
    tables = (KohyaTable(resolution=Size(256, 256), min_side=128),)
    run = TrainerRun(trainer=TRAINER, tables=tables, upscale=True, batch=2)
    change, _ = run.suggestion([{(1, Size(300, 200)): 3, (1, Size(200, 300)): 1}]) or ("", None)
    assert change != "bucket_reso_steps = 256"


def test_sets_that_fill_no_batch_together_are_counted_apart():
    tables = (SimpleTunerTable(resolution=Size(512, 512)),)
    run = TrainerRun(trainer=SimpleTuner(), tables=tables, upscale=True, batch=4)
    sets = [{(1, Size(512, 512)): 6}, {(1, Size(512, 512)): 6}]
    assert (run.plan(sets).batches, run.plan([{(1, Size(512, 512)): 12}]).batches) == (4, 3)
