"""A proxy between a client and an S3 server, which counts bytes and injects faults. Signatures stay valid."""

import contextlib
import re
import socket
import socketserver
import struct
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass
class Fault:
    """What happens to requests whose ``METHOD /path`` matches, after ``skip`` of them, ``times`` times."""

    kind: str
    """cut, lost (done, but the answer is cut), half-request, half-answer, slow, trickle, etag, or status and code."""
    match: str = "."
    times: int = 1_000_000
    skip: int = 0

    def applies(self, request):
        if not re.search(self.match, request) or not self.times:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class S3Proxy:
    """Listens at ``endpoint`` until it is closed; ``faults`` may change at any time."""

    def __init__(self, server):
        self.upstream = (urlsplit(server).hostname, urlsplit(server).port)
        self.faults, self.requests, self.answered, self.injected = [], [], {}, 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                with contextlib.suppress(OSError):
                    proxy.serve(self.request)

        socketserver.ThreadingTCPServer.allow_reuse_address = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def data_bytes(self):
        """Bytes of shards that were answered."""
        return sum(count for key, count in self.answered.items() if key.endswith("data.mdb"))

    def serve(self, client):
        head = _read_head(client)
        if not head:
            return
        request = head.split(b" HTTP/", 1)[0].decode()
        with self._lock:
            fault = next((fault for fault in self.faults if fault.applies(request)), None)
            self.requests.append(request)
            self.injected += fault is not None
        kind, length = fault.kind if fault else "", int(_header(head, "content-length") or 0)
        if kind != "cut":
            body = _read_body(client, head, length // 2 if kind == "half-request" else length)
        if kind in ("cut", "half-request"):
            _reset(client)
        elif kind[:1].isdigit():
            client.sendall(_refusal(*kind.split()))
        else:
            self._pass_on(client, request, self._ask(head, body), kind)

    def _pass_on(self, client, request, answer, kind):
        start = answer.index(b"\r\n\r\n") + 4
        if kind == "slow":
            time.sleep(1)
        if kind == "etag":
            answer = re.sub(rb'(?i)(\r\netag: )"[^"]*"', rb'\1"0123456789abcdef0123456789abcdef"', answer, count=1)
        if kind == "half-answer":
            client.sendall(answer[: start + (len(answer) - start) // 2])
        if kind in ("lost", "half-answer"):
            _reset(client)
            return
        with self._lock:
            key = request.split(" ")[1].split("?")[0]
            self.answered[key] = self.answered.get(key, 0) + (len(answer) - start) * request.startswith("GET")
        if kind == "trickle":
            for first in range(0, len(answer), 1 << 14):
                client.sendall(answer[first : first + (1 << 14)])
                time.sleep(1)
        else:
            client.sendall(answer)

    def _ask(self, head, body):
        lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
        with socket.create_connection(self.upstream) as server:
            server.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            return b"".join(iter(lambda: server.recv(1 << 20), b""))


def _refusal(status, code):
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
    head = f"HTTP/1.1 {status} injected\r\nContent-Type: application/xml\r\nRetry-After: 1\r\n"
    return f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode()


def _header(head, name):
    match = re.search(rf"(?i)\r\n{name}: *([^\r]*)".encode(), head)
    return match[1].decode() if match else ""


def _read_head(client):
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # byte by byte: what follows is the body
        part = client.recv(1)
        if not part:
            return b""
        head += part
    return head


def _read_body(client, head, length):
    if _header(head, "expect"):
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts = []
    while length and (part := client.recv(min(length, 1 << 20))):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _reset(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
