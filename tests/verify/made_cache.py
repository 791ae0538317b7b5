"""Small caches of made-up kinds, one per storage form, written with the store only."""

import json
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from damaged import flip

from latentcache.fields.protocol import Failure, FieldKind, FieldSpec, ReadSpec
from latentcache.fields.registry import field_kind
from latentcache.identity.content import json_hash
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import scan
from latentcache.store.catalog import load_catalog, mend_shards
from latentcache.store.entry import Item, pack_items
from latentcache.store.paths import CachePaths
from latentcache.store.publish import NewSnapshot, new_field, publish_snapshot
from latentcache.store.shard import ShardWriter
from latentcache.store.snapshot import current_or_none, open_snapshot
from latentcache.verify.entries import Depth

FULL = Depth(full=True)
DEPTHS = pytest.mark.parametrize("depth", [Depth(), FULL], ids=["fast", "full"])


def counts(report):
    return {name: number for name, number in report.counts.items() if number}


@dataclass(frozen=True)
class MadeRecipe:
    kind: str
    spec: FieldSpec
    read_time: ReadSpec = field(default_factory=ReadSpec)
    compute_dtype: str = "float32"

    def as_json(self):
        return {"model": "made"}

    @property
    def recipe_id(self):
        return json_hash({self.kind: "made"})


class Made(FieldKind):
    """Compute values from the content."""

    made_spec: FieldSpec
    shape: tuple[int, ...]

    def made_recipe(self) -> MadeRecipe:
        return MadeRecipe(kind=self.name, spec=self.made_spec)

    @property
    def recipe(self):
        return SimpleNamespace(from_json=lambda data: self.made_recipe())

    def encode(self, content: bytes, recipe: MadeRecipe) -> np.ndarray:
        raise NotImplementedError


class Flat(Made):
    """One float32 vector per image, an entry each, like latents."""

    name, kind, inputs, shape = "flat", 220, ("image",), (64,)
    made_spec = FieldSpec(dtype="float32", dims=("n",))
    columns = {"crop": ("<u4", (2,))}  # noqa: RUF012

    def encode(self, content, recipe):
        return np.random.default_rng(list(content)).normal(size=64).astype(np.float32)


class Lines(Made):
    """A ragged uint8 row per image, an entry each, like an edge map."""

    name, kind, inputs, shape = "lines", 221, ("image",), (-1, 4)
    made_spec = FieldSpec(dtype="uint8", dims=("rows", "n"), ragged=True, collate="pad")

    def encode(self, content, recipe):
        return np.random.default_rng(list(content)).integers(0, 255, (5 + content[0] % 60, 4)).astype(np.uint8)


class Texts(Made):
    """A ragged row of ids per record, in blocks, like tokens."""

    name, kind, inputs, shape, packing, encoder = "texts", 222, ("record",), (-1,), "block", "tokenizer"
    made_spec = FieldSpec(dtype="uint16", dims=("tokens",), ragged=True, collate="pack")
    ragged_columns = {"spans": ("<u4", (2,))}  # noqa: RUF012

    def encode(self, content, recipe):
        return np.random.default_rng(list(content)).integers(0, 999, 1000 + content[0]).astype(np.uint16)

    def check(self, array, recipe):
        return Failure(reason="id", detail="an id is out of range") if array.max(initial=0) >= 1000 else None


KINDS = ("flat", "lines", "texts")


