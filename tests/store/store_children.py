"""Child processes that lock or read, for tests that kill them.

python store_children.py lock PATH     take the builder lock, print a line, wait
python store_children.py lease CACHE   take a lease, print a line, wait for the end of stdin
python store_children.py fork CACHE    take a lease, fork, close it in the parent; the child keeps it
"""

import os
import sys
import time
from pathlib import Path

from latentcache.store.lock import builder_lock
from latentcache.store.snapshot import open_leased


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
