"""Trace the file system calls of a process in a folder, and let chosen calls fail, with ptrace.

LMDB writes from C, so hooks in Python do not see its calls. This requires Linux on x86-64 and a kernel that lets a
parent trace its child. The child stops only at the calls named here, which a seccomp filter selects.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
from dataclasses import dataclass, field
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL = 0, 7, 12, 13, 24
_SETOPTIONS, _SYSCALL_INFO = 0x4200, 0x420E
#: Mark system calls, follow threads and forks, stop at filtered calls, die with the tracer.
_OPTIONS = 0x01 | 0x02 | 0x04 | 0x08 | 0x80 | 0x100000
_EVENT_SECCOMP = 7
_RAX, _RDX, _ORIG_RAX, _REGISTERS = 10, 12, 15, 27
_WALL = 0x40000000
_APPEND, _DSYNC, _CREAT, _TRUNC = os.O_APPEND, os.O_DSYNC, os.O_CREAT, os.O_TRUNC
_NAMES = {
    1: "write", 2: "open", 18: "pwrite", 20: "writev", 74: "sync", 75: "sync", 77: "ftruncate", 82: "rename",
    83: "mkdir", 84: "rmdir", 87: "unlink", 257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat",
    285: "fallocate", 296: "pwritev", 316: "renameat",
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One successful call that opens a file of a folder, changes the folder, or makes a change durable."""

    name: str
    """write, truncate, create, mkdir, rename, unlink, rmdir or sync; open for a call without changes."""
    path: str
    to: str = ""
    offset: int = 0
    data: bytes = b""
    durable: bool = False
    """A write is durable when it returns."""


@dataclass
class Trace:
    operations: list = field(default_factory=list)
    calls: int = 0
    """Number of calls, including failed ones."""
    status: int = 0
    """Exit status, negative for death by a signal."""