@dataclass
class Case:
    names: tuple[str, ...]
    """Names of the fields."""
    data: Path
    cache: Path
    total: int = 8

    @property
    def of_records(self) -> bool:
        return "texts" in self.names

    @property
    def paths(self) -> CachePaths:
        return CachePaths(self.cache)

    @property
    def snapshot(self):
        return open_snapshot(self.cache)

    def write(self, number: int, text: str | None = None) -> str:
        text = f"input {number}" if text is None else text
        if not self.of_records:
            (self.data / f"{number:03}.png").write_bytes(text.encode())
            return f"{number:03}.png"
        lines = self.records()
        lines += [{"text": ""}] * (number + 1 - len(lines))
        lines[number] = {"text": text}
        self.put_records(lines)
        return f"t.jsonl:{number + 1}"

    def records(self, name="t.jsonl") -> list[dict[str, str]]:
        path = self.data / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def put_records(self, lines, name="t.jsonl") -> None:
        (self.data / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def build(self, *, per_shard: int = 4) -> tuple[int, int]:
        """Update the cache; return encoded and reused items."""
        self.paths.shards.mkdir(parents=True, exist_ok=True)
        known = current_or_none(self.cache)
        mend_shards(self.paths)
        listing = scan(self.data, SourceOptions(), None if known is None else known.samples, hash_all=True)
        table, made, found, plans = listing.samples, 0, 0, []
        stat = np.array(table.files.stat)  # old enough to be trusted
        stat[:, 5] = stat[:, 1:3].max(axis=1) + np.uint64(10**12)
        table = replace(table, files=replace(table.files, stat=stat))
        for name in self.names:
            kind = field_kind(name)
            recipe = kind.made_recipe()
            plan = kind.plan(table, recipe)
            planned = plan.keys(kind, kind.content(table), recipe)
            absent = load_catalog(self.paths).find(planned) < 0
            keys = {planned[place].tobytes(): place for place in np.flatnonzero(absent).tolist()}
            items = [self._item(kind, recipe, key) for key in keys]
            made, found = made + len(items), found + len({key.tobytes() for key in planned}) - len(items)
            for start in range(0, len(items), per_shard):
                writer = ShardWriter(self.paths.shards / f"{secrets.token_hex(8)}.open")
                writer.write(pack_items(items[start : start + per_shard], recipe, kind))
                writer.seal()
            plans.append((kind, recipe, plan, planned))
        catalog = load_catalog(self.paths)
        new_fields = [
            new_field(catalog, kind=kind, recipe=recipe, groups=plan.groups, sample=plan.sample, group=plan.group,
                        variant=plan.variant, items=catalog.find(planned))
            for kind, recipe, plan, planned in plans
        ]  # fmt: skip
        source = {"root": str(self.data), "relative": "../data", "options": listing.options.as_json()}
        new = NewSnapshot(samples=table, fields=tuple(new_fields), shards=catalog.shards, source=source,
                              rejected=listing.rejected, notes=listing.notes)  # fmt: skip
        publish_snapshot(self.paths, new)
        return made, found

    def _item(self, kind, recipe, key: bytes) -> Item:
        return Item(key=key, array=kind.encode(key[8:24], recipe), same=key[8:24])

    def entry(self, number: int, name: str = "") -> tuple[Path, int, int, int]:
        """Locate the entry of a sample: data file, payload offset, bytes and entry position."""
        snapshot = self.snapshot
        rows = snapshot.fields[name or self.names[0]]
        entry = int(np.asarray(rows.entry)[np.flatnonzero(np.asarray(rows.sample) == number)[0]])
        path = self.paths.data(snapshot.shards[int(rows.shard[entry])])
        return path, int(rows.offset[entry]), int(rows.bytes[entry]), entry

    def damage(self, number: int, name: str = "", at: int = 3) -> None:
        path, offset, _, _ = self.entry(number, name)
        flip(path, offset + at)

    def sharing(self, number: int) -> int:
        rows = self.snapshot.fields[self.names[0]]
        entries = np.asarray(rows.entry)
        return int((entries == entries[np.flatnonzero(np.asarray(rows.sample) == number)[0]]).sum())


def make(folder: Path, *names: str, total: int = 8) -> Case:
    """Create a data set of ``total`` inputs and its cache."""
    case = Case(names=names, data=folder / "data", cache=folder / "cache", total=total)
    case.data.mkdir(parents=True)
    for number in range(total):
        case.write(number)
    case.build()
    return case
