"""Small data sets of every kind of field, and their builds."""

import json
import struct
import threading
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from stored_items import items

from latentcache.fields.protocol import DescribeContext
from latentcache.fields.registry import field_kind, load
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings


def pixels(seed, height=64, width=64):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def draw(path, seed, *, height=64, width=64, **options):
    """One image of noise, in the format of the path's extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, height, width)).save(path, **options)
    return path


def png_with_text(data, text):
    """Change the comment of a PNG: same pixels, another file."""
    info, buffer = PngInfo(), BytesIO()
    info.add_text("comment", text)
    with Image.open(BytesIO(data)) as image:
        image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def jpeg_with_comment(data, text):
    """Add a COM segment to a JPEG: same samples, another file."""
    body = text.encode("ascii")
    return data[:2] + b"\xff\xfe" + struct.pack(">H", len(body) + 2) + body + data[2:]


@dataclass(frozen=True)
class Case:
    field: str
    settings: dict
    suffix: str

    def fields(self, **changes):
        return {self.field: field_kind(self.field).settings(**self.settings | changes)}

    def path(self, folder, number):
        return folder / f"{number:03}{self.suffix}"

    def write(self, folder, number, seed=None):
        """Write sample ``number`` with the content of ``seed``."""
        seed, path = number if seed is None else seed, self.path(folder, number)
        if self.suffix == ".png":
            return draw(path, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": f"document {seed} " * (seed % 7 + 1)}) + "\n")
        return path

    def data(self, folder, count):
        for number in range(count):
            self.write(folder, number)
        return folder

    def spoil(self, folder, number):
        path = self.write(folder, number)
        path.write_bytes(path.read_bytes()[:-20])
        return path


CASES = {
    "latents": Case("latents", {"model": "stub", "resolutions": (64,), "bucket_step": 32}, ".png"),
    "input_ids": Case("input_ids", {"tokenizer": "stub"}, ".jsonl"),
    "edge_map": Case("edge_map", {}, ".png"),
}


class Recorder:
    def __init__(self):
        self.plans, self.warnings, self.seen = [], [], 0

    def planned(self, plan):
        self.plans.append(plan)

    def advanced(self, progress):
        self.seen += 1

    def warned(self, message):
        self.warnings.append(message)


def settings(case, data, *, recipe=None, **changes):
    fields = changes.pop("fields", None)
    return BuildSettings(
        data=data,
        out=changes.pop("out", data.with_name("cache")),
        fields=case.fields(**recipe or {}) if fields is None else fields,
        device="cpu",
        **changes,
    )


def built(case, data, *, observer=None, **changes):
    return within(60, lambda: build_cache(settings(case, data, **changes), observer=observer))


def rows_of(cache, field):
    """Sample name -> item keys of one field, in order."""
    keys = {}
    for name, key, _ in items(cache, field):
        keys.setdefault(name.removesuffix(":1"), []).append(key)
    return keys


def arrays_of(cache, field):
    """Sample name -> the stored arrays of one field."""
    arrays = {}
    for name, _, array in items(cache, field):
        arrays.setdefault(name.removesuffix(":1"), []).append(array)
    return arrays


def described(snapshot, name):
    """Describe a field of a snapshot with its current encoder."""
    rows = snapshot.fields[name]
    context = DescribeContext(recipe=rows.recipe, provenance=rows.provenance, device="cpu", check=True)
    return load(rows.kind.describer)(rows.kind.settings(), context)


def reasons(report):
    return {rejection.name: rejection.reason for rejection in report.rejected}


def tree(folder):
    """Read every file below a folder, except locks and reports."""
    paths = [path for path in sorted(folder.rglob("*")) if path.name != "builder.lock"] if folder.exists() else []
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def within(seconds, work):
    """Return the result of ``work``; fail after a timeout."""
    box = []

    def run():
        try:
            box.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert box, f"still running after {seconds} s"
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
