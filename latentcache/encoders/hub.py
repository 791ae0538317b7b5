"""File or folder on this disk for the name of a model or tokenizer.

Guarantee: a word that was meant as a path is never looked up on the network. The network is asked first, once. A
local hub cache may hold a part of a repository or an old revision, and a recipe must not depend on that. Without a
network the local hub cache is used; a file that it lacks is an error here or where it is read.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from latentcache.encoders.faults import first_line
from latentcache.errors import LatentcacheError, ModelNotFoundError, UsageError, option
from latentcache.value import Value

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_TIMEOUT_S = 10.0
_STUB = re.compile(r"stub(?::delay_ms=([0-9]{1,6}))?")
#: Ends of names of files, which no repository has.
_FILES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".gguf", ".msgpack", ".onnx", ".json")


class Wanted(Value):
    """Model, pipeline or tokenizer to look for."""

    what: str
    """``model``, ``pipeline`` or ``tokenizer``."""
    argument: str
    """Argument that takes it."""
    takes: str
    """Everything that the argument takes, for the error."""
    files: tuple[str, ...]
    """Patterns of the files to download."""
    needed: tuple[str, ...] = ()
    """Files without which a folder of the local hub cache is not used: other tools fetch parts of a repository."""


def is_hub_id(word: str) -> bool:
    """True if a word that is not a path here could be ``org/name``."""
    if _HUB_ID.fullmatch(word) is None or word.startswith((".", "~")):
        return False
    return Path(word).suffix not in _FILES and not Path(Path(word).parts[0]).is_dir()


def expanded(word: str) -> Path:
    """With the home folder for ``~``; unchanged if there is no such user."""
    return Path(os.path.expanduser(word))  # noqa: PTH111 - Path.expanduser fails without such a user


def find(word: str, wanted: Wanted, *, revision: str = "") -> tuple[Path, str]:
    """File or folder of a path or hub id, and the commit of a hub id; raises ModelNotFoundError.

    The network is not asked if the local hub cache holds ``revision``, the commit of an earlier build.
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
            fix_python=f"check the path; {wanted.argument} is {wanted.takes}",
        )
    folder = hub_folder(word, wanted, revision=revision)
    return folder, folder.name if folder.parent.name == "snapshots" else ""


def hub_folder(name: str, wanted: Wanted, *, revision: str = "") -> Path:
    """Folder of a hub id in the local hub cache; arguments and errors as of :func:`find`."""
    # Half a second that only users of a hub id should pay.
    from huggingface_hub import HfApi, snapshot_download

    def local(revision: str | None = None) -> Path | None:
        with suppress(OSError, ValueError):
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
            if all((folder / file).is_file() for file in wanted.needed):
                return folder
        return None

    if revision and (known := local(revision)):
        return known
    try:
        # Asked apart: without a network ``snapshot_download`` silently returns whatever the local cache has.
        commit = HfApi().repo_info(name, timeout=_HUB_TIMEOUT_S).sha
        files = list(wanted.files)
        return Path(snapshot_download(name, revision=commit, allow_patterns=files, etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # noqa: BLE001 - the classes differ between versions of two libraries
        failure = error
    if cached := local():
        return cached
    what = f"{name}: neither a folder here nor a {wanted.what} that can be downloaded"
    where, why = name, "this machine is offline, or the repository does not exist or is closed: "
    fix = f"on a machine with a network: `hf download {name} --local-dir FOLDER`; then give FOLDER"
    if type(failure).__name__ == "GatedRepoError":
        patterns = " ".join(f"'{pattern}'" for pattern in wanted.files)
        what = f"{name}: its owner gives access to users who are logged in and have accepted the terms"
        where, why = f"https://huggingface.co/{name}", ""
        fix = (
            "accept the terms on that page, `hf auth login`, and run this again; it downloads what"
            f" `hf download {name} --include {patterns}` does"
        )
    raise ModelNotFoundError(what, where=where, why=why + first_line(failure), fix=fix)


def recorded(word: str, revision: str) -> str:
    """Path of the model that a cache names: itself, or the recorded commit of a hub id. No network is asked.

    Raises:
        ModelNotFoundError: It is not on this machine.
    """
    if is_stub(word) or expanded(word).exists():
        return word
    if not is_hub_id(word):
        raise ModelNotFoundError("no such file or folder", where=word, fix="check the path")
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE, f"models--{word.replace('/', '--')}", "snapshots", revision)
    if revision and folder.is_dir():
        return str(folder)
    raise ModelNotFoundError("not in the local hub cache", where=word, fix=f"`hf download {word}`")


def not_compared(what: str, word: str, error: LatentcacheError, flag: str) -> str:
    """Sentence for ``Described.not_compared``."""
    return f"{what} {word} was not checked ({error.args[0]}); add {flag}"


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
