"""Has workers make what a plan asks for, and waits for them.

Decides how the work is cut and how far ahead of its device a worker is kept. Guarantee: the event file and the books
are written by this process alone; a build that was asked to end ends here, with everything committed that its workers
had in hand. Cost: none beside the workers: this computes nothing.
"""

from __future__ import annotations

from pathlib import Path

from latentcache.encoders.describe import ModelDescription
from latentcache.pipeline.announcing import Announcer
from latentcache.pipeline.batch_size import UNTIMED
from latentcache.pipeline.books import Books
from latentcache.pipeline.calibrate import joined_noise
from latentcache.pipeline.events import EventLog
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.pool import Pool
from latentcache.pipeline.report import Observer
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.staff import Reception, Workers
from latentcache.pipeline.survey import Survey
from latentcache.pipeline.units import cut
from latentcache.pipeline.watch import deadline_s
from latentcache.pipeline.work import Progress, RunResult
from latentcache.pipeline.worker import sizes_for
from latentcache.recipe import Recipe
from latentcache.store.catalog import Catalog
from latentcache.store.layout import CacheLayout


def make_entries(
    work: Survey,
    settings: BuildSettings,
    *,
    root: Path,
    layout: CacheLayout,
    recipe: Recipe,
    description: ModelDescription,
    reception: Reception,
    catalog: Catalog,
    followers: Announcer,
    stop: StopSignal,
    observer: Observer,
) -> RunResult:
    """Have everything made that a survey found to do.

    Args:
        work: What is to do.
        settings: Of the build.
        root: The data folder.
        layout: The cache.
        recipe: What is made.
        description: The model.
        reception: May have a worker ready.
        catalog: What is committed.
        followers: Told what samples turned out to be.
        stop: Looked at all the time.
        observer: Told of progress and warnings.

    Raises:
        StoreError: The disk is full or fails; what was committed stays.
        EncoderError: The model cannot be used.
        DeviceError: No device is left that works.
        WorkerError: Workers keep dying, and no picture is to blame.
        InterruptedBuildError: It was asked to end; what was acknowledged is committed.
    """
    progress = Progress(total=len(work.todo))
    workers = Workers(
        settings=settings,
        root=root,
        layout=layout,
        recipe=recipe,
        description=description,
        reception=reception,
        any_twins=bool(len(catalog)),
        todo=work.todo,
    )
    count = len(workers.devices)
    largest = sizes_for(settings, description, workers.expected).most
    stop.orderly = True
    with EventLog(settings.events) as events:
        books = Books(
            root=root, recipe=recipe, catalog=catalog, events=events, progress=progress, followers=followers
        )
        pool = Pool(
            devices=workers.devices,
            staff=workers,
            books=books,
            stop=stop,
            low_water=low_water(largest, workers.decode_threads, total=len(work.todo), workers=count),
            deadline=deadline_s(),
            decode_threads=workers.decode_threads,
            advanced=lambda: observer.advanced(progress),
            warn=observer.warned,
        )
        pool(cut(work.todo, workers=count, batch_size=settings.batch_size or UNTIMED))
    if stop.requested:
        raise stop.error()
    result = books.result
    for shown in pool.noise:
        result.noise = joined_noise(result.noise, shown)
    result.clock, result.written_bytes = pool.clock, progress.payload_bytes
    return result


def low_water(largest: int, decode_threads: int, *, total: int, workers: int) -> int:
    """A worker with fewer samples to look at gets the next unit.

    Two of the largest batches are on their way to the device while the next is decoded; but a worker that takes more
    than its share of a small build has the others wait for it.
    """
    return max(min(2 * max(largest, decode_threads), -(-total // workers)), 1)
