"""Any order of edits, builds, crashes, damage, checks and readers, compared with a model.

The model is a few dictionaries: files in the folder, inputs of the last finished build, committed keys and damaged
keys. After every step the cache must match the model.
"""

import gc
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stub_truth import COPIES, FIELD, RECIPES, bytes_of, key_of, payload_of, settings_of

from latentcache import failpoint
from latentcache.errors import CorruptEntryError, EmptyPlanError, MissingEntryError
from latentcache.loader.cache import open_cache
from latentcache.pipeline.build import build_cache
from latentcache.store.catalog import load_catalog, stored_entries
from latentcache.store.paths import CachePaths
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import open_snapshot
from latentcache.verify.collect import collect
from latentcache.verify.entries import Depth
from latentcache.verify.verify import repair_cache, verify_cache

NAMES = [f"{stem}.png" for stem in ("a", "b", "dir/c", "ü")]
CONTENTS = sorted(COPIES)
names, contents = st.sampled_from(NAMES), st.sampled_from(CONTENTS)
#: Failpoints that a build of a few images passes.
PASSED = ["lock-taken", "temporary-written", "after-fsync", "after-rename", "folder-synced", "plan-written"]
PASSED += ["result-received", "before-put", "after-put", "after-commit"]
crashes = st.tuples(st.sampled_from(PASSED), st.integers(1, 4))
#: In memory: these tests check order, not the disk.
PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def repaired(cache, data):
    """Repair in this process; the sandbox takes ten times as long and has its own tests."""
    return repair_cache(cache, data=data, depth=Depth(full=True), confirm=lambda plan: True)


def keys_of(batch):
    return [key.numpy().tobytes() for key in batch["keys"][FIELD]]


def killed(crash, work):
    """Run work in a forked process that is killed at the n-th passage of a failpoint."""
    pid = os.fork()
    if not pid:
        try:
            failpoint.arm("{}:{}:kill".format(*crash))
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


