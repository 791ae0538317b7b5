"""A build stays within --host-memory, also with images of 100 megapixels."""

import time
from pathlib import Path

import numpy as np
import pytest
from commands import draw_folder, finished, start_build
from PIL import Image

MIB = 1 << 20
SIDE = 10_000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Six different images of 100 megapixels in five formats."""
    folder = tmp_path_factory.mktemp("large")
    ramp = (np.add.outer(np.arange(SIDE), np.arange(SIDE)) // 16 % 256).astype(np.uint8)

    def grey(lightness):
        return Image.fromarray(ramp + np.uint8(lightness))

    grey(0).convert("RGB").save(folder / "a.jpg", quality=80)
    grey(40).convert("RGB").save(folder / "b.jpg", quality=80, progressive=True)
    grey(80).convert("RGB").save(folder / "c.png", compress_level=1)
    colored = grey(120).convert("RGBA")
    colored.putalpha(200)
    colored.save(folder / "d.png", compress_level=1)
    grey(160).convert("CMYK").save(folder / "e.jpg", quality=80)
    grey(200).save(folder / "f.tif", compression="tiff_lzw")
    return folder


def peak_of_workers(process):
    """Largest resident size of all workers of a build in bytes, sampled every 10 ms."""
    peak, largest = 0, {}
    while process.poll() is None:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in children:
                status = Path(f"/proc/{pid}/status").read_text()
                now = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
                largest[pid] = max(largest.get(pid, 0), now << 10)
        except (OSError, StopIteration):
            pass
        peak = max(peak, sum(largest.values()))
        time.sleep(0.01)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize(("device", "budget"), [("cpu*1", 2500 * MIB), ("cpu*2", 4000 * MIB)])
def test_resident_memory_stays_within_the_budget(large, tmp_path, device, budget):
    words = ("--device", device, "--decode-threads", 4, "--host-memory", budget)
    small = start_build(draw_folder(tmp_path / "small", 32), tmp_path / "one", *words)
    base = peak_of_workers(small)
    assert finished(small).status == 0
    process = start_build(large, tmp_path / "two", *words)
    peak = peak_of_workers(process)
    done = finished(process, 600)
    counts = done.json["counts"]
    assert [counts[name] for name in ("samples", "encoded", "cached", "quarantined")] == [6, 6, 0, 0]
    summary = f"{base // MIB} MiB with small images, {peak // MIB} with large ones, a budget of {budget // MIB}"
    assert 500 * MIB < peak - base < 1.1 * budget, summary
    print(summary)  # noqa: T201 - a figure of docs/reference/reliability.md
