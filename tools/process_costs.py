"""Processor time and peak memory of this process, for the benchmarks."""

import resource
from pathlib import Path


def cpu_seconds() -> float:
    """Return processor seconds of this process and its finished workers."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def peak_bytes() -> int:
    """Return the peak memory of this process; ``ru_maxrss`` would include that of its parent."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
