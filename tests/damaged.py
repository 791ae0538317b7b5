"""Flip bits in files of a cache."""

from latentcache.store.snapshot import open_snapshot


def flip(path, offset, mask=1):
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def damage_payload(cache, row=0, bit=0x10, field="latents", place=5):
    """Flip one bit in the payload of a row's entry; return the sample name."""
    snapshot = open_snapshot(cache)
    rows = snapshot.fields[field]
    entry = int(rows.entry[row])
    file = snapshot.paths.data(rows.shards[int(rows.shard[entry])])
    flip(file, int(rows.offset[entry]) + place, bit)
    return str(snapshot.samples.names[int(rows.sample[row])])
