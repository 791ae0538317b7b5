"""What a drawn data set means: which files are samples', which are rejected, and which are in notes.

Written from the rules that the pages give, not from the code: each file has exactly one of the three.
"""

from collections import Counter
from dataclasses import dataclass, field

#: Words of folders and files -> the split that they mean.
SPLITS = {"train": "train", "test": "test", "val": "validation"}
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CAPTIONS = (".txt", ".caption", ".json")
UNUSED, HIDDEN, SPLIT = ("unused",), ("hidden", "unused"), ("split-unused",)
#: Extensions of the files that hold samples.
WANTED = {
    "folder": IMAGES,
    "table": IMAGES,
    "tar": (".tar",),
    "rows": (".parquet",),
    "records": (".jsonl", ".ndjson", ".json", ".parquet"),
    "texts": (".txt",),
}


@dataclass
class Truth:
    """What each command must say about a data set."""

    samples: dict[str, str] = field(default_factory=dict)
    """Name -> caption; records have none."""
    rejected: Counter = field(default_factory=Counter)
    """Paths in items, with the number of items."""
    noted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """File -> the reasons that its note may have."""
    splits_read: int = 0
    """Files in folders named like splits that are read as others, because not every folder has such a name."""
    caches: set[str] = field(default_factory=set)
    error: str = ""
    """Words that the error must have; empty: DATA can be read."""


def truth_of(data):
    truth = Truth()
    files = _listed(data, truth)
    chosen = _split_of(data, files, truth)
    truth.error = truth.error or _choice(data, files)
    if not truth.error:
        _READERS[data.kind](data, files, chosen, truth)
    return truth


def _listed(data, truth):
    """Name -> node of each file, links followed; other files are rejected or noted."""
    files, wanted = {}, (*WANTED[data.kind], *(CAPTIONS if data.kind in ("folder", "table") else ()))
    caches = {name[: name.index("k.latentcache") + 13] for name in data.nodes if "k.latentcache/" in name}
    caches |= {name.rpartition("/")[0] for name in data.nodes if name.endswith(("k/CURRENT", "k/builder.lock"))}

    def add(name, node, real):
        if cache := next((candidate for candidate in caches if real.startswith(candidate + "/")), ""):
            truth.caches.add(name[: len(name) - len(real) + len(cache)] + "/")
        elif any(part.startswith(".") for part in name.split("/")):
            truth.noted[name] = HIDDEN
        elif node.what == "folder":
            for other, inner in data.nodes.items():
                if other.startswith(node.target + "/"):
                    if inner.what == "folder":
                        truth.noted[name + other[len(node.target) :]] = ("nested-link",)
                    else:
                        add(name + other[len(node.target) :], inner, other)
        elif node.what in ("above", "outside-folder"):
            truth.rejected[name] += 1
        elif not name.lower().endswith(wanted) and node.what in ("pipe", "outside"):
            truth.noted[name] = UNUSED
        elif node.what in ("pipe", "dead", "outside"):
            files[name] = node
        else:
            files[name] = data.nodes[node.target] if node.what == "inside" else node

    for name, node in data.nodes.items():
        add(name, node, name)
    return files


def _choice(data, files):
    """Words on what only the user can choose."""
    tables = [name for name, node in files.items() if node.what == "table"]
    if data.kind in ("tar", "rows") and any(name.lower().endswith(IMAGES) for name in files):
        return "--layout"
    if len(tables) > len({name[: name.rfind("/") + 1] for name in tables}):
        return "two tables"
    return "--caption-column" if any(files[name].held is None for name in tables) else ""


def _split_of(data, files, truth):
    """Name -> split of each file; the files of one split are read."""
    wanted = [name for name in files if name.lower().endswith(WANTED[data.kind]) and files[name].what != "other"]
    tops = {name: name.split("/")[0] for name in wanted}
    if all(top in SPLITS and top != name for name, top in tops.items()):
        split = lambda name: SPLITS.get(name.split("/")[0], "")  # noqa: E731
    elif data.kind in ("tar", "rows", "records"):
        split = lambda name: SPLITS.get(name.rpartition("/")[2].split("-")[0], "")  # noqa: E731
    else:
        split = lambda name: ""  # noqa: E731
    if data.split and not any(map(split, wanted)):  # folders of other names are for training
        split = lambda name: SPLITS.get(tops.get(name, name.split("/")[0]), "train")  # noqa: E731
    holders = [name for name in files if files[name].what == "table"] if data.kind == "table" else wanted
    truth.splits_read = sum(name.startswith(("test/", "val/")) and not split(name) for name in holders)
    there = {split(name) for name in wanted}
    chosen = SPLITS.get(data.split, data.split) or ("train" if "train" in there else min(there))
    if chosen not in there or (not data.split and chosen != "train" and len(there) > 1):
        truth.error = "--split"
    return lambda name: split(name) in ("", chosen)


