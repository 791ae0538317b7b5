"""From a hub id to a folder of this disk: what the local hub cache holds is used as it is, else it is fetched.

Decides whether a word is a hub id. Guarantee: the network is asked once, and never for what was meant as a path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from latentcache.errors import ModelNotFoundError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_TIMEOUT_S = 10.0


def is_hub_id(word: str) -> bool:
    """Whether a word that names nothing here could be ``org/name``."""
    return _HUB_ID.fullmatch(word) is not None and not word.startswith((".", "~"))


def expanded(word: str) -> Path:
    """With the home folder for ``~``; as it stands where there is no such user."""
    try:
        return Path(word).expanduser()
    except RuntimeError:
        return Path(word)


def snapshot(name: str, files: Sequence[str], is_whole: Callable[[Path], bool], *, what: str, flag: str) -> Path:
    """Folder of a hub id.

    Args:
        name: ``org/name``.
        files: Patterns of what is downloaded.
        is_whole: Whether a folder of the local hub cache holds what is needed.
        what: What it is, in a word.
        flag: What a user names it with.

    Raises:
        ModelNotFoundError: Not in the cache, and not within reach.
    """
    # Half a second that only users of a hub id should pay.
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(name, local_files_only=True))
        if is_whole(cached):
            return cached
    except (OSError, ValueError):
        pass  # not in the cache: ask the network
    try:
        return Path(snapshot_download(name, allow_patterns=[*files], etag_timeout=_HUB_TIMEOUT_S))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"{name} is neither a folder here nor a {what} within reach",
            where=name,
            why=f"this machine is offline, or the repository does not exist or is closed: {first_line(error)}",
            fix=f"where there is a network: `hf download {name} --local-dir FOLDER`; then {flag} FOLDER",
        ) from error


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
