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


def reasons(items):
    assert all(item.hint and item.detail for item in items)
    return [(item.name, item.reason) for item in items]


def notes(listing):
    return reasons(listing.notes)
