"""lora-scripts: a missing ``metadata.csv``, wrong paths, a BOM, a GGUF given as a model, out of memory.

In lora-scripts each is a traceback after minutes of training. Here each is an error before any work, with file, line,
cause and fix, or has no effect. The tests fail if the message is that of an inner library, or if a BOM becomes part
of a column name. ``tests/cli/test_bad_input.py`` lists all errors; ``tests/journeys/test_every_kind.py`` lets memory
run out for each kind.
"""

import pytest
from small_cache import SMALL, draw_four


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