def unavailable():
    """Return the reason why tracing is unavailable, or an empty string."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "needs Linux on x86-64"
    try:
        watch(lambda: 0, "/nowhere")
    except OSError as error:
        return f"the kernel does not let a process trace its child: {error}"
    return ""


def watch(work, root, intercept=lambda number, operation: None):
    """Fork, run ``work()`` in the child and give its status to the system; gives a :class:`Trace`.

    Args:
        work: Called in the child; returns the exit status.
        root: The folder that is watched.
        intercept: Gets the number of each call and the call. Returns None to let it run, an error number
            for it to fail with, "short" to write a half, "kill-after" to end the process when it is done.
    """
    child = os.fork()
    if not child:
        status = 99
        try:
            _ptrace(_TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            _install_filter()
            status = work()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        raise OSError(errno.EPERM, "ptrace")
    _ptrace(_SETOPTIONS, child, None, ctypes.c_void_p(_OPTIONS))
    _ptrace(_CONT, child, None, None)
    return _Watch(child, str(root), intercept).run()


class _Watch:
    def __init__(self, child, root, intercept):
        self.child, self.root, self.intercept = child, root, intercept
        self.trace, self.known, self.begun = Trace(), {child}, {}

    def run(self):
        while True:
            try:
                thread, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                # An unfinished write of another thread may have happened when the process was killed.
                begun = [found for found, answer in self.begun.values() if answer is None and _is_there(found)]
                self.trace.operations[-1:-1] = begun
                return self.trace
            if not os.WIFSTOPPED(status):
                if thread == self.child:
                    self.trace.status = os.waitstatus_to_exitcode(status)
                continue
            try:
                self.stopped(thread, status)
            except ProcessLookupError:  # killed already
                continue

    def stopped(self, thread, status):
        number, event = os.WSTOPSIG(status), status >> 16
        if event == _EVENT_SECCOMP:
            watched = self.entered(thread)
            _ptrace(_SYSCALL if watched else _CONT, thread, None, None)
        elif number == signal.SIGTRAP | 0x80:
            self.left(thread)
            _ptrace(_CONT, thread, None, None)
        else:
            is_signal = not event and not (number == signal.SIGSTOP and thread not in self.known)
            self.known.add(thread)
            _ptrace(_CONT, thread, None, ctypes.c_void_p(number if is_signal else 0))

    def entered(self, thread):
        """Inspect a call before it runs; return whether to stop at its end."""
        info = _info(thread)
        number, *values = struct.unpack_from("<7Q", info, 24)
        found = _operation(thread, _NAMES[number], values)
        if found is None or not (found.path + "/").startswith(self.root + "/"):
            return False
        self.trace.calls += 1
        answer = self.intercept(self.trace.calls, found)
        if answer == "short" and number in (1, 18) and values[2] > 1:
            _change(thread, _RDX, values[2] // 2)
            found = Operation(**vars(found) | {"data": found.data[: values[2] // 2]})
        elif isinstance(answer, int):
            _change(thread, _ORIG_RAX, -1)
        self.begun[thread] = found, answer
        return True

    def left(self, thread):
        found, answer = self.begun.pop(thread)
        if isinstance(answer, int):
            _change(thread, _RAX, -answer)
            return
        if not struct.unpack_from("<qB", _info(thread), 24)[1]:
            self.trace.operations.append(found)
        if answer == "kill-after":
            os.kill(self.child, signal.SIGKILL)


def _operation(thread, name, values):
    """Decode a call; None for a call without changes."""
    if name == "write" and values[0] <= 2:
        return None
    if name in ("write", "pwrite", "writev", "pwritev"):
        return _write(thread, name, values)
    if name in ("sync", "ftruncate", "fallocate"):
        path = _path_of(thread, values[0])
        size = values[1] if name == "ftruncate" else values[2] + values[3]
        return Operation("sync", path) if name == "sync" else Operation("truncate", path, offset=size)
    if name in ("open", "openat"):
        return _open(thread, values if name == "openat" else [_here(), *values])
    if name in ("rename", "mkdir", "rmdir", "unlink"):
        path = _text(thread, _here(), values[0])
        return Operation(name, path, to=_text(thread, _here(), values[1]) if name == "rename" else "")
    path = _text(thread, values[0], values[1])
    if name == "renameat":
        return Operation("rename", path, to=_text(thread, values[2], values[3]))
    return Operation({"mkdirat": "mkdir"}.get(name) or ("rmdir" if values[2] else "unlink"), path)


def _open(thread, values):
    path = _text(thread, values[0], values[1])
    if values[2] & _CREAT and not os.path.lexists(path):
        return Operation("create", path)
    return Operation("truncate" if values[2] & _TRUNC else "open", path)


def _write(thread, name, values):
    path = _path_of(thread, values[0])
    if not path.startswith("/") or path.endswith(" (deleted)"):
        return None
    fdinfo = dict(line.split(":", 1) for line in Path(f"/proc/{thread}/fdinfo/{values[0]}").read_text().splitlines())
    flags = int(fdinfo["flags"], 8)
    offset = (
        values[3] if name.startswith("p") else Path(path).stat().st_size if flags & _APPEND else int(fdinfo["pos"])
    )
    parts = [(values[1], values[2])]
    if name.endswith("v"):
        parts = list(struct.iter_unpack("<QQ", _memory(thread, values[1], 16 * values[2])))
    data = b"".join(_memory(thread, start, length) for start, length in parts)
    return Operation("write", path, offset=offset, data=data, durable=bool(flags & _DSYNC))


def _is_there(operation):
    path = Path(operation.path)
    if operation.name != "write" or not operation.data or not path.is_file():
        return False
    with path.open("rb") as file:
        return os.pread(file.fileno(), len(operation.data), operation.offset) == operation.data


def _here():
    return -100 & 0xFFFF_FFFF


def _path_of(thread, descriptor):
    try:
        return str(Path(f"/proc/{thread}/fd/{descriptor & 0xFFFF_FFFF}").readlink())
    except FileNotFoundError:
        return ""


def _text(thread, folder, address):
    name = b""
    while b"\0" not in name:
        start = address + len(name)
        name += _memory(thread, start, 4096 - start % 4096)
    here = folder & 0xFFFF_FFFF == _here()
    base = Path(f"/proc/{thread}/cwd").readlink() if here else Path(_path_of(thread, folder))
    return os.path.normpath(base / os.fsdecode(name.split(b"\0")[0]))


def _memory(thread, address, length):
    with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
        return os.pread(memory.fileno(), length, address) if length else b""


def _info(thread):
    buffer = ctypes.create_string_buffer(88)
    _ptrace(_SYSCALL_INFO, thread, ctypes.c_void_p(88), buffer)
    return buffer.raw


def _change(thread, register, value):
    registers = (ctypes.c_ulong * _REGISTERS)()
    _ptrace(_GETREGS, thread, None, registers)
    registers[register] = value & 0xFFFF_FFFF_FFFF_FFFF
    _ptrace(_SETREGS, thread, None, registers)


def _ptrace(request, thread, address, data):
    if _libc.ptrace(request, thread, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _install_filter():
    """Stop this process at the calls in ``_NAMES``; all other calls run normally."""
    load, equal, give = 0x20, 0x15, 0x06
    numbers = sorted(_NAMES)
    steps = [(load, 0, 0, 0)]
    steps += [(equal, len(numbers) - position, 0, number) for position, number in enumerate(numbers)]
    steps += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x7FF00000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(code))
    _libc.prctl(38, 1, None, 0, 0)  # no new privileges: the kernel requires it before a filter
    if _libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
