"""Run a script like ``python script``, and exit without finalizing the interpreter.

A gloo thread of torch that frees its last result during finalization aborts the process
(``ProcessGroupGloo::runLoop`` frees a ``ThreadLocalState``, which takes the GIL inside a destructor; torch 2.13,
about one run in fifty on a busy machine). The script has finished its own work by then.
"""

import os
import runpy
import sys


def leave():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
    leave()
