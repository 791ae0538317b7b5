"""Create source files, and read the result of a scan."""

import json


def put(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text))


def rows(listing):
    table = listing.samples
    repeats = table.columns["repeats"].tolist() if "repeats" in table.columns else [1] * len(table)
    return list(zip(table.names, table.inputs["caption"].text, repeats, strict=True))


def notes(listing):
    return [(note.name, note.reason) for note in listing.notes]
