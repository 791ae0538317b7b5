"""Replay traced calls on a model of a disk and produce possible states after a power cut.

The model allows every state that POSIX allows. Synced data is present. Each 4 KiB page of each unsynced write is
present or absent, in any order. A file has any length since its last sync, with zeros for absent pages. Of the
name changes in a folder a prefix is present, for each folder separately. A file name is durable after a sync of
its folder, not of the file.
"""

from dataclasses import dataclass, field
from pathlib import Path

PAGE = 4096


@dataclass(eq=False)
class File:
    """A file: its content for processes, its synced content, and the writes between."""

    seen: bytearray = field(default_factory=bytearray)
    synced: bytearray = field(default_factory=bytearray)
    pending: list = field(default_factory=list)

    def write(self, offset, data, durable):
        _put(self.seen, offset, data)
        if durable:
            _put(self.synced, offset, data)
        else:
            self.pending.append((offset, data))

    def truncate(self, size):
        _resize(self.seen, size)
        self.pending.append((size, None))

    def sync(self):
        self.synced, self.pending = bytearray(self.seen), []

    def after_cut(self, chance):
        content = bytearray(self.synced)
        sizes = [len(content)]
        for offset, data in self.pending:
            sizes.append(offset if data is None else max(sizes[-1], offset + len(data)))
            if data is None:
                continue
            for start in _pages(offset, len(data)):
                if chance.random() < 0.5:
                    end = min(start - start % PAGE + PAGE, offset + len(data))
                    _put(content, start, data[start - offset : end - offset])
        if self.pending:
            _resize(content, chance.choice(sizes))
        return bytes(content)


@dataclass(eq=False)
class Folder:
    """The names in a folder: current, synced and pending."""

    seen: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)

    def change(self, names):
        """Change names in one step; None removes a name."""
        _rename(self.seen, names)
        self.pending.append(names)

    def sync(self):
        self.synced, self.pending = dict(self.seen), []

    def after_cut(self, chance):
        names = dict(self.synced)
        for change in self.pending[: chance.randint(0, len(self.pending))]:
            _rename(names, change)
        return names


class Disk:
    """The state of a folder during a sequence of operations."""

    def __init__(self, root):
        self.root, self.top = Path(root), Folder()

    def apply(self, operation):
        name, path = operation.name, operation.path
        if name == "open":
            return
        if name == "write":
            self._at(path).write(operation.offset, operation.data, operation.durable)
        elif name == "truncate":
            self._at(path).truncate(operation.offset)
        elif name == "sync":
            self._at(path).sync()
        elif name == "rename":
            self._rename(path, operation.to)
        else:
            made = {"create": File, "mkdir": Folder}.get(name)
            self._at(Path(path).parent).change({Path(path).name: made() if made else None})

    def cut(self, chance, target):
        """Write one possible state after a power cut to ``target``."""
        _lay_out(self.top, Path(target), chance)

    def _rename(self, old, new):
        source, target = self._at(Path(old).parent), self._at(Path(new).parent)
        moved = source.seen[Path(old).name]
        if source is target:
            source.change({Path(old).name: None, Path(new).name: moved})
        else:
            target.change({Path(new).name: moved})
            source.change({Path(old).name: None})

    def _at(self, path):
        found = self.top
        for name in Path(path).relative_to(self.root).parts:
            found = found.seen[name]
        return found


def _lay_out(folder, target, chance):
    target.mkdir()
    for name, node in folder.after_cut(chance).items():
        if isinstance(node, Folder):
            _lay_out(node, target / name, chance)
        else:
            (target / name).write_bytes(node.after_cut(chance))


def _pages(offset, length):
    """Return the offsets at which a write crosses pages."""
    end = offset + length
    return [offset, *range(offset - offset % PAGE + PAGE, end, PAGE)] if length else []


def _put(content, offset, data):
    if len(content) < offset + len(data):
        _resize(content, offset + len(data))
    content[offset : offset + len(data)] = data


def _resize(content, size):
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _rename(names, change):
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
