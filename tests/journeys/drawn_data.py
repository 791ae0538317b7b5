"""Data sets as people have them, drawn by hypothesis: what is in each file, and how to write it.

A data set is a mapping of names below DATA to nodes. A node knows what a reader should find in it, so that
``file_truth`` can say what DATA means without opening a file.
"""

import functools
import gzip
import io
import json
import os
import tarfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from PIL import Image

#: Names of folders; one has the extension of an image.
FOLDERS = ("a", "b c", "Ünï", "x.png", "c.d", "日本")
STEMS = ("1", "2", "b", "é", "p q", "v.1", "-n")
FORMATS = {".png": "PNG", ".PNG": "PNG", ".jpg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}
TEXTS = ("", "a cat", "ein Bär, 日本", 'quoted "words", and more')
SPLITS = ("train", "test", "val")
#: Folders at the top, of splits and others.
TOPS = ((), (), (), SPLITS[:2], SPLITS, SPLITS[1:], SPLITS[:1], SPLITS[1:2], ("train", "e"), ("train", "test", "e"))
#: What an odd node with the name of a sample may be.
ODD = ("pipe", "dead", "outside", "inside")


@dataclass(frozen=True)
class Node:
    """A file, a pipe or a link, and what a reader should find in it."""

    what: str
    """image, caption, table, tar, rows, records, packed, other; pipe; or a link: dead, outside, inside, folder,
    outside-folder, above."""
    data: bytes = b""
    held: Any = None
    """image: False if it cannot be decoded. caption: its text, None if it cannot be read. table: (name, caption) of
    each row, None if two columns may be captions. tar: (member, caption) of each image. rows: the captions. records:
    True for each line that is one."""
    target: str = ""
    """Name below DATA that an inner link leads to."""

    def _repr_pretty_(self, printer, cycle):
        """Print the node without its bytes, so that people can read a failing example of hypothesis."""
        printer.text(f"Node({self.what!r}, {len(self.data)} bytes, held={self.held!r}, target={self.target!r})")


@dataclass
class DrawnData:
    """One drawn data set."""

    kind: str
    """folder, table, tar, rows, records, texts."""
    nodes: dict[str, Node] = field(default_factory=dict)
    blobs: frozenset[str] = frozenset()
    """Files that are links into ``blobs``, as in a folder of the hub's cache."""
    split: str = ""
    """Given with ``--split``."""
    empty_folders: tuple[str, ...] = ()

    @property
    def options(self):
        model = ("--tokenizer", "stub") if self.kind in ("records", "texts") else ("--model", "stub")
        sizes = ("--resolution", "64", "--bucket-step", "8") if model[0] == "--model" else ()
        return (*model, *sizes, *(("--split", self.split) if self.split else ()))


# contents


@functools.cache
def image_bytes(number, form):
    pixels = np.full((64, 64, 3), 3 + 11 * (number % 20), dtype=np.uint8)
    pixels[: 8 + number % 50, :20] = 255
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form)
    return stream.getvalue()


def image(number, name="x.png", fault=""):
    data = image_bytes(number, FORMATS[name[name.rindex(".") :]])
    faults = {"empty": b"", "cut": data[:20] + bytes([number % 256]), "html": b"<!doctype html><html>%d" % number}
    return Node("image", faults.get(fault, data), not fault)


def caption(ending, text, fault=False):
    if ending.endswith(".json"):
        data = json.dumps({"caption": text, "size": 5} if text else {"tags": []})
        return Node("caption", b"{broken" if fault else data.encode(), None if fault else text)
    return Node("caption", b"caf\xe9\xff" if fault else text.encode(), None if fault else text)


