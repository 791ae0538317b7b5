"""``python -m latentcache``, and the console script.

A signal that comes while the commands are still being loaded waits until there are words for it.
"""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

from latentcache.cli.app import run  # noqa: E402 - signals are held back first

if __name__ == "__main__":
    run()
