"""Seeded damage to the files of a cache, and checks against the intact content."""

import os
import random
import shutil

from commands import look

from latentcache import LatentcacheError, open_cache
from latentcache.identity.content import checksum

PAGE = 4096
#: Tokens in a row.
ROW = 4096


def say(*words):
    done = look(*words, "--json")
    if done.json["exit_code"] in (2, 3):
        assert done.json["error"]["fix"]
    return done


def files_of(cache):
    return [path for path in sorted(cache.rglob("*")) if path.is_file()]


def served(cache):
    """Read with the loader: (key, name) -> (latents, name, caption, sizes)."""
    found = {}
    for batch in open_cache(cache).loader(batch_size=2, prefetch=0):
        names = ("names", "captions", "original_size", "crop_top_left", "target_size")
        rows = zip(batch["keys"]["latents"], batch["latents"], *(batch[name] for name in names), strict=True)
        for key, latents, *about in rows:
            about = [part.tolist() if hasattr(part, "tolist") else part for part in about]
            found[key.numpy().tobytes(), about[0]] = (checksum(latents.contiguous().numpy().tobytes()), about)
    return found


def served_documents(cache):
    """Read documents (file and line -> ids) and packed rows (number -> (ids, labels))."""
    opened = open_cache(cache)
    documents = opened.documents()
    found = {documents.where(number): documents.read(number).tolist() for number in range(len(documents))}
    rows = opened.rows(pack=ROW)
    for number in range(len(rows)):
        row = rows[number]
        found[number] = row["input_ids"].tolist(), row["labels"].tolist()
    return found


def damage(cache, seed):
    """Damage one file; return a description. The same seed does the same damage."""
    chance = random.Random(seed)
    kinds = {}  # so that each kind is damaged equally often
    for path in files_of(cache):
        kinds.setdefault(path.name, []).append(path)
    path = chance.choice(kinds[chance.choice(sorted(kinds))])
    way = chance.choice(WAYS)
    path.chmod(0o644)
    return f"seed {seed}: {way.__name__.strip('_')} {path.relative_to(cache)} {way(path, chance) or ''}".strip()


def _flip(path, chance):
    data = bytearray(path.read_bytes())
    if not data:
        return "nothing to flip"
    places = [chance.randrange(len(data)) for _ in range(chance.choice([1, 1, 1, 8]))]
    for place in places:
        data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"at {places}"


def _zeroed_page(path, chance):
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data) // PAGE + 1) * PAGE
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    path.write_bytes(data)
    return f"at {start}"


def _swapped(path, chance):
    data = path.read_bytes()
    size = chance.choice([PAGE, 512, 16]) if len(data) > 2 * PAGE else max(len(data) // 4, 1)
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    if len(blocks) < 2:
        return "nothing to swap"
    one, other = chance.sample(range(len(blocks)), 2)
    blocks[one], blocks[other] = blocks[other], blocks[one]
    path.write_bytes(b"".join(blocks))
    return f"blocks {one} and {other} of {size}"


def _cut(path, chance):
    size = chance.randrange(path.stat().st_size or 1)
    os.truncate(path, size)
    return f"to {size}"


def _appended(path, chance):
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.choice([1, 7, PAGE])))


def _nonsense(path, chance):
    path.write_bytes(
        chance.choice([b"{}", b"[]", b"null", b"[" * 100_000, b"\xff\xfe\x00", b'{"format": {"version": 9}}'])
    )


def _emptied(path, chance):
    path.write_bytes(b"")


def _removed(path, chance):
    path.unlink()


def _folder(path, chance):
    path.unlink()
    path.mkdir()


def _link(path, chance):
    target = chance.choice(["nowhere", path.name, "/dev/null", "/dev/zero", "/"])
    path.unlink()
    path.symlink_to(target)
    return f"to {target}"


def _pipe(path, chance):
    path.unlink()
    os.mkfifo(path)


def _older(path, chance):
    others = [other for other in files_of(path.parents[1]) if other != path and other.suffix == path.suffix]
    if not others:
        return "no other file"
    other = chance.choice(others)
    shutil.copyfile(other, path)
    return f"by {other.name}"


WAYS = (_flip, _flip, _flip, _zeroed_page, _swapped, _cut, _appended, _nonsense, _emptied, _removed, _folder, _link,
        _pipe, _older)  # fmt: skip
_STATUSES = {0, 1, 3}
IMAGES = (served, "bad.png", ())
"""The way to read, the rejected input of the build, and more words for a build."""
DOCUMENTS = (served_documents, "a.jsonl", ("--workers", "0"))


def check(cache, whole, data, kind=IMAGES):
    """Check a damaged cache with every command; ``whole`` is the intact content."""
    read, rejected, words = kind
    fast, full = say("verify", cache), say("verify", cache, "--full")
    assert fast.status in _STATUSES, fast
    assert full.status in _STATUSES, full
    if fast.status:
        assert full.status, "the full verify calls clean what the fast one does not"
    info = say("info", cache, "--entries")
    assert info.status in (0, 3), info
    try:
        now = read(cache)
    except LatentcacheError:
        assert full.status, "clean, and the loader fails"
    else:
        # An older snapshot may have replaced the current one; its rows differ.
        assert all(whole.get(key) == value for key, value in now.items() if isinstance(key, str | tuple))
        if full.status == 0:
            assert now == whole, "clean, and the loader gives something else"
    built = say("build", data, "--out", cache, *words)
    assert built.status in (0, 1, 2, 3), built
    if built.status > 1:
        return  # every error names a fix
    quarantined = {item["path"] for item in built.json["items"]}
    assert quarantined == {rejected}, "what was allowed may be lost with the manifest, and nothing else"
    again = say("verify", cache, "--full", "--allow-failed", "1")
    if again.status == 0:
        assert read(cache) == whole
    else:  # a build does not read payloads
        assert {item["category"] for item in again.json["items"]} <= {"corrupt", "quarantined"}
        assert all(item["fix"] for item in again.json["items"] if item["category"] == "corrupt")
