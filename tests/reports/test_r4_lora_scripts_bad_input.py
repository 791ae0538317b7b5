"""lora-scripts: a missing ``metadata.csv``, wrong paths, a BOM, a GGUF given as a model, out of memory.

In lora-scripts each is a traceback after minutes of training. Here each is an error before any work, with file, line,
cause and fix, or has no effect. The tests fail if the message is that of an inner library, or if a BOM becomes part
of a column name. ``tests/cli/test_bad_input.py`` lists all errors; ``tests/journeys/test_every_kind.py`` lets memory
run out for each kind.
"""

import csv
import io

import numpy as np
import pytest
from small_cache import SMALL, build, draw_four


def start(run, tmp_path, *words):
    return run("build", tmp_path / "data", *SMALL, "--out", tmp_path / "cache", *words, "--json")


def test_without_a_table_all_images_are_used(run, tmp_path):
    draw_four(tmp_path / "data")
    assert start(run, tmp_path).json["counts"]["encoded"] == 4


def test_a_table_with_a_bom_is_read_as_it_was_meant(run, tmp_path):
    draw_four(tmp_path / "data")
    rows = "".join(f"p{number}.png,words {number}\n" for number in range(4))
    (tmp_path / "data" / "metadata.csv").write_bytes(b"\xef\xbb\xbffile_name,text\n" + rows.encode())
    done = start(run, tmp_path)
    assert (done.status, done.json["counts"]["encoded"]) == (0, 4)
    assert run("verify", tmp_path / "cache").status == 0


@pytest.mark.parametrize("path", ["images/p0.png", "/srv/p0.png", "..\\p0.png", "P0.PNG"])
def test_a_wrong_path_names_the_line(run, tmp_path, path):
    draw_four(tmp_path / "data")
    (tmp_path / "data" / "metadata.csv").write_text(f"file_name,text\np1.png,good\n{path},words\n")
    done = start(run, tmp_path)
    (item,) = [item for item in done.json["items"] if item["category"] == "quarantined"]
    assert (done.status, done.json["counts"]["encoded"]) == (1, 1)
    assert "metadata.csv:3 " in item["found"]


def test_a_row_that_is_cut_short_names_the_line(run, tmp_path):
    draw_four(tmp_path / "data")
    (tmp_path / "data" / "metadata.csv").write_text("file_name,text\np0.png,good\np1.png\n")
    done = start(run, tmp_path)
    assert (done.status, done.error["where"]) == (2, f"{tmp_path}/data/metadata.csv:3")


def test_a_gguf_file_is_called_one_before_torch_is_loaded(run, tmp_path):
    draw_four(tmp_path / "data")
    (tmp_path / "flux.gguf").write_bytes(b"GGUF\3\0\0\0")
    done = start(run, tmp_path, "--model", tmp_path / "flux.gguf")
    assert (done.status, done.error["what"]) == (2, "flux.gguf is a GGUF file")
    assert "safetensors VAE" in done.error["fix"]
    assert not (tmp_path / "cache").exists()


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
    for number in range(4):
        assert (out / f"1_cats/p{number}.txt").read_text("utf-8") == f"words {number}"
        with np.load(out / f"1_cats/p{number}.npz") as arrays:
            assert set(arrays) == {"latents", "original_size", "crop_ltrb"}
    assert run("verify", out, "--data", data).status == 0