class AnyOrder(RuleBasedStateMachine):
    """Files, captions and recipe; the last build; committed and damaged keys."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=PLACE))
        self.data, self.cache = self.root / "data", self.root / "cache"
        self.files, self.captions, self.recipe = {}, {}, 0
        self.built, self.built_recipe, self.moved = None, None, set()
        self.committed, self.damaged, self.flipped, self.lost = set(), set(), set(), set()
        self.begun_repair = False
        self.readers = []

    def teardown(self):
        shutil.rmtree(self.root)

    @initialize(content=contents)
    def one_file(self, content):
        self.data.mkdir()
        self.write("a.png", content)

    # user actions

    @rule(name=names, content=contents)
    def write(self, name, content):
        path = self.data / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes_of(content))
        self.files[name] = content
        self.moved.add(name)

    @rule(name=names)
    def touch(self, name):
        if name in self.files:
            os.utime(self.data / name, ns=(1, 1_000_000_000 + len(self.moved)))
            self.moved.add(name)

    @rule(old=names, new=names)
    def rename(self, old, new):
        if old in self.files and old != new:
            (self.data / new).parent.mkdir(exist_ok=True)
            (self.data / old).rename(self.data / new)
            self.files[new] = self.files.pop(old)
            self.moved |= {old, new}

    @rule(name=names)
    @precondition(lambda self: len(self.files) > 1)
    def delete(self, name):
        if name in self.files:
            (self.data / name).unlink()
            del self.files[name]

    @rule(name=names, text=st.sampled_from(["", "one", "two"]))
    def caption(self, name, text):
        path = (self.data / name).with_suffix(".txt")
        path.parent.mkdir(exist_ok=True)
        if text:
            path.write_text(text, "utf-8")
        else:
            path.unlink(missing_ok=True)
        self.captions[name] = text

    @rule(recipe=st.integers(0, len(RECIPES) - 1))
    def choose_recipe(self, recipe):
        self.recipe = recipe

    # commands

    @rule()
    def build(self):
        """A build encodes exactly the missing entries; the next build encodes none."""
        new = self.needed() - self.committed
        free = {key for key in new if self.copy_committed(key)}
        report = build_cache(settings_of(self.recipe, self.data, self.cache))
        assert report.encoded == len(new - free)
        assert report.encoded + report.cached == len(self.needed())
        self.published()
        assert build_cache(settings_of(self.recipe, self.data, self.cache)).encoded == 0
        self.moved.clear()

    @rule(crash=crashes)
    def killed_build(self, crash):
        """A build killed at a failpoint keeps its acknowledged entries."""
        before = self.snapshot_number()
        events = self.root / "events"
        events.unlink(missing_ok=True)
        killed(crash, lambda: build_cache(settings_of(self.recipe, self.data, self.cache, events=events)))
        if self.snapshot_number() != before:
            self.published()
            self.moved.clear()
        if events.exists():
            lines = [json.loads(line) for line in events.read_text("ascii").splitlines()]
            self.committed |= {bytes.fromhex(key) for line in lines for key in line["keys"]}

    @rule(number=st.integers(0, 99), bit=st.integers(0, 7))
    @precondition(lambda self: self.built and not self.damaged and not self.lost)
    def flip(self, number, bit):
        """Flip one bit of one payload of the current snapshot."""
        snapshot = open_snapshot(self.cache)
        rows = snapshot.fields[FIELD]
        entry = number % rows.entries
        file = self.cache / "shards" / snapshot.shards[int(rows.shard[entry])] / "data.mdb"
        file.chmod(0o644)
        offset = int(rows.offset[entry]) + number
        with file.open("r+b") as shard:
            shard.seek(offset)
            byte = shard.read(1)[0]
            shard.seek(offset)
            shard.write(bytes([byte ^ (1 << bit)]))
        self.damaged.add(np.asarray(rows.key[entry]).tobytes())
        self.flipped |= self.damaged

    @rule()
    @precondition(lambda self: self.damaged)
    def repair(self):
        """Repair removes exactly the damaged entries; a second repair removes none.

        If a killed build encoded an entry again, the repair uses it, or the next build if its shard was not sealed.
        """
        whole = self.intact()
        corrupt = {
            name: key_of(self.built[name][0], self.built_recipe)
            for name, category in self.truth(full=True).items()
            if category == "corrupt"
        }
        done = repaired(self.cache, self.data)
        removed = {bytes.fromhex(removal.key) for removal in done.removals}
        assert {key for key in corrupt.values() if key not in whole} <= removed <= set(corrupt.values())
        before = {name for name, key in corrupt.items() if key in removed}
        assert {removal.path for removal in done.removals} <= before  # the first sample of each entry
        assert not repaired(self.cache, self.data).done
        self.lost |= before
        self.look_again()

    @rule(crash=st.tuples(st.sampled_from(["repair-delete", "temporary-written", "after-rename"]), st.integers(1, 4)))
    @precondition(lambda self: self.built and self.damaged)
    def killed_repair(self, crash):
        """A killed repair leaves the old or the new cache; the next repair completes."""
        killed(crash, lambda: repaired(self.cache, self.data))
        self.begun_repair = True
        if not open_snapshot(self.cache).complete:
            self.lost |= {name for name, category in self.truth(full=True).items() if category == "corrupt"}
        self.look_again()

    @rule(
        keep=st.integers(1, 2),
        crash=st.none() | st.tuples(st.sampled_from(["collect-delete"]), st.integers(1, 3)),
    )
    @precondition(lambda self: self.built)
    def collect(self, keep, crash):
        """gc removes unreferenced entries only, also when it is killed."""
        gc.collect()  # a collected reader still has a lease until then
        if crash:
            killed(crash, lambda: collect(self.cache, apply=True, keep=keep))
        else:
            collect(self.cache, apply=True, keep=keep)
            assert not collect(self.cache, keep=keep).num_bytes("removable")
        self.committed &= {key_of(content, self.built_recipe) for content, _ in self.built.values()}
        self.committed -= {key_of(self.built[name][0], self.built_recipe) for name in self.lost}
        self.look_again()

    @rule()
    @precondition(lambda self: self.built and not self.damaged and not self.lost)
    def open_reader(self):
        cache = open_cache(self.cache, checksum="always")
        loader = cache.loader(batch_size=2, seed=len(self.readers))
        self.readers = [*self.readers[-1:], (loader, self.served(loader))]

    @rule()
    @precondition(lambda self: self.readers)
    def read_again(self):
        """A reader returns its original batches, or names an entry that was damaged since."""
        for loader, before in self.readers:
            try:
                assert self.served(loader) == before
            except CorruptEntryError:
                assert self.flipped & {key for _, keys, _ in before for key in keys}

    @rule(full=st.booleans())
    @precondition(lambda self: self.built)
    def verify(self, full):
        report = verify_cache(self.cache, full=full)
        found = {finding.path: finding.category for finding in report.findings if finding.path}
        truth = self.truth(full)
        if self.begun_repair:  # a killed one takes damaged entries out of the index, and not yet out of the snapshot
            damaged = {name for name in self.built if key_of(self.built[name][0], self.built_recipe) in self.damaged}
            truth |= {name: "missing" for name in damaged if found.get(name) == "missing"}
        assert found == truth
        samples = set(self.built) | (set(self.files) - set(self.built))
        assert sum(number for name, number in report.counts.items() if name != "unreferenced") == len(samples)

    # invariants

    @invariant()
    def nothing_committed_is_lost(self):
        if (self.cache / "shards").exists():
            there = {key.tobytes() for key in self.catalog().keys()}  # noqa: SIM118
            assert self.committed <= there
            self.committed = there  # also committed but not yet acknowledged entries

    @invariant()
    def sources_are_as_they_were_left(self):
        if self.data.exists():
            there = {path.relative_to(self.data).as_posix() for path in self.data.rglob("*.png")}
            assert there == set(self.files)
            assert all((self.data / name).read_bytes() == bytes_of(content) for name, content in self.files.items())

    def look_again(self):
        """Update the model after removals: all intact known entries must remain."""
        stored = list(stored_entries(self.catalog()))
        whole = {entry.key for entry in stored if entry.intact}
        assert self.committed - self.damaged <= whole
        self.committed = {entry.key for entry in stored}
        self.damaged = (self.committed - whole) | self.damaged_for_readers()

    def damaged_for_readers(self):
        """Keys of the snapshot with wrong bytes.

        The next build uses an intact copy elsewhere.
        """
        snapshot, found = open_snapshot(self.cache), set()
        reader = EntryReader(CachePaths(self.cache), snapshot)
        for row, key in enumerate(snapshot.fields[FIELD].row_keys()):
            try:
                reader.read(FIELD, row)
            except CorruptEntryError:
                found.add(key.tobytes())
            except MissingEntryError:
                continue
        reader.close()
        return found

    # model

    def catalog(self):
        return load_catalog(CachePaths(self.cache), open_shards=True)

    def intact(self):
        return {entry.key for entry in stored_entries(self.catalog()) if entry.intact}

    def needed(self):
        return {key_of(content, self.recipe) for content in self.files.values()}

    def pixels_of(self, key):
        return next(COPIES[content] for content in CONTENTS if key == key_of(content, self.recipe))

    def copy_committed(self, key):
        copies = [content for content in CONTENTS if COPIES[content] == self.pixels_of(key)]
        whole = self.intact() if self.committed else set()
        return any(key_of(content, self.recipe) in whole for content in copies)

    def published(self):
        """The snapshot equals the folder, and every entry has the right bytes."""
        snapshot = open_snapshot(self.cache)
        rows = snapshot.fields[FIELD]
        sampled = np.asarray(rows.sample).tolist()
        keys = dict(zip((snapshot.samples.names[i] for i in sampled), rows.row_keys(), strict=True))
        assert {name: key.tobytes() for name, key in keys.items()} == {
            name: key_of(content, self.recipe) for name, content in self.files.items()
        }
        captions = dict(zip(snapshot.samples.names, snapshot.samples.inputs["caption"].text, strict=True))
        assert captions == {name: self.captions.get(name, "") for name in self.files}
        catalog = load_catalog(CachePaths(self.cache))
        for content in self.files.values():
            key = key_of(content, self.recipe)
            (place,) = catalog.find(np.frombuffer(key, np.uint8)[None]).tolist()
            assert key in self.damaged or catalog.item(place).array.tobytes() == payload_of(content, self.recipe)
        self.built = {name: (content, self.captions.get(name, "")) for name, content in self.files.items()}
        self.built_recipe, self.lost = self.recipe, set()
        self.damaged -= self.intact()

    def truth(self, full):
        """Map the name of every sample that is not ok to its category."""
        found = {name: "missing" for name in self.files if name not in self.built}
        for name, (content, caption) in self.built.items():
            key = key_of(content, self.built_recipe)
            if full and key in self.damaged:
                found[name] = "corrupt"
            elif name in self.lost:
                found[name] = "missing"
            elif self.files.get(name) != content or self.captions.get(name, "") != caption:
                found[name] = "stale"
            elif name in self.moved:
                found[name] = "touched"
        return found

    def snapshot_number(self):
        current = self.cache / "CURRENT"
        return int(current.read_text()) if current.exists() else 0

    @staticmethod
    def served(loader):
        try:
            return [(batch["names"], keys_of(batch), batch[FIELD].numpy().tobytes()) for batch in loader]
        except EmptyPlanError:
            return []


class AnyOrderAtLength(AnyOrder):
    """The same test with a hundred times as many examples."""


AnyOrder.TestCase.settings = settings(
    max_examples=4, stateful_step_count=50, deadline=None, derandomize=True, database=None, print_blob=True,
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
AnyOrderAtLength.TestCase.settings = settings(AnyOrder.TestCase.settings, max_examples=1000)
test_any_order = AnyOrder.TestCase
test_any_order_at_length = pytest.mark.slow(AnyOrderAtLength.TestCase)
