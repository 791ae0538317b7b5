"""Has workers make what a plan asks for, waits for them, and copies what equal pixels have in common.

Decides how the work is cut and how far ahead of its device a worker is kept. Guarantee: the event file and the books
are written by this process alone; a build that was asked to end ends here, with everything committed that its workers
had in hand. Cost: none beside the workers but for copies: this computes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from latentcache.pipeline.announcing import Announcer
from latentcache.pipeline.batch_size import UNTIMED
from latentcache.pipeline.books import Books
from latentcache.pipeline.calibrate import joined_noise
from latentcache.pipeline.events import EventLog
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.pool import Pool
from latentcache.pipeline.report import Observer
from latentcache.pipeline.staff import Reception, Task, Workers
from latentcache.pipeline.survey import Survey
from latentcache.pipeline.twins import copied
from latentcache.pipeline.units import cut
from latentcache.pipeline.watch import deadline_s
from latentcache.pipeline.work import Planned, Progress, RunResult
from latentcache.pipeline.worker import sizes_for
from latentcache.pipeline.writing import WriterThread
from latentcache.store.catalog import Catalog, index_or_none, payload_of
from latentcache.store.layout import OPEN_SUFFIX
from latentcache.store.shard import ShardWriter


def make_entries(
    task: Task,
    work: Survey,
    *,
    reception: Reception,
    catalog: Catalog,
    followers: Announcer,
    stop: StopSignal,
    observer: Observer,
) -> RunResult:
    """Have everything made that a survey found to do.

    Args:
        task: What is made.
        work: What is to do.
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
    stop.orderly = True
    with EventLog(task.settings.events) as events:
        books = Books(
            root=task.root, recipe=task.recipe, catalog=catalog, events=events, progress=progress, followers=followers
        )
        before = {folder.name for folder in task.layout.sealed_shards()}
        todo: Sequence[Planned] = work.todo
        while todo and not stop.requested:
            _have_made(task, todo, Workers(task, reception, todo), books=books, stop=stop, observer=observer)
            todo = books.let_go(work.todo)
        if not stop.requested:
            _copy(task, books, before, stop=stop, observer=observer)
    if stop.requested:
        raise stop.error()
    books.result.written_bytes = progress.payload_bytes
    return books.result


def low_water(largest: int, decode_threads: int, *, total: int, workers: int) -> int:
    """A worker with fewer samples to look at gets the next unit.

    Two of the largest batches are on their way to the device while the next is decoded; but a worker that takes more
    than its share of a small build has the others wait for it.
    """
    return max(min(2 * max(largest, decode_threads), -(-total // workers)), 1)


def _have_made(
    task: Task, todo: Sequence[Planned], workers: Workers, *, books: Books, stop: StopSignal, observer: Observer
) -> None:
    """Have workers look at these samples and make what they need."""
    settings, count = task.settings, len(workers.devices)
    largest = sizes_for(settings, task.description, workers.expected).most
    pool = Pool(
        devices=workers.devices,
        staff=workers,
        books=books,
        stop=stop,
        low_water=low_water(largest, workers.decode_threads, total=len(todo), workers=count),
        deadline=deadline_s(),
        decode_threads=workers.decode_threads,
        advanced=lambda: observer.advanced(books.progress),
        warn=observer.warned,
    )
    pool(cut(todo, workers=count, batch_size=settings.batch_size or UNTIMED))
    for shown in pool.noise:
        books.result.noise = joined_noise(books.result.noise, shown)
    if not books.result.clock.loops:  # a second pass was not beside the first one: its rates would not add up
        books.result.clock.add(pool.clock)


def _copy(task: Task, books: Books, before: set[str], *, stop: StopSignal, observer: Observer) -> None:
    """Store the latents of pictures with the pixels of another one of this run; ``before``: shards of other runs."""
    if not books.twins.waiting:
        return
    fresh = [folder for folder in task.layout.sealed_shards() if folder.name not in before]
    made = Catalog([index for index in map(index_or_none, fresh) if index is not None])
    name = f"{secrets.token_hex(8)}{OPEN_SUFFIX}"
    writer = WriterThread(
        lambda: ShardWriter(task.layout.shards / name), books.copied, commit_every=task.settings.commit_every
    )
    try:
        copies = books.twins.copies(books.result.looked, task.recipe, made)
        for entry in copied(copies, task.recipe, lambda first: payload_of(first, task.layout.shards)):
            writer.put([entry])
            observer.advanced(books.progress)
            if stop.requested:
                break
    finally:
        writer.finish()
