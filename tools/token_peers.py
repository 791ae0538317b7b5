"""Other ways to keep token ids for training, written and read the way their own users do.

Each candidate serves the rows of a plan as padded (B, L) int64 ``input_ids`` and ``attention_mask``, in this process
and with one thread, so that CPU time is what it costs. The floor is one mapped file of uint16 ids with offsets,
filled whole batch by whole batch. None of the libraries is a dependency; what is not there is left out:

    pip install -c constraints.txt datasets trl litdata mosaicml-streaming megatron-core

(litdata and mosaicml-streaming as in ``read_peers``; megatron-core 0.16.1 reads without a GPU.)
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Plan = list[list[int]]
Epoch = Callable[[Plan], Iterator[Any]]
Ids = Sequence[NDArray[np.uint16]]
PAD = 0


def flat(folder: Path, ids: Ids, length: int) -> dict[str, Epoch]:
    """The floor: one file and offsets. With labels, as our own rows have them, and without."""
    np.concatenate(ids).tofile(folder / "flat.bin")
    ends = np.cumsum([len(document) for document in ids])
    starts = [0, *ends[:-1].tolist()]
    spans = list(zip(starts, ends.tolist(), strict=True))
    tokens = np.memmap(folder / "flat.bin", dtype=np.uint16, mode="r")

    def read(plan: Plan, labelled: bool) -> Iterator[Any]:
        for rows in plan:
            shape = len(rows), length
            out, mask = np.full(shape, PAD, np.int64), np.zeros(shape, np.int64)
            labels = np.full(shape, -100, np.int64) if labelled else None
            for place, row in enumerate(rows):
                start, end = spans[row]
                size = min(end - start, length)
                out[place, :size] = tokens[start : start + size]
                mask[place, :size] = 1
                if labels is not None:
                    labels[place, :size] = out[place, :size]
            arrays = {"input_ids": out, "attention_mask": mask} | ({} if labels is None else {"labels": labels})
            yield {name: torch.from_numpy(array) for name, array in arrays.items()}

    return {
        "flat memmap and offsets": lambda plan: read(plan, False),
        "flat memmap and offsets, with labels": lambda plan: read(plan, True),
    }


def megatron(folder: Path, ids: Ids, length: int) -> dict[str, Epoch]:
    """Write ``.bin`` and ``.idx`` with ``IndexedDataset``; pad by hand."""
    library = importlib.import_module("megatron.core.datasets.indexed_dataset")
    prefix = str(folder / "megatron")
    builder = library.IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for document in ids:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(prefix + ".idx")
    found = library.IndexedDataset(prefix)
    return {"Megatron IndexedDataset, padded by hand": lambda plan: _by_hand(found.__getitem__, plan, length)}


def litdata(folder: Path, ids: Ids, length: int) -> dict[str, Epoch]:
    """Write chunks with ``litdata.optimize``; read by index, pad by hand. int32, as torch users do."""
    library = importlib.import_module("litdata")
    writer = importlib.import_module("litdata.streaming.writer")
    (folder / "litdata").mkdir()
    made = writer.BinaryWriter(cache_dir=str(folder / "litdata"), chunk_bytes=64 << 20)
    for number, document in enumerate(ids):
        made[number] = {"input_ids": torch.from_numpy(document.astype(np.int32))}
    made.done()
    made.merge()
    found = library.StreamingDataset(str(folder / "litdata"), shuffle=False)
    return {
        "litdata StreamingDataset, padded by hand": lambda plan: _by_hand(
            lambda r: found[r]["input_ids"], plan, length
        )
    }


def mds(folder: Path, ids: Ids, length: int) -> dict[str, Epoch]:
    """Write MDS; read by index, pad by hand."""
    library = importlib.import_module("streaming")
    with library.MDSWriter(out=str(folder / "mds"), columns={"tokens": "ndarray:uint16"}) as out:
        for document in ids:
            out.write({"tokens": document})
    found = library.StreamingDataset(local=str(folder / "mds"), batch_size=1, shuffle=False)
    return {"MDS StreamingDataset, padded by hand": lambda plan: _by_hand(lambda r: found[r]["tokens"], plan, length)}


def hugging_face(folder: Path, ids: Ids, length: int) -> dict[str, Epoch]:
    """Write Arrow lists; padded beforehand, by TRL's collator, and by that of transformers."""
    library = importlib.import_module("datasets")
    transformers = importlib.import_module("transformers")
    library.disable_progress_bars()
    cut = [document[:length].astype(np.int32) for document in ids]
    ragged = library.Dataset.from_dict({"input_ids": cut, "attention_mask": [np.ones(len(d), np.int8) for d in cut]})
    ragged.save_to_disk(str(folder / "ragged"))
    ragged = library.load_from_disk(str(folder / "ragged"))
    full = np.full((len(cut), length), PAD, np.int64)
    mask = np.zeros((len(cut), length), np.int64)
    for place, document in enumerate(cut):
        full[place, : len(document)], mask[place, : len(document)] = document, 1
    library.Dataset.from_dict({"input_ids": full, "attention_mask": mask}).save_to_disk(str(folder / "padded"))
    padded = library.load_from_disk(str(folder / "padded")).with_format("torch")
    found: dict[str, Epoch] = {}

    def collated(data: Any, collate: Callable[[Any], Any]) -> Epoch:
        return lambda plan: (collate(data.__getitems__(rows)) for rows in plan)

    found["HF padded before, torch format, default_data_collator"] = collated(
        padded, transformers.default_data_collator
    )
    tokenizer = _any_tokenizer(folder)
    by_length = transformers.DataCollatorWithPadding(tokenizer, padding="max_length", max_length=length)
    found["HF lists, DataCollatorWithPadding"] = collated(ragged, by_length)
    if importlib.util.find_spec("trl"):
        trl = importlib.import_module("trl.trainer.sft_trainer")
        own = trl.DataCollatorForLanguageModeling(pad_token_id=PAD, pad_to_multiple_of=length)
        found["HF lists, TRL collator"] = collated(ragged.remove_columns("attention_mask"), own)
    return found


