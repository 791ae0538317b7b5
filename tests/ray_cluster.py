"""A Ray cluster of this machine in a process of its own: python ray_cluster.py CPUS..., a number for each node.

Writes the address, then takes commands on stdin and answers each with a line: ``kill`` (the last node), ``add`` (with
a folder of modules), ``quit``.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def events_of(path):
    """Item keys that a build has acknowledged in its file of events."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [key for line in lines for key in json.loads(line)["keys"]]


def wait_for_events(path, count, timeout=60):
    until = time.monotonic() + timeout
    while len(events_of(path)) < count:
        assert time.monotonic() < until
        time.sleep(0.05)


class Cluster:
    """The cluster as a test sees it."""

    def __init__(self, *cpus):
        command = [sys.executable, __file__, *map(str, cpus)]
        around = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._process = subprocess.Popen(command, env=around, **pipes)
        self.address = self._process.stdout.readline().strip()
        assert self.address

    def do(self, word):
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self):
        with self._process, contextlib.suppress(BrokenPipeError):
            self._process.communicate("quit\n", timeout=60)


def _main(cpus):
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster as Nodes

    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short: sockets
        head = {"num_cpus": cpus[0], "include_dashboard": False, "object_store_memory": 80 << 20, "temp_dir": folder}
        nodes = Nodes(initialize_head=True, connect=False, head_node_args=head)
        more = {"object_store_memory": 80 << 20}
        added = [nodes.add_node(num_cpus=count, **more) for count in cpus[1:]]
        sys.stdout.write(f"{nodes.address}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            if line == "kill\n":
                nodes.remove_node(added.pop(), allow_graceful=False)
            elif line.startswith("add"):
                path = ":".join([*line.split()[1:], os.environ["PYTHONPATH"]])
                added.append(nodes.add_node(num_cpus=1, env_vars={"PYTHONPATH": path}, **more))
            elif line == "quit\n":
                break
            sys.stdout.write("done\n")
            sys.stdout.flush()
        nodes.shutdown()


if __name__ == "__main__":
    _main([int(word) for word in sys.argv[1:]] or [1])
