import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from datasets import load_from_disk

from latentcache.export import tokens
from latentcache.export.hf_disk import COLUMNS, write_hf_disk, write_split_names
from latentcache.export.tokens import write_splits

LENGTH = 16
#: Interpreters with other versions of datasets, separated by colons.
OTHERS = [path for path in os.environ.get("LATENTCACHE_DATASETS_PYTHONS", "").split(":") if path]


class Packed:
    """Rows of a few documents; the padding is a separate segment."""

    length = LENGTH

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def batch(self, rows):
        columns = [self._row(self.rows[row], row) for row in rows]
        return {name: np.stack([row[name] for row in columns]) for name in columns[0]}

    def _row(self, lengths, number):
        used = sum(lengths)
        ids = np.zeros(LENGTH, dtype=np.int64)
        ids[:used] = np.arange(used) + 100 * number + 1
        mask = (np.arange(LENGTH) < used).astype(np.int64)
        parts = [*lengths, LENGTH - used] if used < LENGTH else lengths
        positions = np.concatenate([np.arange(part) for part in parts])
        labels = np.where(mask, ids, -100)
        labels[positions == 0] = -100
        numbers = np.where(mask, np.cumsum(positions == 0), 0)
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "seq_idx": numbers}


ROWS = Packed([[5, 4, 7], [16], [3, 3], [8, 8], [2, 9]])


def export(splits, out, trainer="plain", layout="pad", on_progress=lambda *at: None):
    columns = COLUMNS[trainer][layout]
    write_splits(splits, partial(write_hf_disk, out, columns=columns, fingerprint="ab" * 16), on_progress)
    write_split_names(out, list(splits))


@pytest.mark.parametrize("trainer", COLUMNS)
@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_datasets_opens_it(tmp_path, trainer, layout, monkeypatch):
    if layout not in COLUMNS[trainer]:
        return
    monkeypatch.setattr(tokens, "BATCH_ROWS", 2)
    seen = []
    splits = {"train": ROWS, "validation": Packed([[4]])}
    export(splits, tmp_path / "out", trainer, layout, lambda *progress: seen.append(progress))
    assert seen == [(2, 6), (4, 6), (5, 6), (6, 6)]
    dataset = load_from_disk(str(tmp_path / "out"))
    assert set(dataset) == {"train", "validation"}
    assert dataset["train"].column_names == list(COLUMNS[trainer][layout])
    whole = ROWS.batch(range(5))
    for row in range(5):
        assert dataset["train"][row]["input_ids"] == whole["input_ids"][row].tolist()
        assert dataset["train"][row]["labels"] == whole["labels"][row].tolist()
    tensors = dataset["train"].with_format("torch")[0]
    assert {str(value.dtype) for value in tensors.values()} == {"torch.int64"}
    info = json.loads((tmp_path / "out" / "train" / "dataset_info.json").read_text())
    assert {feature["_type"] for feature in info["features"].values()} == {"Sequence"}


def test_document_boundaries_per_trainer(tmp_path):
    export({"train": ROWS}, tmp_path / "trl", "trl", "pack")
    assert load_from_disk(str(tmp_path / "trl"))["train"]["seq_lengths"][0:3] == [[5, 4, 7], [16], [3, 3, 10]]
    export({"train": ROWS}, tmp_path / "lf", "llama-factory", "pack")
    masks = load_from_disk(str(tmp_path / "lf"))["train"]["attention_mask"]
    assert masks[0] == [1] * 5 + [2] * 4 + [3] * 7
    assert masks[2] == [1] * 3 + [2] * 3 + [0] * 10


@pytest.mark.slow
@pytest.mark.parametrize("python", [sys.executable, *OTHERS])
def test_a_plain_process_opens_it_with_datasets(tmp_path, python):
    export({"train": ROWS}, tmp_path / "out")
    code = "import sys, datasets; print(datasets.load_from_disk(sys.argv[1])['train'][1]['input_ids'])"
    done = subprocess.run([python, "-c", code, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ROWS.batch([1])["input_ids"][0].tolist()
