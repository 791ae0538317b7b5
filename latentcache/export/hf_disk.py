"""Write rows of tokens as a folder for ``datasets.load_from_disk``, with the columns and types of each trainer.

Guarantee: every row has the same length, a multiple of 8; the folder appears whole or not at all. Written with
pyarrow and not with ``datasets``: versions from 4 on store the feature type ``List``, which 3.6 cannot read, in two
places; 3.6, 4 and 5 read ``Sequence`` and an Arrow schema without metadata (format: ``datasets``,
``arrow_dataset.py``, ``save_to_disk``). Cost: one batch of rows in memory.
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
from latentcache.export.atomic_folder import atomic_folder, seal
from latentcache.export.fixed_rows import FixedRows, in_batches
from latentcache.store.atomic_io import make_folder, write_atomically
from latentcache.value import Value

#: LLaMA-Factory's collator pads to multiples of 8 silently: a row of 4090 tokens would train as one of 4096.
MULTIPLE = 8
#: Bytes of one Arrow file; ``datasets`` itself writes files of 500 MB.
FILE_BYTES = 500_000_000
_PLAIN = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
#: Trainer -> layout -> columns. Trainers keep packed documents apart differently: transformers by ``position_ids`` if
#: there is no mask, LLaMA-Factory (``neat_packing``) by a mask that counts the documents, TRL (``padding_free``) by
#: ``seq_lengths``.
COLUMNS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "plain": {
        "pad": _PLAIN,
        "chunk": _PLAIN,
        "pack": {"input_ids": "int32", "labels": "int32", "position_ids": "int32"},
    },
    "llama-factory": {
        "pad": _PLAIN,
        "chunk": _PLAIN,
        "pack": {"input_ids": "int32", "attention_mask": "int32", "labels": "int32", "position_ids": "int32"},
    },
    "trl": {
        "pad": _PLAIN,
        "chunk": _PLAIN,
        "pack": {"input_ids": "int32", "labels": "int32", "seq_lengths": "int32"},
    },
    "axolotl": {"pad": _PLAIN, "chunk": _PLAIN},
    "unsloth": {"pad": _PLAIN, "chunk": _PLAIN},
}


class HfDiskSettings(Value):
    """One export."""

    out: Path
    trainer: str = "plain"
    """Decides the columns."""
    layout: str = "pad"
    left_padded: bool = False
    facts: Mapping[str, Any]
    """Metadata of the cache: fingerprint, layout, policy. Written beside the files."""

    def __post_init__(self) -> None:
        if self.trainer not in COLUMNS:
            raise UsageError(f"--for={self.trainer}: unknown trainer", fix=f"--for {'|'.join(COLUMNS)}")
        if self.layout not in COLUMNS[self.trainer]:
            raise UsageError(
                f"--pack: not available for {self.trainer}",
                why="it keeps the documents of a row apart by patches of its own, which were not tested",
                fix="--pad N",
            )
        if self.left_padded and self.trainer in ("trl", "unsloth"):
            raise UsageError(
                f"--padding-side=left: not available for {self.trainer}",
                why="it replaces the attention mask by ones: the padding would be attended to",
                fix="pad on the right, or export packed rows: --pack N",
            )

    @property
    def columns(self) -> Mapping[str, str]:
        """Column -> type."""
        return COLUMNS[self.trainer][self.layout]


def export_hf_disk(
    splits: Mapping[str, FixedRows],
    settings: HfDiskSettings,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, int]:
    """Write a ``DatasetDict`` folder.

    Args:
        splits: ``train`` and, if requested, ``validation``.
        settings: Trainer and folder.
        on_progress: Called with rows done and rows in total.

    Returns:
        Split -> rows.
    """
    for rows in splits.values():
        check_length(rows.length)
    counts = {name: len(rows) for name, rows in splits.items()}
    with atomic_folder(settings.out) as folder:
        for name, rows in splits.items():
            make_folder(folder / name)
            writer = _SplitWriter(folder / name, settings)
            for batch in in_batches(splits, name, on_progress):
                writer.add(batch, rows.length)
            writer.finish(settings.facts)
        write_atomically(folder / "dataset_dict.json", json.dumps({"splits": list(splits)}).encode())
        seal(folder, {**settings.facts, "trainer": settings.trainer, "rows": counts})
    return counts


class _SplitWriter:
    """Arrow files of one split: IPC streams of one schema, no metadata in it."""

    def __init__(self, folder: Path, settings: HfDiskSettings) -> None:
        self._folder, self._settings = folder, settings
        fields = [pa.field(name, pa.list_(_arrow(kind))) for name, kind in settings.columns.items()]
        self._schema = pa.schema(fields)
        self._parts: list[Path] = []
        self._sink: Any = None
        self._writer: Any = None

    def add(self, batch: Mapping[str, Any], length: int) -> None:
        """Append (B, L) rows."""
        wanted, arrays = self._settings.columns, {name: np.asarray(value) for name, value in batch.items()}
        lists: dict[str, Any] = dict(arrays)
        if "position_ids" in arrays:
            lists["seq_lengths"] = segments(arrays["position_ids"], length)
            if wanted.get("attention_mask") == "int32":
                numbers = np.cumsum(arrays["position_ids"] == 0, axis=1)
                lists["attention_mask"] = np.where(arrays["attention_mask"] != 0, numbers, 0)
        columns = [_lists(lists[name], kind) for name, kind in wanted.items()]
        if self._writer is None or self._sink.tell() > FILE_BYTES:
            self._next()
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Close the files and give them their names."""
        if self._writer is None:
            self._next()  # a split without rows: a file without batches
        self._close()
        names = [f"data-{number:05d}-of-{len(self._parts):05d}.arrow" for number in range(len(self._parts))]
        for part, name in zip(self._parts, names, strict=True):
            part.rename(self._folder / name)
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": str(facts.get("fingerprint", ""))[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self._folder.name,
        }
        features = {
            name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "Sequence"}
            for name, kind in self._settings.columns.items()
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


def segments(position_ids: NDArray[Any], length: int) -> list[NDArray[np.int32]]:
    """Lengths of the documents of each row, padding as the last one."""
    return [np.diff(np.append(np.flatnonzero(row == 0), length)).astype(np.int32) for row in position_ids]


def check_length(length: int) -> None:
    """Reject rows that trainers would pad. Raises UsageError."""
    if length % MULTIPLE:
        below = max(length // MULTIPLE * MULTIPLE, MULTIPLE)
        raise UsageError(
            f"rows of {length} tokens: not a multiple of {MULTIPLE}",
            why=f"trainers pad to multiples of {MULTIPLE} silently, so they would train on another length",
            fix=f"rows of {below} or {below + MULTIPLE} tokens",
        )


def _arrow(kind: str) -> Any:
    return {"int8": pa.int8(), "int32": pa.int32()}[kind]


def _lists(rows: NDArray[Any] | list[NDArray[np.int32]], kind: str) -> Any:
    """A column of lists from rows of numbers, without a Python object for each."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.concatenate(list(rows)) if len(lengths) else np.empty(0)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(kind), type=_arrow(kind)))