PEERS: dict[str, tuple[str, Callable[[Path, Ids, int], dict[str, Epoch]]]] = {
    "megatron": ("megatron.core", megatron),
    "litdata": ("litdata", litdata),
    "mds": ("streaming", mds),
    "hugging face": ("datasets", hugging_face),
}


def token_peers(folder: Path, ids: Ids, length: int) -> tuple[dict[str, Epoch], list[str]]:
    """Every peer that is there, and why others are not.

    Args:
        folder: Where copies are written.
        ids: The documents.
        length: Tokens of a padded row.
    """
    found, missing = flat(folder, ids, length), []
    for name, (library, open_peer) in PEERS.items():
        try:
            if library == "streaming" and importlib.util.find_spec("torchvision") is None:
                sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))  # images only
            importlib.import_module(library)
            found |= open_peer(folder, ids, length)
        except Exception as error:  # noqa: BLE001 - a peer that does not run here is left out, and named
            missing.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return found, missing


def _by_hand(document: Callable[[int], Any], plan: Plan, length: int) -> Iterator[Any]:
    """Pad the rows of a ragged store by hand."""
    for rows in plan:
        out = torch.full((len(rows), length), PAD, dtype=torch.int64)
        mask = torch.zeros((len(rows), length), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids = np.asarray(document(row))[:length].astype(np.int64)
            out[place, : len(ids)] = torch.from_numpy(ids)
            mask[place, : len(ids)] = 1
        yield {"input_ids": out, "attention_mask": mask}


def _any_tokenizer(folder: Path) -> Any:
    """Create a tokenizer that only pads."""
    model = {"type": "WordLevel", "vocab": {"<pad>": PAD, "a": 1}, "unk_token": "a"}
    config = {"version": "1.0", "added_tokens": [], "model": model}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(config | empty))
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>")
