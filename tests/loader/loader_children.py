"""Processes that iterate over loaders beside their parent: what workers of a trainer do."""

import hashlib

from torch.utils.data import DataLoader


def digests(batches):
    """Names and bytes of each batch."""
    return [
        (batch["names"], hashlib.blake2b(batch["latents"].contiguous().view(-1).numpy().tobytes()).hexdigest())
        for batch in batches
    ]


def serve_both(training, validation, results):
    """Two loaders in turn, each twice."""
    results.put([digests(loader) for loader in (training, validation, training, validation)])


def go_on(iterator, loader, results):
    """The rest of a pass that the parent has begun, then a whole one."""
    results.put((digests(iterator), digests(loader)))


def add_up(numbers, turns):
    """Waits for a turn, and writes the sum of the first two numbers."""
    turns.get(timeout=60)
    numbers[2] = numbers[0] + numbers[1]


def own_numbers(numbers, results):
    """What a rank does that was given a loader of another process."""
    before, foreign = numbers[0], numbers.foreign
    numbers.own()
    numbers[0] = 8
    results.put((before, foreign, numbers.foreign, numbers[0]))


def ranks_of_one_loader(loader, told, results):
    """Two epochs by workers that stay, of loaders that came from another process; the second one after its word."""
    passes = []
    for served in (loader, told):
        batches = DataLoader(served, batch_size=None, num_workers=2, persistent_workers=True)
        for epoch in (3, 4):
            served.set_epoch(epoch)
            passes.append([batch["keys"] for batch in batches])
    results.put(passes)
