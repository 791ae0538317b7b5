"""The objects below one URL of a store: S3, Google Cloud Storage, Azure. obstore moves the bytes.

A store that does not answer is asked again for five minutes. Every error says its cause and a fix, and never shows
credentials. https://developmentseed.org/obstore/latest/
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pool_threads
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from latentcache.errors import RemoteError, UsageError
from latentcache.store.atomic_io import as_store_error, make_folder, sync_file

#: Bytes of a part of a file that goes up or comes down.
PART_BYTES = 8 << 20
#: Objects that are fetched at a time.
_TOGETHER = 8
#: Seconds for which a store that does not answer is asked again, of a try of the client, and of the longest pause.
_RETRY_S, _TRY_S, _PAUSE_S = 300.0, 5.0, 8.0
#: Words in an error of obstore -> what it means, and the fix; those at the end are of every other error.
_CAUSES = {
    "NoSuchBucket": ("the bucket does not exist", "make the bucket, or check the URL"),
    "169.254.169.254": ("no credentials", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "metadata.google": ("no credentials", "set GOOGLE_APPLICATION_CREDENTIALS"),
    "RequestTimeTooSkewed": ("the clock of this machine is wrong", "set the clock, then run the same command again"),
    "ExpiredToken": ("the credentials have expired", "renew the credentials, then run the same command again"),
    "QuotaExceeded": ("the bucket is full", "make room or raise the quota, then run the same command again"),
    "StorageFull": ("the bucket is full", "make room in the store, then run the same command again"),
    "error sending request": ("the store does not answer", "check the network and AWS_ENDPOINT_URL"),
    "403 Forbidden": ("access is denied", "give credentials that may list, read and write below this URL"),
    "": ("the store reports an error", "run the same command again"),
}
#: Problems that another try may solve.
_TRANSIENT = ("the store does not answer", "the store reports an error")

Result = TypeVar("Result")


class Bucket:
    """The objects below one URL. Every error of the store is a RemoteError."""

    def __init__(self, url: str, *, retry_s: float = _RETRY_S) -> None:
        self.url = _checked(url)
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            fix = "pip install 'latentcache[s3]'"
            raise UsageError("object storage needs obstore", why=str(error), fix=fix) from error
        self._obstore: Any = obstore
        self._from_url: Any = from_url
        self._retry_s = retry_s
        self._first_warning = threading.Lock()
        self._store = self._open(self.url)

    def _open(self, url: str) -> Any:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options: dict[str, Any] = {
            "client_options": {"allow_http": endpoint.startswith("http://")},
            "retry_config": {"max_retries": 100, "retry_timeout": timedelta(seconds=min(self._retry_s, _TRY_S))},
        }
        if url.startswith("s3:") and "AWS_PROFILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ:
            options["credential_provider"] = _of_profile()
        with self._named():
            return self._from_url(url, **options)

    def read(self, key: str) -> tuple[bytes, str]:
        """An object and its etag; FileNotFoundError if there is none."""

        def read() -> tuple[bytes, str]:
            result = self._obstore.get(self._store, key)
            return bytes(result.bytes()), str(result.meta["e_tag"])

        return self._patiently(read)

    def ranges(self, key: str, first: Sequence[int], length: Sequence[int]) -> list[bytes]:
        """Ranges of an object; those that are near each other are one request."""

        def ranges() -> list[bytes]:
            return list(map(bytes, self._obstore.get_ranges(self._store, key, starts=first, lengths=length)))

        return self._patiently(ranges)

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each object in a folder."""
        return {key: size for key, (size, _) in self.objects(folder).items()}

    def objects(self, folder: str = "") -> dict[str, tuple[int, datetime]]:
        """Bytes of each object in a folder, and when it was written by the store's clock."""

        def listed() -> list[Any]:
            return [item for page in self._obstore.list(self._store, folder or None) for item in page]

        items = self._patiently(listed)
        return {str(item["path"]): (int(item["size"]), item["last_modified"]) for item in items}

    def now(self) -> datetime:
        """The time by the store's clock, by an object that is written for it."""
        key = f"probe-{secrets.token_hex(8)}"
        self.write(key, b"1")
        written: datetime = self._patiently(lambda: self._obstore.head(self._store, key)["last_modified"])
        self.remove(key)
        return written

    def check_conditions(self) -> None:
        """Raise RemoteError if the store refuses to write, or writes although a condition does not hold."""
        key = f"probe-{secrets.token_hex(8)}"
        self.write(key, b"1")
        try:
            is_kept = not self.write(key, b"2") and not self.write(key, b"3", '"0"')
        finally:
            self.remove(key)
        if not is_kept:
            raise RemoteError(
                f"{self.url}: this store ignores conditions, so two that push would lose a snapshot in silence",
                where=self.url,
                fix="use a store with conditional writes; or build into a folder, and push it with --single-writer if"
                " you alone push to this URL",
            )

    def write(self, key: str, data: bytes, etag: str = "") -> bool:
        """Write an object in place of the one with this etag, or a new one; False: another is there."""
        exceptions = self._obstore.exceptions
        mode = {"e_tag": etag} if etag else "create"

        def put() -> bool:
            try:
                self._obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return False
            return True

        return self._patiently(put)

    def send(self, path: Path, key: str) -> None:
        """Write a file, in parts; the object appears whole."""
        if is_stand_in(path):
            fix = f"run the same command again; `latentcache verify {self.url}` names what is missing"
            raise RemoteError(f"{self.url}/{key} was removed while it was in use", where=self.url, fix=fix)
        self._patiently(lambda: self._obstore.put(self._store, key, path, chunk_size=PART_BYTES))

    def fetch(self, key: str, path: Path) -> None:
        """Write an object to a file, durably; one that is there may have another size."""

        def fetch() -> None:
            try:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb") as file:
                    for part in self._obstore.get(self._store, key).stream(min_chunk_size=PART_BYTES):
                        file.write(part)
                        self._check_process_goes_on()
                    file.truncate()
                sync_file(path)
            except (FileNotFoundError, RemoteError):
                raise
            except OSError as error:
                raise as_store_error(error, path) from error

        self._patiently(fetch)

    def fetch_all(self, paths: Mapping[str, Path]) -> None:
        """Write each object to its file, several at a time."""
        for folder in {path.parent for path in paths.values()}:
            make_folder(folder)
        with ThreadPoolExecutor(_TOGETHER) as pool:
            list(pool.map(self.fetch, paths.keys(), paths.values()))

    def copy(self, source: str, key: str) -> None:
        """Write an object that is below another URL here too, inside the store if the bucket is the same."""
        origin, target = urlsplit(f"{source}/{key}"), urlsplit(f"{self.url}/{key}")
        if origin[:2] == target[:2]:
            bucket = self._open(f"{target.scheme}://{target.netloc}")
            self._patiently(lambda: self._obstore.copy(bucket, origin.path.lstrip("/"), target.path.lstrip("/")))
            return
        with tempfile.TemporaryDirectory(prefix="latentcache-") as folder:
            path = Path(folder, Path(key).name)
            Bucket(source, retry_s=self._retry_s).fetch(key, path)
            self.send(path, key)

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._patiently(lambda: self._obstore.delete(self._store, key))

    def _patiently(self, action: Callable[[], Result]) -> Result:
        """What an action gives, which is tried again if the store does not answer. That is said once."""
        end = time.monotonic() + self._retry_s
        pause = 0.5
        while True:
            try:
                with self._named():
                    return action()
            except RemoteError as error:
                left = end - time.monotonic()
                self._check_process_goes_on()
                if not error.is_transient or left <= 0:
                    raise
                if self._first_warning.acquire(blocking=False):  # of all threads, and never again
                    warnings.warn(f"{error.what}: trying again for {self._retry_s:.0f} s", stacklevel=2)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSE_S)

    def _check_process_goes_on(self) -> None:
        if pool_threads._shutdown:  # the interpreter waits for the threads that fetch
            raise RemoteError("the process ends", where=self.url)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the store with their cause and fix."""
        exceptions = self._obstore.exceptions
        try:
            yield
        except (FileNotFoundError, exceptions.BaseError) as error:
            text = str(error)
            if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in text:
                raise
            is_denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
            said = f"{text} 403 Forbidden" if is_denied else text
            problem, fix = next(cause for words, cause in _CAUSES.items() if words in said)
            raise RemoteError(
                f"{self.url}: {problem}",
                where=self.url,
                why=text.splitlines()[0].partition(": <?xml")[0],
                fix=fix,
                is_transient=problem in _TRANSIENT,
            ) from None


def is_stand_in(path: Path) -> bool:
    """True if a file has no bytes of its own and stands in for an object: its time is 0, and it takes no space."""
    return path.exists() and path.stat().st_mtime_ns == 0 == path.stat().st_blocks


def _checked(url: str) -> str:
    """A URL without a slash at its end; raises UsageError."""
    if set(url) & set("@?#"):
        fix = "put credentials into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and the URL without them"
        raise UsageError(f"{url.partition(':')[0]}://...: a URL with credentials or a query", fix=fix)
    if not re.fullmatch(r"(s3|gs|az)://[\w.-]+(/[\w.~/+=:%&,-]*)?", url, re.ASCII):
        fix = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, in ASCII, without spaces and quotes"
        raise UsageError(f"{url}: not the URL of a bucket", fix=fix)
    return url.rstrip("/")


def _of_profile() -> Any:
    """The credentials of AWS_PROFILE, which obstore does not read."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        fix = "pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise UsageError("AWS_PROFILE needs boto3", why=str(error), fix=fix) from error
    return Boto3CredentialProvider()
