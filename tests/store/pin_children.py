"""Processes that hold a generation, to be killed by the tests. Run as a program.

python pin_children.py hold CACHE     hold it, say so, wait
python pin_children.py fork CACHE     hold it, fork, close it in the parent; the child holds on until stdin ends
"""

import os
import sys
from pathlib import Path

from latentcache.store.pins import open_pinned


def hold(cache):
    generation = open_pinned(Path(cache))
    say(os.getpid())
    sys.stdin.read()
    return generation


def fork(cache):
    generation = open_pinned(Path(cache))
    child = os.fork()
    if child:
        generation.pins[0].close()
        say(child)
        os.waitpid(child, 0)
    else:
        sys.stdin.read()
        assert generation.pins[0].held
        os._exit(0)


def say(number):
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"hold": hold, "fork": fork}[sys.argv[1]](*sys.argv[2:])
