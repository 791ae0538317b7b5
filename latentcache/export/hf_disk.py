"""Write rows of tokens as a folder for ``datasets.load_from_disk``, with the columns and types of each trainer.

Guarantee: every row has the same length, a multiple of 8. Written with pyarrow and not with ``datasets``: versions
from 4 on store the feature type ``List``, which 3.6 cannot read, in two places; 3.6, 4 and 5 read ``Sequence`` and an
Arrow schema without metadata (format: ``datasets``, ``arrow_dataset.py``, ``save_to_disk``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.store.atomic_io import make_folder

#: LLaMA-Factory's collator pads to multiples of 8 silently: a row of 4090 tokens would train as one of 4096.
MULTIPLE = 8
_FILE = "data-00000-of-00001.arrow"
_PLAIN = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
#: Trainer -> layout -> columns. Trainers keep packed documents apart differently: transformers by ``position_ids`` if
#: there is no mask, LLaMA-Factory (``neat_packing``) by a mask that counts the documents, TRL (``padding_free``) by
#: ``seq_lengths``.
COLUMNS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    name: {"pad": _PLAIN, "chunk": _PLAIN, **({"pack": dict.fromkeys(packed, "int32")} if packed else {})}
    for name, packed in (
        ("plain", ("input_ids", "labels", "position_ids")),
        ("llama-factory", ("input_ids", "attention_mask", "labels", "position_ids")),
        ("trl", ("input_ids", "labels", "seq_lengths")),
        ("axolotl", ()),
        ("unsloth", ()),
    )
}


def check(trainer: str, layout: str, length: int) -> None:
    """Reject rows that a trainer would pad or mix up. Raises UsageError."""
    if trainer not in COLUMNS:
        raise UsageError(f"--for={trainer}: unknown trainer", fix=f"--for {'|'.join(COLUMNS)}")
    if layout not in COLUMNS[trainer]:
        why = "it keeps the documents of a row apart by patches of its own, which were not tested"
        raise UsageError(f"--pack: not available for {trainer}", why=why, fix="--pad N")
    if length % MULTIPLE:
        below = max(length // MULTIPLE * MULTIPLE, MULTIPLE)
        raise UsageError(
            f"rows of {length} tokens: not a multiple of {MULTIPLE}",
            why=f"trainers pad to multiples of {MULTIPLE} silently, so they would train on another length",
            fix=f"rows of {below} or {below + MULTIPLE} tokens",
        )


def write_split_names(folder: Path, names: Sequence[str]) -> None:
    """Name the splits of a folder, which makes it a ``DatasetDict``."""
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": names}), "utf-8")


def write_hf_disk(
    root: Path, split: str, batches: Iterable[Mapping[str, Any]], *, columns: Mapping[str, str], fingerprint: str
) -> None:
    """Write one split: the Arrow file of (B, L) rows, an IPC stream without metadata in its schema."""
    folder = root / split
    make_folder(folder)
    schema = pa.schema([(name, pa.list_(pa.type_for_alias(kind))) for name, kind in columns.items()])
    with pa.OSFile(str(folder / _FILE), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(_record(batch, columns, schema))
    state: dict[str, Any] = {
        "_data_files": [{"filename": _FILE}],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    features = {
        name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "Sequence"} for name, kind in columns.items()
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=2), "utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), "utf-8")


def _record(batch: Mapping[str, Any], columns: Mapping[str, str], schema: Any) -> Any:
    lists: dict[str, Any] = {name: np.asarray(value) for name, value in batch.items()}
    if "position_ids" in lists:
        numbers = lists["seq_idx"]
        mask = numbers if columns.get("attention_mask") == "int32" else numbers > 0
        lists |= {"seq_lengths": segments(lists["position_ids"]), "attention_mask": mask}
    return pa.record_batch([_lists(lists[name], kind) for name, kind in columns.items()], schema=schema)


def segments(position_ids: NDArray[Any]) -> list[NDArray[np.int32]]:
    """Lengths of the documents of each row, padding as the last one."""
    return [np.diff(np.append(np.flatnonzero(row == 0), len(row))).astype(np.int32) for row in position_ids]


def _lists(rows: NDArray[Any] | list[NDArray[np.int32]], kind: str) -> Any:
    """A column of lists from rows of numbers, without a Python object for each."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    flat = np.concatenate(list(rows)) if len(rows) else np.empty(0)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(kind)))
