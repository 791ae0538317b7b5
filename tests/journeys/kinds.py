"""The kinds of this package and a toy kind, with data and commands for each."""

import json
import os
from dataclasses import dataclass, field

from commands import ROOT, finished, look, noise, start
from made_videos import write_video
from stored_items import items

from latentcache import open_cache
from latentcache.fields import registry
from latentcache.store.snapshot import open_snapshot

TOY = "tests.fields.edge_map:EdgeMap"
#: Characters of a text that fills a block, and of one that fills a unit of work.
BLOCK, UNIT = 140_000, (1 << 20) + 16


@dataclass(frozen=True, kw_only=True)
class Kind:
    field: str
    recipe: str
    """Flags of a first build; ``{delay}`` is replaced by milliseconds per sample."""
    words: tuple[str, ...] = ()
    """Flags of every command."""
    two: tuple[str, ...] = ("--device", "cpu*2")
    """Flags of a build with two worker processes."""
    many: int = 24
    """Number of samples for several units of work and several entries."""
    delay_ms: int = 80
    """Delay per sample for a build of ``many`` in about two seconds."""
    suffix: str = ".png"
    captions: bool = False
    """True if a sample is its caption file."""
    beside: str = ""
    """Name suffix of the second image of a sample, such as a mask."""
    variables: dict = field(default_factory=dict)

    def write(self, folder, number, seed=None, *, size=40):
        path, seed = folder / f"{number:03}{self.suffix}", number if seed is None else seed
        if self.beside:  # files of one size are one unit of work: they may be equal
            path.write_bytes(noise(number, 48, 48 + number % 8))
            path = path.with_name(path.stem + self.beside)
            path.write_bytes(noise(seed, 48 + seed % 31, 48))
        elif self.captions:
            path.write_bytes(noise(number, 48, 48))
            path = path.with_suffix(".txt")
            path.write_text(f"{seed} ".ljust(min(size, BLOCK), "abcdefgh"[seed % 8]))
        elif self.suffix == ".mp4":
            write_video(path, 6, seed=seed)
        elif self.suffix == ".png":
            path.write_bytes(noise(seed, 48 + seed % 31, 48))
        else:
            text = f"{seed} ".ljust(size, "abcdefgh"[seed % 8])
            path.write_text(json.dumps({"text": text}) + "\n")
        return path

    def data(self, folder, count=None, *, size=BLOCK):
        """Create a folder of ``count`` samples; by default ``many``."""
        folder.mkdir()
        for number in range(count or self.many):
            self.write(folder, number, size=40 if count else size)
        return folder

    def spoil(self, folder, number):
        """Write an unusable sample; return its name."""
        path = self.write(folder, number)
        path.write_bytes(b"\xff" if self.captions else path.read_bytes()[:-20])
        if self.captions or self.beside:
            path = path.with_name(f"{number:03}.png")
        return path.name if self.suffix != ".jsonl" else f"{path.name}:1"

    def build_words(self, data, cache, *more, delay_ms=0):
        return ("build", data, "--out", cache, *self.recipe.format(delay=delay_ms).split(), *more, *self.words)

    def build(self, data, cache, *more):
        return look(*self.build_words(data, cache, *more), "--json")

    def opened(self, cache, **more):
        cache = open_cache(cache, **more)
        return cache.rows(pad=16, overflow="truncate_right") if self.suffix == ".jsonl" else cache

    def verify(self, cache, *more):
        return look("verify", cache, *more, *self.words, "--json")

    def counts(self, cache, *more):
        """Verify; return the non-zero counts of the samples."""
        counts = self.verify(cache, *more).json["counts"]
        return {name: number for name, number in counts.items() if number and name != "unreferenced"}

    def start(self, data, cache, *more, delay_ms=None, variables=None, **options):
        delay_ms = self.delay_ms if delay_ms is None else delay_ms
        words = self.build_words(data, cache, "--commit-every", 1, *more, delay_ms=delay_ms)
        variables = {"DELAY_MS": str(delay_ms), **self.variables, **(variables or {})}
        return start(*words, "--json", "--quiet", variables=variables, **options)

    def finish(self, data, cache, *more, timeout=60, **options):
        return finished(self.start(data, cache, *more, **options), timeout)


SMALL = "--model stub:delay_ms={delay} --resolution 64 --bucket-step 32 --batch-size 2"
TEXTS = "--fields prompt_embeds --text-encoder stub:delay_ms={delay} --batch-size 2"
TOKENS = "--tokenizer stub:delay_ms={delay}"
WORKERS = ("--workers", "2")
SLOW = {"PYTHONPATH": f"{ROOT / 'tests/journeys/slow_masks'}{os.pathsep}{ROOT}"}
KINDS = {
    "latents": Kind(field="latents", recipe=SMALL),
    "clips": Kind(field="latents", recipe=f"{SMALL} --frames 5", delay_ms=40, suffix=".mp4"),
    "input_ids": Kind(field="input_ids", recipe=TOKENS, two=WORKERS, many=10, delay_ms=250, suffix=".jsonl"),
    "prompt_embeds": Kind(field="prompt_embeds", recipe=TEXTS, captions=True),
    "control": Kind(field="control", recipe=f"--fields control {SMALL}", beside="-condlabel.png"),
    "mask": Kind(
        field="mask",
        recipe=f"--fields mask {SMALL}",
        two=WORKERS,
        many=96,
        delay_ms=20,
        beside="-masklabel.png",
        variables=SLOW,
    ),
    "edge_map": Kind(field="edge_map", words=("--field", TOY), recipe="", two=WORKERS, many=420, delay_ms=12),
}


def forget_kinds(monkeypatch):
    monkeypatch.setenv(registry.VARIABLE, "")
    monkeypatch.syspath_prepend(ROOT)
    registry.field_kinds.cache_clear()


def stored(cache, name):
    """Read one field: item key -> (sample, array), in snapshot order."""
    return {key.hex(): (sample, array.tobytes()) for sample, key, array in items(cache, name)}


def num_entries(cache, name):
    return open_snapshot(cache).fields[name].entries
