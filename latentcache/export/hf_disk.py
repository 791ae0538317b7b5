"""Rows of tokens as a folder that ``datasets.load_from_disk`` opens: what trainers read that take no loader of ours.

Decides columns and types for each trainer. Guarantee: every row has the same length, a multiple of 8; labels, masks
and document boundaries are checked before the first byte and again per batch; the folder appears whole or not at all.
Written with pyarrow and not with ``datasets``: versions from 4 on store the feature type ``List``, which 3.6 cannot
read, in two places; ``Sequence`` and an Arrow schema without metadata are read by 3.6, 4 and 5 (format: ``datasets``,
``arrow_dataset.py``, ``save_to_disk``). Cost: rows go through memory one batch at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from latentcache.errors import ExportError, UsageError
from latentcache.interop.fixed_rows import FixedRows, checked, in_batches
from latentcache.interop.whole_folder import seal, whole_folder
from latentcache.store.durable import make_folder, write_atomically

#: LLaMA-Factory's collator pads to multiples of 8 in silence, so a row of 4090 would train as one of 4096.
MULTIPLE = 8
#: Bytes of one Arrow file; ``datasets`` itself writes files of 500 MB.
FILE_BYTES = 500_000_000
_PLAIN = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
#: Trainer -> view -> columns. What keeps packed documents apart differs: transformers reads it from ``position_ids``
#: where there is no mask, LLaMA-Factory (``neat_packing``) from a mask that counts the documents, TRL
#: (``padding_free``) from ``seq_lengths``, from which it makes the rest.
COLUMNS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "plain": {
        "padded": _PLAIN,
        "blocks": _PLAIN,
        "packed": {"input_ids": "int32", "labels": "int32", "position_ids": "int32"},
    },
    "llama-factory": {
        "padded": _PLAIN,
        "blocks": _PLAIN,
        "packed": {"input_ids": "int32", "attention_mask": "int32", "labels": "int32", "position_ids": "int32"},
    },
    "trl": {
        "padded": _PLAIN,
        "blocks": _PLAIN,
        "packed": {"input_ids": "int32", "labels": "int32", "seq_lengths": "int32"},
    },
    "axolotl": {"padded": _PLAIN, "blocks": _PLAIN},
    "unsloth": {"padded": _PLAIN, "blocks": _PLAIN},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfDiskSettings:
    """One export."""

    out: Path
    trainer: str = "plain"
    """For whom: decides columns."""
    view: str = "padded"
    left_padded: bool = False
    facts: Mapping[str, Any]
    """What the rows were made from: fingerprint of the cache, view, policy. Written beside them."""

    def __post_init__(self) -> None:
        if self.trainer not in COLUMNS:
            raise UsageError(f"no trainer {self.trainer!r} is known", fix=f"--for {'|'.join(COLUMNS)}")
        if self.view not in COLUMNS[self.trainer]:
            raise UsageError(
                f"packed rows for {self.trainer}",
                why="what keeps the documents of a row apart there are patches of its own, which were not checked",
                fix="--view padded",
            )
        if self.left_padded and self.trainer in ("trl", "unsloth"):
            raise UsageError(
                f"rows padded on the left for {self.trainer}",
                why="it drops the attention mask and makes one of ones: the padding would be attended to",
                fix="pad on the right, or export the packed view",
            )

    @property
    def columns(self) -> Mapping[str, str]:
        """Column -> type."""
        return COLUMNS[self.trainer][self.view]


def export_hf_disk(
    splits: Mapping[str, FixedRows], settings: HfDiskSettings, advanced: Callable[[int, int], None] = lambda *_: None
) -> dict[str, int]:
    """Write a ``DatasetDict`` folder.

    Args:
        splits: ``train`` and, where there is one, ``validation``.
        settings: For whom, and where to.
        advanced: Told rows written and rows in all.

    Returns:
        Split -> rows.

    Raises:
        UsageError: The folder is there already, or a length no trainer keeps.
        ExportError: A row is not what it must be; nothing is left of the export then.
        DiskFullError: No space.
    """
    for rows in splits.values():
        _check_length(rows.max_length)
    counts = {name: len(rows) for name, rows in splits.items()}
    files: list[str] = []
    with whole_folder(settings.out) as folder:
        for name, rows in splits.items():
            make_folder(folder / name)
            writer = _SplitWriter(folder / name, settings)
            for batch in in_batches(splits, name, advanced):
                writer.add(batch, rows.max_length)
            files += [f"{name}/{file}" for file in writer.finish(settings.facts)]
        write_atomically(folder / "dataset_dict.json", json.dumps({"splits": list(splits)}).encode())
        seal(folder, dict.fromkeys(files), {**settings.facts, "trainer": settings.trainer, "rows": counts})
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
        wanted, arrays = self._settings.columns, dict(checked(batch, length))
        if "position_ids" in arrays:
            arrays["seq_lengths"] = segments(arrays["position_ids"], length)
            if wanted.get("attention_mask") == "int32":
                numbers = np.cumsum(arrays["position_ids"] == 0, axis=1)
                arrays["attention_mask"] = np.where(arrays["attention_mask"] != 0, numbers, 0)
        columns = [_lists(arrays[name], kind) for name, kind in wanted.items()]
        if self._writer is None or self._sink.tell() > FILE_BYTES:
            self._next()
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def finish(self, facts: Mapping[str, Any]) -> list[str]:
        """Close the files and give them their names, which it returns."""
        if self._writer is None:
            self._next()  # a split without rows is a file without batches
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
        return names

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
    """Lengths of the documents of each row, the padding as the last of them.

    One wrong length is taken without a word by what reads them, so their sum is seen to be the row.
    """
    found = []
    for row in position_ids:
        starts = np.flatnonzero(row == 0)
        lengths = np.diff(np.append(starts, length)).astype(np.int32)
        if not len(starts) or starts[0] != 0 or int(lengths.sum()) != length:
            raise ExportError("the documents of a row do not fill it", why=f"lengths {lengths.tolist()}")
        ramp = np.arange(length) - np.repeat(starts, lengths)
        if not np.array_equal(ramp, row):
            raise ExportError("positions of a row do not count its documents")
        found.append(lengths)
    return found


def _check_length(length: int) -> None:
    if length % MULTIPLE:
        below = max(length // MULTIPLE * MULTIPLE, MULTIPLE)
        raise UsageError(
            f"rows of {length} tokens",
            why=f"trainers pad to multiples of {MULTIPLE} in silence, so this would not be the length they train on",
            fix=f"--length {below} or --length {below + MULTIPLE}",
        )


def _arrow(kind: str) -> Any:
    return {"int8": pa.int8(), "int32": pa.int32()}[kind]


def _lists(rows: NDArray[Any] | list[NDArray[np.int32]], kind: str) -> Any:
    """A column of lists from rows of numbers, without a Python object for each."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.concatenate(list(rows)) if len(lengths) else np.empty(0)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(kind), type=_arrow(kind)))