def table(ending, rows):
    """A metadata table of (name, caption) rows; None is a caption that only JSON can have."""
    names, texts = [name for name, _ in rows], [text for _, text in rows]
    if ending == "parquet":
        stream = io.BytesIO()
        pq.write_table(pa.table({"file_name": names, "text": texts, "label": [1] * len(rows)}), stream)
        return Node("table", stream.getvalue(), tuple(rows))
    if ending == "jsonl":
        lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
    else:
        quoted = ['"' + (text or "").replace('"', '""') + '"' for text in texts]
        lines = ["file_name,text,size", *(f"{name},{text},4" for name, text in zip(names, quoted, strict=True))]
    return Node("table", ("\n".join(lines) + "\n").encode(), tuple(rows))


def tar(members, more=(), fault=False):
    """A tar of (stem, caption) images, and other members."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        images = [(f"{stem}.png", image_bytes(number, "PNG")) for number, (stem, _) in enumerate(members)]
        texts = [(f"{stem}.txt", text.encode()) for stem, text in members if text]
        for name, data in [*images, *texts, *((name, b"[]") for name in more)]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    held = tuple((f"{stem}.png", text) for stem, text in members)
    return Node("tar", b"no tar at all" * 100, None) if fault else Node("tar", stream.getvalue(), held)


def image_rows(texts, fault=False):
    structs = [{"bytes": image_bytes(number, "PNG"), "path": f"{number}.png"} for number in range(len(texts))]
    kind, stream = pa.struct([("bytes", pa.binary()), ("path", pa.string())]), io.BytesIO()
    pq.write_table(pa.table({"image": pa.array(structs, kind), "text": [text or None for text in texts]}), stream)
    return Node("rows", b"no parquet" * 100 if fault else stream.getvalue(), None if fault else tuple(texts))


def records(ending, lines):
    """Records, as many as ``lines``: False is a line that is none, and ends a list."""
    values = [{"text": f"text {number}"} if good else {"size": 5} for number, good in enumerate(lines)]
    if ending == ".parquet":
        stream = io.BytesIO()
        pq.write_table(pa.table({"text": [f"text {number}" for number in range(len(lines))]}), stream)
        return Node("records", stream.getvalue(), (True,) * len(lines))
    if ending == ".json":
        return Node("records", json.dumps(values).encode(), tuple(lines))
    text = "".join((json.dumps(value) if value.get("text") else "{broken") + "\n" for value in values)
    return Node("records", text.encode(), tuple(lines))


#: Files that no reader takes in any of the data sets.
STRAY = {
    "README.md": Node("other", b"about"),
    "LICENSE": Node("other", b"free"),
    "state.json": Node("other", b'{"epoch": 3}'),
    "args.json": Node("other", b'{"seed": 1}'),
    "dataset_infos.json": Node("other", b'{"default": {"splits": {}}}'),
    "dataset_info.json": Node("other", b'{"features": {"image": {"_type": "Image"}}, "splits": {}}'),
    "dataset_dict.json": Node("other", b'{"splits": ["train"]}'),
    "numbers.json": Node("other", b"[1, 2, 3]"),
    "weights.bin": Node("other", b"\0" * 9),
    "labels.csv": Node("other", b"a,b\n1,2\n"),
    "thumbs.db": Node("pipe"),
}
HIDDEN = (".h.png", ".h.txt", ".png", "._b.jpg", ".gitignore", ".git/a", ".git/deep/b.png")
#: Files of caches; each has a folder called k.
CACHES = (("k.latentcache/a.png",), ("k/CURRENT", "k/shards/x.png"), ("k/builder.lock", "k/shards/x.png"))


# drawing


def _folders(draw, most=3, levels=6):
    paths = st.lists(st.sampled_from(FOLDERS), max_size=levels).map("/".join)
    return draw(st.lists(paths, min_size=1, max_size=most, unique=True))


def _below(folder, name):
    return f"{folder}/{name}" if folder else name


def _put(nodes, name, node):
    """Add a node, unless its name is that of a file or a folder already."""
    is_folder = any(other.startswith(name + "/") for other in nodes)
    if name not in nodes and not is_folder and not any(name.startswith(other + "/") for other in nodes):
        nodes[name] = node
        return True
    return False


def _images(draw, nodes, folder, *, faults=True):
    names = draw(st.lists(st.tuples(st.sampled_from(STEMS), st.sampled_from([*FORMATS])), max_size=4, unique=True))
    for stem, ending in names:
        fault = draw(st.sampled_from(["", "", "", "", "", "empty", "cut", "html"])) if faults else ""
        _put(nodes, _below(folder, stem + ending), image(draw(st.integers(0, 60)), "x" + ending, fault))
    return [_below(folder, stem + ending) for stem, ending in names]


def _captions(draw, nodes, names):
    for name in names:
        stem = name[: name.rindex(".")]
        for start in draw(st.sampled_from([(), (stem,), (stem,), (name,), (stem, stem), (stem, name)])):
            ending = draw(st.sampled_from([".txt", ".txt", ".caption", ".json"]))
            fault = draw(st.integers(0, 11)) == 0
            _put(nodes, start + ending, caption(ending, draw(st.sampled_from(TEXTS)), fault))


def _odd(draw, nodes, endings, folders):
    """Nodes with the name of a sample that are pipes or links."""
    regular = [name for name, node in nodes.items() if node.what in ("image", "records", "tar", "rows")]
    for what in draw(st.lists(st.sampled_from(ODD), max_size=2)):
        name = _below(draw(st.sampled_from(folders)), draw(st.sampled_from(["odd", "é"])) + draw(endings))
        alike = [other for other in regular if other.rpartition(".")[2] == name.rpartition(".")[2]]
        if what != "inside" or alike:
            _put(nodes, name, Node(what, target=draw(st.sampled_from(alike)) if what == "inside" else ""))


def _linked_folders(draw, nodes, folders):
    what = draw(st.sampled_from(["", "", "", "folder", "outside-folder", "above"]))
    inner = [folder for folder in folders if folder and any(name.startswith(folder + "/") for name in nodes)]
    if what == "folder" and inner:
        _put(nodes, "linked", Node(what, target=draw(st.sampled_from(inner))))
    elif what in ("outside-folder", "above"):
        _put(nodes, _below(draw(st.sampled_from(folders)), "linked"), Node(what))


def _trouble(draw, nodes, kind, folder):
    """Something that only a choice of the user can settle."""
    if kind in ("tar", "rows"):
        _put(nodes, _below(folder, "loose.png"), image(5))
    elif kind == "table":
        used = next(name for name, node in nodes.items() if node.what == "table")
        stem, _, ending = used.rpartition(".")
        if draw(st.booleans()):
            nodes[used] = Node("table", b"file_name,text,prompt\na.png,b,c\n") if ending == "csv" else nodes[used]
        else:
            _put(nodes, f"{stem}.{'jsonl' if ending == 'csv' else 'csv'}", nodes[used])


def _strays(draw, nodes, folders):
    for name in draw(st.lists(st.sampled_from(sorted(STRAY)), max_size=3)):
        _put(nodes, _below(draw(st.sampled_from(["", *folders])), name), STRAY[name])
    folder = draw(st.sampled_from(folders))
    for name in draw(st.lists(st.sampled_from(HIDDEN), max_size=2)):
        _put(nodes, _below(folder, name), Node("other", b"hidden"))
    for name in draw(st.sampled_from([(), (), (), *CACHES, ("my/CURRENT",)])):
        _put(nodes, _below(folder, name), Node("other", b"of a cache"))


@st.composite
def data_sets(draw):
    """One data set: mostly one that builds, with files that are none of its samples."""
    kind = draw(st.sampled_from(["folder", "folder", "table", "tar", "rows", "records", "records", "texts"]))
    data = DrawnData(kind)
    tops = draw(st.sampled_from(TOPS))
    by_name = bool(tops) and "e" not in tops and kind in ("tar", "rows", "records") and draw(st.booleans())
    if tops and draw(st.integers(0, 3)) == 0:
        data.split = draw(st.sampled_from([{"val": "validation"}.get(top, top) for top in tops]))
    nodes, chosen = data.nodes, data.split or ("train" if "train" in tops else tops[0] if tops else "")
    every = list[str]()
    for top in tops or ("",):
        folders = _folders(draw, 3 if not tops else 2)
        folders = folders if by_name else [_below(top, folder) if folder else top for folder in folders]
        every += folders
        prefix = f"{top}-" if by_name else ""
        before = set(nodes)
        _READERS[kind](draw, nodes, folders, prefix)
        if not any(nodes[name].what == _HOLDS[kind] and nodes[name].held for name in set(nodes) - before):
            _PLAIN[kind](nodes, _below(folders[0], prefix + "plain"))
        if not tops:
            _odd(draw, nodes, st.sampled_from(_ENDINGS[kind]), folders)
            _linked_folders(draw, nodes, folders)
            if draw(st.integers(0, 7)) == 0:
                _trouble(draw, nodes, kind, folders[0])
        if top in ("", chosen):
            _strays(draw, nodes, folders)
    if draw(st.integers(0, 5)) == 0:
        files = [name for name, node in nodes.items() if node.what not in (*ODD, "folder", "outside-folder", "above")]
        data.blobs = frozenset(draw(st.lists(st.sampled_from(files), unique=True)))
    data.empty_folders = tuple(draw(st.lists(st.sampled_from(["empty", "a/none"]), max_size=1)))
    return data


def _folder(draw, nodes, folders, prefix):
    for folder in folders:
        names = _images(draw, nodes, folder)
        _captions(draw, nodes, names)
        for ending in draw(st.lists(st.sampled_from([".txt", ".json"]), max_size=1)):
            _put(nodes, _below(folder, "orphan" + ending), caption(ending, "of nothing"))
        if draw(st.integers(0, 5)) == 0:
            _put(nodes, _below(folder, "chats.jsonl"), records(".jsonl", [True, True]))


def _table(draw, nodes, folders, prefix):
    for folder in folders:
        _images(draw, nodes, folder, faults=False)
    for folder in draw(st.lists(st.sampled_from(folders), min_size=1, unique=True)):
        there = [name for name, node in nodes.items() if node.what == "image" and name.startswith(_below(folder, ""))]
        if not there:
            there = [_below(folder, "plain.png")]
            _put(nodes, there[0], image(1))
        some = draw(st.lists(st.sampled_from(there), min_size=1, max_size=6, unique=True))
        ending = draw(st.sampled_from(["csv", "jsonl", "parquet"]))
        own = [(name.removeprefix(_below(folder, "")), draw(st.sampled_from(TEXTS[1:]))) for name in some]
        own += [("gone.png", "nothing")] * (draw(st.integers(0, 4)) == 0)
        _put(nodes, _below(folder, f"metadata.{ending}"), table(ending, own))
    for name, node in [*nodes.items()]:
        if node.what == "image" and draw(st.integers(0, 3)) == 0:
            _put(nodes, name[: name.rindex(".")] + ".txt", caption(".txt", "beside"))


def _tar(draw, nodes, folders, prefix):
    for folder in folders:
        for stem in draw(st.lists(st.sampled_from(STEMS), max_size=2, unique=True)):
            members = [
                (member, draw(st.sampled_from(TEXTS)))
                for member in draw(st.lists(st.sampled_from("pqr"), unique=True))
            ]
            more = draw(st.lists(st.sampled_from(["o.txt", "z.bin", "d/e.json"]), max_size=2, unique=True))
            fault = draw(st.integers(0, 9)) == 0
            _put(nodes, _below(folder, f"{prefix}{stem}.tar"), tar(members, more, fault))
        _beside_archives(draw, nodes, folder)


def _rows(draw, nodes, folders, prefix):
    for folder in folders:
        for stem in draw(st.lists(st.sampled_from(STEMS), max_size=2, unique=True)):
            texts = draw(st.lists(st.sampled_from(TEXTS), max_size=3))
            fault = draw(st.integers(0, 9)) == 0
            _put(nodes, _below(folder, f"{prefix}{stem}.parquet"), image_rows(texts, fault))
        _beside_archives(draw, nodes, folder)


def _beside_archives(draw, nodes, folder):
    for ending in draw(st.lists(st.sampled_from([".txt", ".json"]), max_size=1)):
        _put(nodes, _below(folder, "orphan" + ending), caption(ending, "of nothing"))


def _records(draw, nodes, folders, prefix):
    lines = st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=4)
    for folder in folders:
        for stem in draw(st.lists(st.sampled_from(STEMS), max_size=2, unique=True)):
            ending = draw(st.sampled_from([".jsonl", ".jsonl", ".ndjson", ".json", ".parquet"]))
            held = draw(lines)
            _put(nodes, _below(folder, prefix + stem + ending), records(ending, [True, *held]))
        for name in draw(
            st.lists(st.sampled_from(["note.txt", "logo.png", "more.tsv", "packed.jsonl.gz"]), max_size=1)
        ):
            more = {"logo.png": image(3), "packed.jsonl.gz": Node("packed", gzip.compress(b"{}"))}
            _put(nodes, _below(folder, prefix + name), more.get(name, Node("other", b"text")))


def _texts(draw, nodes, folders, prefix):
    for folder in folders:
        for stem in draw(st.lists(st.sampled_from(STEMS), max_size=3, unique=True)):
            fault = draw(st.integers(0, 5)) == 0
            data = draw(st.sampled_from([b"", b"\xff\xfe\xff"])) if fault else f"text of {stem}".encode()
            _put(nodes, _below(folder, f"{stem}.txt"), Node("records", data, (not fault,)))


_READERS = {"folder": _folder, "table": _table, "tar": _tar, "rows": _rows, "records": _records, "texts": _texts}
#: What holds the samples of each kind of data, and how to add one.
_HOLDS = {"folder": "image", "table": "table", "tar": "tar", "rows": "rows", "records": "records", "texts": "records"}
_PLAIN = {
    "folder": lambda nodes, name: _put(nodes, name + ".png", image(0)),
    "table": lambda nodes, name: None,
    "tar": lambda nodes, name: _put(nodes, name + ".tar", tar([("p", "a cat")])),
    "rows": lambda nodes, name: _put(nodes, name + ".parquet", image_rows(["a cat"])),
    "records": lambda nodes, name: _put(nodes, name + ".jsonl", records(".jsonl", [True])),
    "texts": lambda nodes, name: _put(nodes, name + ".txt", Node("records", b"a text", (True,))),
}
_ENDINGS = {
    "folder": (".png", ".jpg"),
    "table": (".png",),
    "tar": (".tar",),
    "rows": (".parquet",),
    "records": (".jsonl", ".json"),
    "texts": (".txt",),
}


# writing


def write(data, folder):
    """Write a data set below ``folder``; the result is DATA."""
    kind = ("datasets", "models")[len(data.nodes) % 2]
    root, outside = folder / f"{kind}--who--what/snapshots/0123456789abcdef", folder / "elsewhere"
    for folder in (root, outside / "folder", root.parents[1] / "blobs"):
        folder.mkdir(parents=True)
    (outside / "file").write_bytes(image_bytes(1, "PNG"))
    (outside / "folder/out.png").write_bytes(image_bytes(2, "PNG"))
    for folder in data.empty_folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number, (name, node) in enumerate(data.nodes.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        targets = {"dead": outside / "nothing", "outside": outside / "file", "outside-folder": outside / "folder"}
        targets |= {"inside": root / node.target, "folder": root / node.target, "above": path.parent}
        if node.what == "pipe":
            os.mkfifo(path)
        elif node.what in targets:
            path.symlink_to(targets[node.what])
        elif name in data.blobs:
            blob = root.parents[1] / f"blobs/{number:040x}"
            blob.write_bytes(node.data)
            path.symlink_to(os.path.relpath(blob, path.parent))
        else:
            path.write_bytes(node.data)
    return root