def _reject_odd(files, truth):
    """Reject pipes and links that lead nowhere or out; the result is the other files."""
    odd = [name for name, node in files.items() if node.what in ("pipe", "dead", "outside")]
    truth.rejected.update(odd)
    return {name: node for name, node in files.items() if name not in odd}


def _folder(data, files, is_chosen, truth):
    used = set()
    for name, node in files.items():
        if not name.lower().endswith(IMAGES):
            continue
        stem = name[: name.rindex(".")]
        beside = [candidate for start in (stem, name) for end in CAPTIONS if (candidate := start + end) in files]
        used.update(beside[:1])
        if not is_chosen(name):
            truth.noted[name] = SPLIT
        elif node.what in ("pipe", "dead", "outside") or not node.held or (beside and files[beside[0]].held is None):
            truth.rejected[name] += 1
        else:
            truth.samples[name] = files[beside[0]].held.strip() if beside else ""
    for name, node in files.items():
        if name in used and is_chosen(name):
            continue
        if name not in truth.samples and name not in truth.rejected and name not in truth.noted:
            truth.noted[name] = _reasons(name, node, is_chosen)


def _reasons(name, node, is_chosen):
    """The reasons that a file without a sample may have."""
    if not is_chosen(name):
        return (*SPLIT, *UNUSED, "caption-unused", "outside-sets")
    if node.what == "caption":
        return ("caption-unused", "caption-conflict", *UNUSED)
    return UNUSED


def _table(data, files, is_chosen, truth):
    tables = {name: node for name, node in files.items() if node.what == "table" and is_chosen(name)}
    files = {name: node for name, node in _reject_odd(files, truth).items() if name not in tables}
    covered, beside = set(), set()
    for table in sorted(tables, key=lambda name: -name.count("/")):
        folder = table[: table.rfind("/") + 1]
        inside = {name for name in files if name.startswith(folder) and name.lower().endswith(IMAGES)}
        covered |= inside
        for row, text in tables[table].held:
            if (name := folder + row) not in inside:
                truth.rejected[name] += name not in truth.rejected
            elif name not in truth.samples:
                truth.samples[name] = text
        beside |= {name[: name.rindex(".")] + ".txt" for name in inside}
    for name, node in files.items():
        if name in truth.samples:
            continue
        if not is_chosen(name):
            truth.noted[name] = _reasons(name, node, is_chosen)
        elif name.lower().endswith(IMAGES):
            truth.noted[name] = ("unlisted",) if name in covered else ("outside-sets",)
        elif node.what == "caption":
            truth.noted[name] = ("sidecar-unused",) if name in beside else ("caption-unused",)
        else:
            truth.noted[name] = UNUSED


def _archives(data, files, is_chosen, truth):
    for name, node in files.items():
        if not name.endswith(WANTED[data.kind]):
            truth.noted[name] = ("caption-unused", *UNUSED, *(() if is_chosen(name) else SPLIT))
        elif not is_chosen(name):
            truth.noted[name] = SPLIT
        elif node.what in ("pipe", "dead", "outside") or node.held is None:
            truth.rejected[name] += 1
        elif not node.held:
            truth.noted[name] = UNUSED
        elif node.what == "tar":
            truth.samples |= {f"{name}/{member}": text for member, text in node.held}
        else:
            truth.samples |= {f"{name}:{row}": text for row, text in enumerate(node.held, 1)}


def _records(data, files, is_chosen, truth):
    for name, node in files.items():
        if node.what == "packed":
            truth.rejected[name] += 1
        elif not name.endswith(WANTED[data.kind]) or node.what == "other":
            truth.noted[name] = ("text-unused", "table-unused", *UNUSED, *(() if is_chosen(name) else SPLIT))
        elif not is_chosen(name):
            truth.noted[name] = SPLIT
        elif node.what in ("pipe", "dead", "outside"):
            truth.rejected[name] += 1
        else:
            truth.samples |= {f"{name}:{line}": "" for line, good in enumerate(node.held, 1) if good}
            truth.rejected[name] += node.held.count(False)
    truth.rejected += Counter()


_READERS = {
    "folder": _folder,
    "table": _table,
    "tar": _archives,
    "rows": _archives,
    "records": _records,
    "texts": _records,
}
