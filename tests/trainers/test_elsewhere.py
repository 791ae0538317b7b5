"""LLaMA-Factory and axolotl train on exported folders with the settings of their sections.

They pin other versions of transformers, so each runs in its own environment:
``LATENTCACHE_LLAMA_FACTORY_PYTHON`` and ``LATENTCACHE_AXOLOTL_PYTHON`` name the interpreters.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from datasets import load_from_disk
from page_blocks import DOCS, blocks
from tiny_tokens import LENGTH, a_tokenizer, build_fifty, tiny_llama

from latentcache import open_cache
from latentcache.export.settings import ExportSettings
from latentcache.export.tokens import TokenExport

SECTIONS = {"llama-factory": "LLaMA-Factory", "axolotl": "axolotl"}
#: Steps of two epochs of batches of four. axolotl divides rows, so it omits the end of the last epoch.
STEPS = {"llama-factory": lambda rows: 2 * math.ceil(rows / 4), "axolotl": lambda rows: math.ceil(2 * rows / 4)}
COMMON = {"learning_rate": 0.001, "logging_steps": 1, "output_dir": "out", "bf16": False, "fp16": False}
COMMON |= {"save_strategy": "no"}
#: Extra settings of a run on a CPU.
MORE = {
    "llama-factory": {
        "do_train": True, "finetuning_type": "full", "model_name_or_path": "model", "dataset_dir": "ONLINE",
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "use_cpu": True, "report_to": "none",
    },
    "axolotl": {
        "base_model": "model", "micro_batch_size": 4, "gradient_accumulation_steps": 1, "num_epochs": 2,
        "optimizer": "adamw_torch", "attn_implementation": "sdpa", "val_set_size": 0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model_and_cache(tmp_path_factory):
    folder = build_fifty(tmp_path_factory.mktemp("elsewhere"))
    tiny_llama().save_pretrained(folder / "model")
    a_tokenizer().save_pretrained(folder / "model")
    return folder


def page_settings(page, number):
    """Merge the YAML blocks of a section up to this one."""
    found = [b.text for b in blocks(DOCS / "trainers" / "language-models.md", SECTIONS[page]) if b.language == "yaml"]
    settings = {}
    for text in found[: number + 1]:
        settings |= yaml.safe_load(text)
    return settings


def train(system, folder, settings):
    """Train in another environment; return the inputs of its model."""
    python = os.environ.get(f"LATENTCACHE_{system.upper().replace('-', '_')}_PYTHON")
    if not python:
        pytest.skip(f"no interpreter with {system} is named")
    (folder / "settings.json").write_text(json.dumps(settings))  # JSON is valid YAML
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, Path(__file__).with_name("trainer_children.py"), system, "settings.json", "seen.json"],
        cwd=folder,
        env=environment | quiet | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "kind", "block"),
    [("llama-factory", "pad", 0), ("llama-factory", "pack", 1), ("axolotl", "pad", 0), ("axolotl", "chunk", 0)],
)
def test_trainers_use_the_exported_rows(model_and_cache, tmp_path, system, kind, block):
    (tmp_path / "model").symlink_to(model_and_cache / "model")
    cache, name = model_and_cache / "texts.latentcache", "packed" if block else "rows"
    view = open_cache(cache).rows(**{kind: LENGTH})
    settings = ExportSettings(cache=cache, out=tmp_path / name, trainer=system, **{kind: LENGTH})
    TokenExport(settings).run()
    seen = train(system, tmp_path, page_settings(system, block) | COMMON | MORE[system])

    steps, batches = STEPS[system](len(view)), view.loader(batch_size=4).steps(1)
    assert (seen["steps"], seen["max_steps"], seen["epoch"]) == (steps, steps, pytest.approx(steps / batches))
    assert len(seen["losses"]) == steps
    assert all(map(math.isfinite, seen["losses"]))
    shapes = {tuple(batch[column]["shape"]) for batch in seen["batches"] for column in ("input_ids", "labels")}
    assert shapes == {(4, LENGTH), (len(view) % 4 or 4, LENGTH)}
    columns = [column for column in seen["batches"][0] if seen["batches"][0][column]["rows"]]
    assert {"input_ids", "labels"} <= set(columns)
    exported = [[row[column] for column in columns] for row in load_from_disk(str(tmp_path / name))["train"]]
    epochs = seen["batches"][:batches], seen["batches"][batches:]
    assert sorted(rows_of(epochs[0], columns)) == sorted(exported)
    second = rows_of(epochs[1], columns)
    assert all(second.count(row) <= exported.count(row) for row in second)
    assert len(second) == len(exported) if system == "llama-factory" else len(second) >= len(exported) - 3
    if kind != "chunk":
        assert seen["losses"][0] == pytest.approx(loss_of_documents(seen["batches"][0]), rel=1e-4)


def rows_of(batches, columns):
    """Return every row of the model's input, column by column."""
    return [
        list(row) for batch in batches for row in zip(*(batch[column]["rows"] for column in columns), strict=True)
    ]


def loss_of_documents(batch):
    """Compute losses of the untrained model for each document alone; cross-document attention changes them."""
    model, losses, tokens = tiny_llama().eval(), [], 0
    ids, labels = (torch.tensor(batch[column]["rows"]) for column in ("input_ids", "labels"))
    for row in range(len(ids)):
        starts = (labels[row] == -100).nonzero().flatten().tolist()
        for first, last in zip(starts, [*starts[1:], LENGTH], strict=True):
            if last - first > 1:
                with torch.no_grad():
                    logits = model(input_ids=ids[row : row + 1, first:last]).logits[0, :-1]
                wanted = labels[row, first + 1 : last]
                losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
                tokens += len(wanted)
    return float(sum(losses)) / tokens
