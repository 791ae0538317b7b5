"""Write rows of tokens as a folder for ``datasets.load_from_disk``, with the columns and types of each trainer.

Guarantee: every row has the same length, a multiple of 8. Written with pyarrow and not with ``datasets``: versions
from 4 on store the feature type ``List``, which 3.6 cannot read, in two places; 3.6, 4 and 5 read ``Sequence`` and an
Arrow schema without metadata (format: ``datasets``, ``arrow_dataset.py``, ``save_to_disk``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.export.run import write_splits
from latentcache.store.atomic_io import make_folder, write_atomically

#: LLaMA-Factory's collator pads to multiples of 8 silently: a row of 4090 tokens would train as one of 4096.
MULTIPLE = 8
#: Bytes of one Arrow file; ``datasets`` itself writes files of 500 MB.
FILE_BYTES = 500_000_000
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


def check(trainer: str, layout: str, length: int, *, left: bool = False) -> None:
    """Reject rows that a trainer would pad or mix up. Raises UsageError."""
    if trainer not in COLUMNS:
        raise UsageError(f"--for={trainer}: unknown trainer", fix=f"--for {'|'.join(COLUMNS)}")
    if layout not in COLUMNS[trainer]:
        why = "it keeps the documents of a row apart by patches of its own, which were not tested"
        raise UsageError(f"--pack: not available for {trainer}", why=why, fix="--pad N")
    if left and trainer in ("trl", "unsloth"):
        raise UsageError(
            f"--padding-side=left: not available for {trainer}",
            why="it replaces the attention mask by ones: the padding would be attended to",
            fix="pad on the right, or export packed rows: --pack N",
        )
    if length % MULTIPLE:
        below = max(length // MULTIPLE * MULTIPLE, MULTIPLE)
        raise UsageError(
            f"rows of {length} tokens: not a multiple of {MULTIPLE}",
            why=f"trainers pad to multiples of {MULTIPLE} silently, so they would train on another length",
            fix=f"rows of {below} or {below + MULTIPLE} tokens",
        )


def export_hf_disk(
    folder: Path,
    splits: Mapping[str, Any],
    trainer: str,
    layout: str,
    fingerprint: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write a ``DatasetDict`` of rows into an empty folder.

    Args:
        folder: The folder.
        splits: ``train`` and, if requested, ``validation``: rows of ``cache.rows()``.
        trainer: Decides the columns, with the layout.
        layout: ``pad``, ``pack`` or ``chunk``.
        fingerprint: Of the cache.
        on_progress: Called with rows done and rows in total.
    """
    columns = COLUMNS[trainer][layout]
    write_splits(splits, lambda name: _SplitWriter(folder / name, columns, fingerprint), on_progress)
    write_atomically(folder / "dataset_dict.json", json.dumps({"splits": list(splits)}).encode())


class _SplitWriter:
    """Arrow files of one split: IPC streams of one schema, no metadata in it."""

    def __init__(self, folder: Path, columns: Mapping[str, str], fingerprint: str) -> None:
        self._folder, self._columns, self._fingerprint = folder, columns, fingerprint
        self._schema = pa.schema([pa.field(name, pa.list_(_arrow(kind))) for name, kind in columns.items()])
        make_folder(folder)
        self._parts: list[Path] = []
        self._sink: Any = None
        self._writer: Any = None

    def add(self, batch: Mapping[str, Any]) -> None:
        """Append (B, L) rows."""
        wanted, arrays = self._columns, {name: np.asarray(value) for name, value in batch.items()}
        lists: dict[str, Any] = dict(arrays)
        if "position_ids" in arrays:
            lists["seq_lengths"] = segments(arrays["position_ids"])
            if wanted.get("attention_mask") == "int32":
                numbers = np.cumsum(arrays["position_ids"] == 0, axis=1)
                lists["attention_mask"] = np.where(arrays["attention_mask"] != 0, numbers, 0)
        columns = [_lists(lists[name], kind) for name, kind in wanted.items()]
        if self._writer is None or self._sink.tell() > FILE_BYTES:
            self._next()
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def finish(self) -> None:
        """Close the files and give them their names."""
        if self._writer is None:
            self._next()  # a split without rows: a file without batches
        self._close()
        names = [f"data-{number:05d}-of-{len(self._parts):05d}.arrow" for number in range(len(self._parts))]
        for part, name in zip(self._parts, names, strict=True):
            part.rename(self._folder / name)
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": self._fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self._folder.name,
        }
        features = {
            name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "Sequence"}
            for name, kind in self._columns.items()
        }
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        write_atomically(self._folder / "state.json", json.dumps(state, indent=2).encode())
        write_atomically(self._folder / "dataset_info.json", json.dumps(info, indent=2).encode())

    def _next(self) -> None:
        self._close()
        self._parts.append(self._folder / f"part-{len(self._parts):05d}")
        self._sink = pa.OSFile(str(self._parts[-1]), "wb")
        self._writer = pa.ipc.new_stream(self._sink, self._schema)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()


def segments(position_ids: NDArray[Any]) -> list[NDArray[np.int32]]:
    """Lengths of the documents of each row, padding as the last one."""
    return [np.diff(np.append(np.flatnonzero(row == 0), len(row))).astype(np.int32) for row in position_ids]


def _arrow(kind: str) -> Any:
    return {"int8": pa.int8(), "int32": pa.int32()}[kind]


def _lists(rows: NDArray[Any] | list[NDArray[np.int32]], kind: str) -> Any:
    """A column of lists from rows of numbers, without a Python object for each."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.concatenate(list(rows)) if len(lengths) else np.empty(0)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(kind), type=_arrow(kind)))
