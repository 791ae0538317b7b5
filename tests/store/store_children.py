"""Child processes that write, lock or read, for tests that kill or limit them.

python store_children.py write FOLDER FIRST     commit random entries until killed; print committed numbers
python store_children.py limited FOLDER BYTES   likewise, with a file size limit of BYTES
python store_children.py lock PATH              take the builder lock, print a line, wait
python store_children.py lease CACHE            take a lease, print a line, wait for the end of stdin
python store_children.py fork CACHE             take a lease, fork, close it in the parent; the child keeps it
"""

import os
import random
import resource
import sys
import time
from pathlib import Path

from made_entries import flat_entry

from latentcache.errors import LatentcacheError
from latentcache.store.lock import builder_lock
from latentcache.store.shard import ShardWriter
from latentcache.store.snapshot import open_leased


def size_of(number):
    return random.Random(number).choice([300, 3_000, 30_000, 150_000])


def write(folder, first):
    """Commit batches of random length and print the last number of each, until killed."""
    writer, number = ShardWriter(Path(folder), map_bytes=1 << 20), int(first)
    while True:
        count = random.randint(1, 6)
        writer.write([flat_entry(n, size_of(n)) for n in range(number, number + count)])
        number += count
        say(number)


def limited(folder, most_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes), resource.RLIM_INFINITY))
    try:
        write(folder, 0)
    except LatentcacheError as error:
        say(f"{type(error).__name__} {error.slug}: {error.fix}")


def lock(path):
    with builder_lock(Path(path)):
        say("held")
        time.sleep(60)


def lease(cache):
    snapshot = open_leased(Path(cache))
    say(os.getpid())
    sys.stdin.read()
    return snapshot


def fork(cache):
    snapshot = open_leased(Path(cache))
    child = os.fork()
    if child:
        snapshot.lease.close()
        say(child)
        os.waitpid(child, 0)
    else:
        sys.stdin.read()
        assert snapshot.lease.close.alive
        os._exit(0)


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
