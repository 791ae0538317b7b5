"""lora-scripts: a BOM in ``metadata.csv`` becomes part of a column name, and training stops with a KeyError.

Here a BOM has no effect. ``tests/sources/readers/test_table.py`` reads tables with wrong paths and rows,
``tests/cli/test_bad_input.py`` lists all errors, and ``tests/encoders/test_weights.py`` names a GGUF.
"""

import csv
import io

import numpy as np
import pytest
import torch
from small_cache import build, draw_four
from trained_steps import train


def test_from_a_table_with_a_bom_to_the_folder_of_lora_scripts(run, tmp_path):
    """What its reader makes of the BOM, and the folder that it trains from; ``tests/peers`` trains two steps."""
    data, cache, out = (tmp_path / name for name in ("cats", "cache", "out"))
    draw_four(data)
    for file in data.glob("*.txt"):
        file.unlink()
    rows = "".join(f"p{number}.png,words {number}\n" for number in range(4))
    table = b"\xef\xbb\xbffile_name,text\n" + rows.encode()
    (data / "metadata.csv").write_bytes(table)
    theirs = next(csv.DictReader(io.StringIO(table.decode("utf-8"))))
    with pytest.raises(KeyError):
        theirs["file_name"]
    build(data, cache, like="kohya", resolutions=(128,), min_side=64, max_side=256, bucket_step=64)
    words = ("--to", "kohya", "--architecture", "sdxl", "--release", "lora-scripts")
    assert run("export", cache, out, *words).status == 0
    batches = []
    for number in range(4):
        assert (out / f"1_cats/p{number}.txt").read_text("utf-8") == f"words {number}"
        with np.load(out / f"1_cats/p{number}.npz") as arrays:
            assert set(arrays) == {"latents", "original_size", "crop_ltrb"}
            batches.append(torch.from_numpy(arrays["latents"])[None])
    assert train(batches) == 4
    assert run("verify", out, "--data", data).status == 0
