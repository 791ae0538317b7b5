"""``latentcache export``: tokens and images as files for trainers without a latentcache loader."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import flags
from latentcache.cli.console import Result, say
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import ProgressDisplay
from latentcache.errors import UsageError, count_of

if TYPE_CHECKING:
    from latentcache.export.run import ExportSettings

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
#: Layout -> arguments of TRL's ``SFTConfig``. Without ``padding_free`` the documents of a row see each other, and
#: TRL rejects it beside its default ``max_length`` (``sft_trainer.py`` of TRL 1.16).
_PREPARED = "dataset_kwargs={'skip_prepare_dataset': True}, max_length=None"
_TRL = {"pad": _PREPARED, "chunk": _PREPARED, "pack": f"{_PREPARED}, padding_free=True"}

HELP = "Write a cache as the files that another trainer reads."
EXAMPLES = """\
latentcache export images.latentcache train/ --to kohya --release lora-scripts
latentcache export chats.latentcache rows --pad 4096 --for trl
latentcache export texts.latentcache tokens --to megatron
"""


def export(
    cache: flags.Cache,
    target: Path | None = argument("OUT", "The folder to create; or to bring up to date, of images.", None),
    *,
    undo: bool = option(
        False, "--undo", "Take back an export of images: what it wrote and nothing else. export --undo OUT"
    ),
    run: flags.Run,
    quiet: flags.Quiet = False,
) -> Result:
    """Write tokens as rows or documents, or images with their latents for a trainer."""
    from latentcache.export.run import IMAGE_FORMATS, ExportSettings, export_cache

    if undo:
        return _undone(target or cache)
    if target is None:
        raise UsageError("OUT: is missing", fix=f"latentcache export {shlex.quote(str(cache))} OUT")
    settings = ExportSettings(cache=cache, out=target, **run)
    if settings.format in IMAGE_FORMATS:
        return _images(settings, quiet=quiet)
    noun = "rows" if settings.layout else "documents"
    with closing(ProgressDisplay(quiet=quiet)) as display:
        made = export_cache(settings, lambda done, total: display.counted_up(done, total, noun))
    payload = {"cache": str(cache), "out": str(target), "format": settings.format, **made}
    return Result(payload, _lines(payload))


def _images(settings: ExportSettings, *, quiet: bool) -> Result:
    """Latents, captions and images as the folder of a trainer."""
    from latentcache.export.images import ImageExport

    images = ImageExport(settings)
    if not quiet:
        say(f"to write: {images.plan}")
    with closing(ProgressDisplay(quiet=quiet)) as display:
        about = images.write(lambda done, total: display.counted_up(done, total, "images"))
    return Result(
        {"cache": str(settings.cache), "out": str(settings.out), **about}, _lines_of_images(settings, about)
    )


def _lines_of_images(settings: ExportSettings, about: dict[str, Any]) -> Iterator[str]:
    if about["left_out"]:
        lacking = "the cache lacks a field of them, or rejected them"
        yield f"{count_of(about['left_out'], 'samples are')} left out: {lacking}; `latentcache info` names them"
    if about["rejected"]:
        rejected = count_of(about["rejected"], "inputs")
        yield f"without {rejected} that the build rejected; `latentcache info` names them"
    if about["redrawn"]:
        redrawn = count_of(about["redrawn"], "images are")
        yield f"{redrawn} written as upright PNG: the trainer does not look at EXIF data, or does not read the format"
    if about["several_lines"]:
        several = count_of(about["several_lines"], "captions have")
        yield f"{several} several lines: the trainer reads the first one where it encodes text itself"
    if about["partners_left_out"]:
        partners = count_of(about["partners_left_out"], "masks and control images are")
        yield f"{partners} left out: alpha channels, or kinds that this trainer does not read from files"
    if about["no_caption"]:
        missing = count_of(about["no_caption"], "images have")
        yield f"{missing} no caption: the trainer uses the class words, class_tokens or the name of the folder"
    counts = f"{about['written']} written, {about['kept']} kept, {about['deleted']} deleted"
    yield f"{settings.out} is complete: {count_of(about['samples'], 'images')}, {about['files']} files ({counts})"
    yield "for the trainer:"
    yield from (f"  {line}" for line in about["advice"])


def _undone(out: Path) -> Result:
    from latentcache.export.folder import Folder, is_export

    if not is_export(out):
        raise UsageError(f"{out}: no export of images is here", where=str(out), fix="give the folder of an export")
    deleted, changed = Folder(out).undo()
    lines = [f"{count_of(deleted, 'files')} deleted from {out}"]
    lines += [f"{name} was changed since the export, and stays" for name in changed]
    return Result({"out": str(out), "deleted": deleted, "kept": changed}, lines)


def _lines(payload: dict[str, Any]) -> Iterator[str]:
    for split, number in payload.get("rows", {}).items():
        yield f"{split}: {count_of(number, 'rows')} of {_row(payload)} ({_about(payload, split)})"
        for reason, tokens in payload["tokens_dropped"][split].items():
            if tokens:
                yield f"  dropped: {tokens} tokens ({reason.replace('_', ' ')})"
    for split, number in payload.get("splits", {}).items():
        yield f"{split}: {count_of(number, 'documents')}, {payload['tokens'][split]} tokens as {payload['dtype']}"
    if payload["part"]:
        part = f"this is part {payload['part']} of DATA"
        yield f"{part}: join all parts with `latentcache merge`, and export the result"
    if "last_id" in payload:
        last = payload["last_id"]
        differ = "documents end with different ids: none marks an end"
        yield differ if last is None else f"every document ends with id {last}"
    values = {"out": shlex.quote(payload["out"]), "length": payload.get("length")}
    values |= {"python": repr(payload["out"]), "train": repr(f"{payload['out']}/train")}
    values["trl"] = _TRL.get(payload.get("layout", ""), "")
    values["width"] = 2 if payload.get("dtype") == "uint16" else 4
    after = _NEXT[payload.get("for", payload["format"])].format(**values)
    yield f"{payload['out']} is complete. Next: {after}"


def _row(payload: dict[str, Any]) -> str:
    most = "up to " if payload["format"] == "mds" and payload["layout"] == "pad" else ""
    return f"{most}{payload['length']} tokens"


def _about(payload: dict[str, Any], split: str) -> str:
    tokens = f"{payload['tokens'][split]} tokens"
    if "dtype" in payload:
        return f"{tokens} as {payload['dtype']}"
    return f"{tokens}, {payload['packing_efficiency'][split]:.1%} full"
