"""File or folder on this disk for the name of a model or tokenizer.

Guarantee: a word that was meant as a path is never looked up on the network. ``huggingface_hub`` asks the network for
the newest commit, unless an earlier build names one, and completes a folder that other tools downloaded in part.
Without a network it uses the local hub cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from latentcache.encoders.faults import first_line
from latentcache.errors import ModelNotFoundError, UsageError, option
from latentcache.value import Value

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_STUB = re.compile(r"stub(?::delay_ms=([0-9]{1,6}))?")
#: Ends of names of files, which no repository has.
_FILES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".gguf", ".msgpack", ".onnx", ".json")


class Wanted(Value):
    """Model, pipeline or tokenizer to look for."""

    argument: str
    """Argument that takes it."""
    takes: str
    """Everything that the argument takes, for the error."""
    files: tuple[str, ...]
    """Patterns of the files to download."""


def is_hub_id(word: str) -> bool:
    """True if a word that is not a path here could be ``org/name``."""
    if _HUB_ID.fullmatch(word) is None or word.startswith((".", "~")):
        return False
    return Path(word).suffix not in _FILES and not Path(Path(word).parts[0]).is_dir()


def expanded(word: str) -> Path:
    """With the home folder for ``~``; unchanged if there is no such user."""
    return Path(os.path.expanduser(word))  # noqa: PTH111 - Path.expanduser fails without such a user


def find(word: str, wanted: Wanted, *, revision: str = "", offline: bool = False) -> tuple[Path, str]:
    """File or folder of a path or hub id, and the commit of a hub id; raises ModelNotFoundError.

    ``revision``: the commit of an earlier build. ``offline``: nothing is downloaded.
    """
    path = expanded(word)
    if path.exists():
        return path, ""
    if not is_hub_id(word):
        raise ModelNotFoundError(
            "no such file or folder",
            argument=wanted.argument,
            value=word,
            where=str(path.absolute()),
            fix=f"check the path; {option(wanted.argument)} takes {wanted.takes}",
        )
    folder = download(word, wanted, revision=revision, offline=offline)
    return folder, folder.name if folder.parent.name == "snapshots" else ""


def download(name: str, wanted: Wanted, *, revision: str = "", offline: bool = False) -> Path:
    """Folder of a hub id in the local hub cache; arguments and errors as of :func:`find`."""
    # Half a second that only users of a hub id should pay.
    from huggingface_hub import snapshot_download

    files = list(wanted.files)
    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=files, local_files_only=offline)
    except Exception as error:
        by_hand = f"`hf download {name} --local-dir FOLDER` where there is a network, then give FOLDER"
        raise ModelNotFoundError(
            "not in the local hub cache" + ("" if offline else ", and it cannot be downloaded"),
            argument=wanted.argument,
            value=name,
            where=f"https://huggingface.co/{name}",
            why=first_line(error),
            fix=f"{by_hand}; for a closed repository accept its terms on that page and run `hf auth login` before",
        ) from error
    return Path(folder)


def is_stub(word: str) -> bool:
    """True if a word names a documented encoder without torch: ``stub[:delay_ms=N]``."""
    return word.partition(":")[0] == "stub"


def stub_delay(word: str, argument: str) -> int:
    """The N of ``stub:delay_ms=N``."""
    match = _STUB.fullmatch(word)
    if match is None:
        fix = "use stub or stub:delay_ms=20"
        raise UsageError("unknown option of the stub", argument=argument, value=word, fix=fix)
    return int(match[1] or 0)
