"""What a snapshot holds, read from its columns and its shards."""

from pathlib import Path

import numpy as np

from latentcache.store.paths import CachePaths
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import open_snapshot


def items(cache, field):
    """Read one field: sample name, item key and array of each row."""
    snapshot = open_snapshot(cache)
    reader, rows = EntryReader(CachePaths(Path(cache)), snapshot), snapshot.fields[field]
    names = [snapshot.samples.names[sample] for sample in np.asarray(rows.sample).tolist()]
    arrays = [reader.read(field, row).copy() for row in range(len(rows))]
    reader.close()
    return list(zip(names, map(bytes, rows.row_keys()), arrays, strict=True))


def contents(cache):
    """Read everything: field -> sample name -> items with metadata and bytes; "" -> samples and recipes."""
    snapshot = open_snapshot(cache)
    samples, found = snapshot.samples, {}
    for field, rows in snapshot.fields.items():
        of_samples = found.setdefault(field, {})
        ragged = {column: tuple(map(np.asarray, pair)) for column, pair in rows.ragged_columns.items()}
        for row, (name, key, array) in enumerate(items(cache, field)):
            columns = {column: np.asarray(values)[row].tolist() for column, values in rows.columns.items()}
            for column, (ends, values) in ragged.items():
                columns[column] = values[int(ends[row - 1]) if row else 0 : int(ends[row])].tolist()
            group = rows.groups[int(np.asarray(rows.group)[row])].label
            variant, length = (int(np.asarray(column)[row]) for column in (rows.variant, rows.length))
            of_samples.setdefault(name, []).append((group, variant, length, key, columns, array.tobytes()))
    texts = {name: list(held.text) for name, held in samples.inputs.items() if held.text is not None}
    columns = {name: np.asarray(values).tolist() for name, values in samples.columns.items()}
    recipes = {field: rows.recipe_json for field, rows in snapshot.fields.items()}
    return found | {"": (list(samples.names), texts, columns, recipes)}
