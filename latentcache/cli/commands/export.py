"""``latentcache export``: tokens and images as files for trainers without a latentcache loader."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from latentcache.cli import flags
from latentcache.cli.console import Result, say
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import ProgressDisplay
from latentcache.errors import UsageError, count_of

#: Settings of the trainer; the folder is ``{out}``, as Python text ``{python}``, and an id has ``{width}`` bytes.
_NEXT = {
    "llama-factory": "tokenized_path: {out}   (streaming: false; with --pack also neat_packing: true)",
    "trl": "datasets.load_from_disk({python})['train'] as train_dataset, SFTConfig({trl})",
    "unsloth": "datasets.load_from_disk({python})['train'] as train_dataset; do not call train_on_responses_only",
    "axolotl": "datasets: [{{path: {out}, ds_type: arrow, type: }}], skip_prepare_dataset: true",
    "plain": "datasets.load_from_disk({python})['train'].with_format('torch')",
    "megatron": "--train-data-path {out}/train   (or --data-path {out}/train --split 100,0,0)",
    "datatrove": "DatatroveFolderDataset({train}, seq_len=N, token_size={width})",
    "mds": "train_loader.dataset: {{local: {out}, split: train, max_seq_len: {length}}}",
}
#: Arguments of TRL's ``SFTConfig``. Without ``padding_free`` the documents of a packed row see each other, and TRL
#: rejects it beside its default ``max_length`` (``sft_trainer.py`` of TRL 1.16).
_TRL = "dataset_kwargs={'skip_prepare_dataset': True}, max_length=None"


def export(
    cache: flags.Cache,
    target: Path | None = argument("OUT", "The folder to create, or with images to update.", None),
    *,
    undo: bool = option(False, "--undo", "Take back an export: what it wrote and nothing else. export --undo OUT"),
    run: flags.Run,
    quiet: flags.Quiet = False,
) -> Result:
    """Write a cache as files that trainers and other programs read.

    Examples:
        latentcache export images.latentcache train/ --to kohya --release lora-scripts
        latentcache export chats.latentcache rows --pad 4096 --for trl
        latentcache export images.latentcache shards/ --to webdataset
    """
    from latentcache.export.folder import Folder, is_export
    from latentcache.export.images import ImageExport
    from latentcache.export.settings import IMAGE_FORMATS, ExportSettings
    from latentcache.export.shards import SampleExport
    from latentcache.export.tokens import TokenExport

    if undo:
        folder = target or cache
        if not is_export(folder):
            raise UsageError(f"{folder}: no export is here", where=str(folder), fix="give the folder of an export")
        deleted, changed = Folder(folder).undo()
        lines = [f"{count_of(deleted, 'files')} deleted from {folder}"]
        lines += [f"{name} was changed since the export, and stays" for name in changed]
        return Result({"out": str(folder), "deleted": deleted, "kept": changed}, lines)
    if target is None:
        raise UsageError("OUT: is missing", fix=f"latentcache export {shlex.quote(str(cache))} OUT")
    settings = ExportSettings(cache=cache, out=target, **run)
    of_others = SampleExport if settings.is_of_samples else TokenExport
    writer = (ImageExport if settings.format in IMAGE_FORMATS else of_others)(settings)
    if writer.resumes and not quiet:
        say(f"to write: {writer.plan}")
    with closing(ProgressDisplay(quiet=quiet)) as display:
        about = writer.run(lambda done, total: display.counted_up(done, total, writer.noun))
    payload = about | {"cache": str(cache), "out": str(target)}
    return Result(payload, _lines_of_images(payload) if "advice" in payload else _lines(payload))


def _lines_of_images(payload: Mapping[str, Any]) -> Iterator[str]:
    from latentcache.export.format import Format
    from latentcache.export.images import TRAINER_FORMATS

    form = TRAINER_FORMATS.get(payload["format"], Format)
    sentences = {
        "left_out": "samples are left out: the cache lacks a field of them; `latentcache info` names them",
        "rejected": "inputs are left out, because the build rejected them; `latentcache info` names them",
        "redrawn": "images are written as upright PNG: the trainer reads no EXIF data, or not this kind of file",
        "several_lines": f"captions have several lines: the trainer reads {form.several_lines} if it encodes text",
        "partners_left_out": "masks and control images are left out: the trainer reads no such files",
        "captions_left_out": "further captions are left out: the trainer takes one for each sample",
        "no_caption": f"images have no caption: the trainer {form.no_caption}",
        "unused": "items are left out: each sample has its first crop, unflipped, and its first caption",
    }
    for name, sentence in sentences.items():
        if payload.get(name):
            yield count_of(payload[name], sentence)
    yield from _part(payload)
    counts = f"{payload['written']} written, {payload['kept']} kept, {payload['deleted']} deleted"
    files = f"{count_of(payload['samples'], 'samples')}, {payload['files']} files"
    yield f"{payload['out']} is complete: {files} ({counts})"
    yield "next:"
    yield from (f"  {line}" for line in payload["advice"])


def _lines(payload: dict[str, Any]) -> Iterator[str]:
    layout, dtype = payload.get("layout"), payload.get("dtype")
    at_most = "up to " if (payload["format"], layout) == ("mds", "pad") else ""
    for split, number in payload.get("rows", {}).items():
        kind = f" as {dtype}" if dtype else f", {payload['packing_efficiency'][split]:.1%} full"
        length = f"{at_most}{payload['length']} tokens"
        yield f"{split}: {count_of(number, 'rows')} of {length} ({payload['tokens'][split]} tokens{kind})"
        for reason, tokens in payload["tokens_dropped"][split].items():
            if tokens:
                yield f"  dropped: {tokens} tokens ({reason.replace('_', ' ')})"
    for split, number in payload.get("splits", {}).items():
        yield f"{split}: {count_of(number, 'documents')}, {payload['tokens'][split]} tokens as {dtype}"
    yield from _part(payload)
    if "last_id" in payload:
        last = payload["last_id"]
        differ = "documents end with different ids: none marks an end"
        yield differ if last is None else f"every document ends with id {last}"
    values = {"out": shlex.quote(payload["out"]), "length": payload.get("length")}
    values |= {"python": repr(payload["out"]), "train": repr(f"{payload['out']}/train")}
    values["trl"] = f"{_TRL}, padding_free=True" if layout == "pack" else _TRL
    values["width"] = 2 if dtype == "uint16" else 4
    after = _NEXT[payload.get("for", payload["format"])].format(**values)
    yield f"{payload['out']} is complete. Next: {after}"


def _part(payload: Mapping[str, Any]) -> Iterator[str]:
    if payload.get("part"):
        part = f"this is part {payload['part']} of DATA"
        yield f"{part}: join all parts with `latentcache merge`, and export the result"
