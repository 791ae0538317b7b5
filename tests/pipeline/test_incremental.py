"""A cache of many incremental builds equals a full build of the same data."""

import json
import random
import shutil

import pytest
from small_builds import CASES, built, draw
from stored_items import contents

from latentcache.fields.registry import field_kind
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot

STEPS = 6
LATENTS, EDGES, TOKENS = CASES["latents"], CASES["edge_map"], CASES["input_ids"]
TEXTS = ["", "a cat", "a dog, on a mat", "a cat\na kitten"]
SIZES = [(64, 64), (64, 96), (96, 64)]


def of_images():
    latents = LATENTS.fields(resolutions=(64, 32), flip=True, crop="random", crop_variants=2)
    texts = {"text_encoder": "stub", "caption_variants": 2, "shuffle_tags": True, "empty_prompt": True}
    others = {"prompt_embeds": texts, "mask": {}}
    return (
        latents | EDGES.fields() | {name: field_kind(name).settings(**settings) for name, settings in others.items()}
    )


def change_images(chance, data):
    path = data / f"{chance.randrange(8)}.png"
    height, width = chance.choice(SIZES)
    action = chance.choice(["write", "write", "write", "delete", "rename", "caption", "caption", "mask", "spoil"])
    if action == "write" or not path.exists():
        draw(path, chance.randrange(6), height=height, width=width)
    elif action == "delete" and len(list(data.glob("?.png"))) > 1:
        path.unlink()
    elif action == "rename":
        path.rename(data / f"{chance.randrange(8)}.png")
    elif action == "caption":
        path.with_suffix(".txt").write_text(chance.choice(TEXTS))
    elif action == "mask":
        mask = path.with_name(f"{path.stem}-masklabel.png")
        mask.unlink() if mask.exists() else draw(mask, chance.randrange(3), height=height, width=width)
    elif action == "spoil":
        path.write_bytes(path.read_bytes()[:-20])


def change_records(chance, data):
    path = data / f"{chance.randrange(3)}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    some = [json.dumps({"text": "word " * chance.randrange(1, 6)}) for _ in range(chance.randrange(1, 4))]
    action = chance.choice(["append", "shuffle", "insert", "cut", "spoil"])
    if action == "append" or not lines:
        lines += some
    elif action == "shuffle":
        chance.shuffle(lines)
    elif action == "insert":
        lines[:0] = some
    elif action == "cut":
        del lines[chance.randrange(len(lines)) :]
    else:
        lines.insert(chance.randrange(len(lines)), "{")
    path.write_text("\n".join([*lines, some[0]]) + "\n")


WORLDS = {"images": (of_images, change_images), "records": (TOKENS.fields, change_records)}


def history(world, seed, folder):
    """Alternate changes and builds; compare each cache with a full build."""
    fields, change = WORLDS[world]
    chance, data, cache = random.Random(seed), folder / "data", folder / "cache"
    data.mkdir(parents=True)
    if world == "images":  # one sample has inputs for every field
        draw(data / "9.png", 9)
        draw(data / "9-masklabel.png", 8)
        (data / "9.txt").write_text("a house")
    for step in range(STEPS):
        for _ in range(chance.randrange(1, 5)):
            change(chance, data)
        shards = sorted((cache / "shards").glob("*")) if step else []
        if shards and chance.random() < 0.2:
            shutil.rmtree(chance.choice(shards))
        options = {"fields": fields(), "allow_failed": "100%"}
        built(LATENTS, data, out=cache, **options)
        built(LATENTS, data, out=folder / f"whole-{step}", **options)
        grown, whole = contents(cache), contents(folder / f"whole-{step}")
        assert grown.keys() == whole.keys()
        for name, expected in whole.items():
            assert grown[name] == expected, (world, seed, step, name)
        shutil.rmtree(folder / f"whole-{step}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", WORLDS)
def test_incremental_builds_equal_a_full_build(world, seed, tmp_path):
    history(world, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_incremental_builds_equal_a_full_build_many_seeds(world, tmp_path):
    for seed in range(100, 250):
        history(world, seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))


def test_a_damaged_rejected_list_is_rewritten(tmp_path):
    data, cache = tmp_path / "data", tmp_path / "cache"
    draw(data / "0.png", 0)
    (data / "1.png").write_bytes(b"no image")
    built(LATENTS, data, out=cache, allow_failed="1")
    listed = CachePaths(cache).snapshot(1) / "rejected.jsonl"
    listed.write_bytes(listed.read_bytes()[:-9])
    report = built(LATENTS, data, out=cache, allow_failed="1")
    assert report.fields["latents"].encoded == 0
    assert [rejection.name for rejection in open_snapshot(cache).rejected] == ["1.png"]
