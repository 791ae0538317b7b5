"""A process that tokenises: frames of records in, frames of documents out, until its input ends.

Decides how records and documents travel between processes: a frame is two lengths (u32 each, little endian), a JSON
head and raw bytes. Nothing is pickled; the tokenizer comes as text in the first frame. Guarantee: one answer for each
frame, in order; a worker without a parent ends.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import IO, Any

import numpy as np

from latentcache import failpoint
from latentcache.encoders.opening_tokens import open_tokeniser
from latentcache.encoders.tokenising import TokenisedDocument, Tokeniser, TokeniserDescription
from latentcache.errors import LatentcacheError
from latentcache.identity.content import HASH_BYTES
from latentcache.sources.records import Message, Record
from latentcache.sources.sample import Refusal
from latentcache.token_recipe import TokenRecipe

_LENGTHS = struct.Struct("<II")
_REFUSAL = ("name", "cause", "detail", "hint", "line", "field")

Result = TokenisedDocument | Refusal


def put_frame(stream: IO[bytes], head: Any, body: bytes = b"") -> None:
    """Write one frame."""
    packed = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")
    stream.write(_LENGTHS.pack(len(packed), len(body)) + packed + body)
    stream.flush()


def get_frame(stream: IO[bytes]) -> tuple[Any, bytes] | None:
    """Read one frame; None where the stream has ended."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head_bytes, body_bytes = _LENGTHS.unpack(lengths)
    head, body = stream.read(head_bytes), stream.read(body_bytes)
    if len(head) < head_bytes or len(body) < body_bytes:
        return None
    return json.loads(head.decode("utf-8", "surrogateescape")), body


def pack_records(records: Sequence[Record]) -> list[list[Any]]:
    """Records as JSON values."""
    return [[r.source, r.line, r.content.hex(), r.text, _packed_messages(r), r.tools] for r in records]


def unpack_records(values: Sequence[Sequence[Any]]) -> list[Record]:
    """Inverse of :func:`pack_records`."""
    return [
        Record(
            source=source,
            line=line,
            content=bytes.fromhex(content),
            text=text,
            messages=None if messages is None else tuple(_message(*parts) for parts in messages),
            tools=tools,
        )
        for source, line, content, text, messages, tools in values
    ]


def pack_results(results: Sequence[Result]) -> tuple[list[Any], bytes]:
    """Head and body of the answer to one frame."""
    head: list[Any] = []
    parts: list[bytes] = []
    for result in results:
        if isinstance(result, Refusal):
            head.append({name: getattr(result, name) for name in _REFUSAL})
            continue
        head.append([len(result.ids), len(result.runs), result.control_strings, result.ids.dtype.str])
        parts += [result.content, result.ids.tobytes(), result.runs.astype("<u4").tobytes()]
    return head, b"".join(parts)


def unpack_results(head: Sequence[Any], body: bytes) -> list[Result]:
    """Inverse of :func:`pack_results`; documents lie over the same memory."""
    results: list[Result] = []
    place = 0
    for one in head:
        if isinstance(one, dict):
            results.append(Refusal(**one))
            continue
        tokens, runs, control, dtype = one
        content = body[place : place + HASH_BYTES]
        place += HASH_BYTES
        ids = np.frombuffer(body, dtype=dtype, count=tokens, offset=place)
        place += ids.nbytes
        spans = np.frombuffer(body, dtype="<u4", count=2 * runs, offset=place).reshape(-1, 2)
        place += spans.nbytes
        results.append(TokenisedDocument(content=content, ids=ids, runs=spans, control_strings=control))
    return results


def pack_description(description: TokeniserDescription) -> dict[str, Any]:
    """A description as JSON values."""
    return asdict(description) | {"recipe": description.recipe.as_json()}


def unpack_description(value: dict[str, Any]) -> TokeniserDescription:
    """Inverse of :func:`pack_description`."""
    known = {field.name: _frozen(value[field.name]) for field in fields(TokeniserDescription)}
    return TokeniserDescription(**known | {"recipe": TokenRecipe.from_json(value["recipe"])})


def serve() -> None:
    """The worker: a description first, then frames of records, each answered."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    failpoint.arm(os.environ.get(failpoint.VARIABLE), build=os.getppid())
    first = get_frame(stdin)
    if first is None:
        return
    tokeniser: Tokeniser | None = None
    try:
        tokeniser = open_tokeniser(unpack_description(first[0]))
    except LatentcacheError as error:
        put_frame(stdout, {"error": error.as_json()})
    while tokeniser is not None and (frame := get_frame(stdin)) is not None:
        records = unpack_records(frame[0])
        for record in records:
            failpoint.failpoint("encoding", f"{record.source}#{record.line}")
        try:
            head, body = pack_results(tokeniser.tokenise(records))
        except LatentcacheError as error:
            put_frame(stdout, {"error": error.as_json()})
            return
        put_frame(stdout, head, body)


def _packed_messages(record: Record) -> list[list[Any]] | None:
    if record.messages is None:
        return None
    return [[m.role, m.content, m.learned, [list(pair) for pair in m.fields]] for m in record.messages]


def _message(role: str, content: str, learned: bool, more: list[list[str]]) -> Message:
    return Message(role=role, content=content, learned=learned, fields=tuple((name, value) for name, value in more))


def _frozen(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value
