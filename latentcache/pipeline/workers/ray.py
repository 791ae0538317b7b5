"""Workers on the nodes of a Ray cluster: an actor for each GPU or CPU supervises one local worker.

The actor runs the engine of one machine, so a crash, a hang or a lack of memory is found and mended on its node, and
costs no actor. The build polls actors and never waits for one. A node is compared with the build's own machine before
its first worker starts; one that differs is named and left out. An actor or node that is lost blames no sample: what
its worker committed is read from the shard, in a folder that all nodes share, or at a URL. The process of a lost
worker ends within seconds and seals its shard itself; only then its units are given out again. If the cache is at a
URL, each actor has a scratch folder on its node, and a worker reports what is at the URL.

Ray is imported here and nowhere else. Its API: https://docs.ray.io/en/latest/ray-core/api/core.html
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from latentcache import failpoint
from latentcache._version import __version__
from latentcache.encoders.devices import installed
from latentcache.errors import LatentcacheError, UnusableSampleError, UsageError, WorkerError
from latentcache.fields.protocol import DescribeContext, Described
from latentcache.fields.registry import field_kinds, load
from latentcache.identity.content import content_hash
from latentcache.pipeline.workers.engine import Ended, Post, Stop, Task, Work, portable
from latentcache.pipeline.workers.local import LocalEngine, recovered
from latentcache.pipeline.workers.resources import cpu_count
from latentcache.pipeline.workers.worker import LAST_S
from latentcache.sources.locations import read_image
from latentcache.store.atomic_io import write_json
from latentcache.store.catalog import load_catalog
from latentcache.store.lock import check_owner
from latentcache.store.paths import CachePaths
from latentcache.store.remote.view import StoredShards, scratch_folder, worker_folder

#: Threads of an encoder on CPUs: bits of its results depend on them.
_THREADS = "OMP_NUM_THREADS"
_LIBRARIES = ("torch", "pillow", "simplejpeg", "ray")
#: Seconds between two looks at the nodes, and between two at actors.
_NODES_S, _TICK_S = 1.0, 0.1
#: Seconds that one call of an actor waits for messages, and that an address may take to answer.
_POLL_S, _ANSWER_S = 1.0, 5.0
#: Seconds that connecting may take, and that the cluster may be silent: after 60 Ray ends the process of the build.
_INIT_S, _SILENT_S = 60.0, 40.0
#: Seconds that the process of a lost worker gets to seal its shard.
_ORPHAN_S = LAST_S + 2.0
#: Seconds before the next actor on a node that lost one, doubled after each, and at most.
_PAUSE_S, _MOST_PAUSE_S = 0.5, 60.0
#: Actors of a node that fail before it is left out, if none was ever ready.
_MOST_FAILURES = 3
#: Seconds without any worker after which the user is told.
_TELL_S = 20.0


def facts(task: Task | None) -> dict[str, str]:
    """What the build's machine and each node have to agree in, by name: versions, DATA and CACHE as they see them."""
    known = {name: version.partition("+")[0] for name, version in installed(_LIBRARIES).items()}
    known["latentcache"] = __version__
    for name, kind in field_kinds().items():
        module = type(kind).__module__
        if not module.startswith("latentcache."):
            source = Path(str(import_module(module).__file__)).read_bytes()
            known[f"source file of field {name}"] = sha256(source).hexdigest()[:12]
    if task is None:
        return known
    for location in task.locations:
        with suppress(UnusableSampleError):
            content = content_hash(read_image(task.root, location)[0])
            known[f"content of DATA {location['path']} in {task.root}"] = content.hex()[:12]
    with suppress(LatentcacheError):
        check_owner(CachePaths(Path(task.cache)).building, task.owner)
        known["owner of CACHE" if task.url else f"owner of CACHE {task.cache}, which nodes share,"] = task.owner
    return known


def differences(build: Mapping[str, str], task: Task | None, device: str, ask: Callable[..., Any]) -> Iterator[str]:
    """What this node has that differs from the build's machine, one phrase each."""
    here = facts(task)
    differing = [name for name, value in build.items() if here.get(name) != value]
    yield from (f"{name} is {here.get(name) or 'missing'}, not {build[name] or 'missing'}" for name in differing)
    if task is not None and not differing:
        yield from _other_model(task, device, ask)


def _other_model(task: Task, device: str, ask: Callable[..., Any]) -> Iterator[str]:
    """How the encoder of a field differs on this node: its fingerprint and all else that enters the recipe."""
    kind = field_kinds()[task.field]
    if not kind.describer:
        return
    recipe = kind.recipe.from_json(task.recipe)
    context = DescribeContext(recipe=recipe, provenance=task.provenance, device=device, ask=ask, check=True)
    try:
        described: Described = load(kind.describer)(kind.settings(), context)
    except LatentcacheError as error:
        yield f"{kind.encoder}: {error.what}"
        return
    if described.recipe.recipe_id != recipe.recipe_id:
        named = recipe.differences(described.recipe, (task.provenance, described.provenance))
        yield f"{kind.encoder} differs: {', '.join(setting for setting, _, _ in named) or 'recipe'}"


class Supervisor:
    """The actor: has one local worker at a time. ``neighbors`` actors share the node, this one included."""

    def __init__(self, variables: Mapping[str, str], device: str, neighbors: int) -> None:
        os.environ.update(variables)
        if _THREADS not in variables:  # Ray sets one thread for each CPU that an actor asks for
            os.environ.pop(_THREADS, None)
            if device != "cuda" and neighbors > 1:
                os.environ[_THREADS] = str(max(cpu_count() // neighbors, 1))
        field_kinds.cache_clear()
        self._device, self._neighbors = device, neighbors
        self._engine = LocalEngine(device, neighbors=neighbors)
        self._worker: Any = None
        self._folders = ExitStack()
        self._folder: Path | None = None
        """For the shards of a cache at a URL; None: it is in a folder that the nodes share."""
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def prepare(self, build: Mapping[str, str], task: Task | None, cost: int) -> list[str]:
        """Compare this node with the build's machine; get ready for the task if nothing differs."""
        try:
            task = self._at_url(task) if task is not None and task.url else task
        except LatentcacheError as error:
            return [error.what]
        problems = list(differences(build, task, self._device, self._engine.ask))
        if not problems and task is not None:
            device = "cuda" if self._device == "cuda" else "cpu*1"
            self._engine.open(
                replace(task, device=device, workers=1, locations=(), provenance={}), cost * self._neighbors
            )
        return problems

    def _at_url(self, task: Task) -> Task:
        """The task with a folder of this node, and a catalog of what is at the URL."""
        if self._folder is None:
            self._folder = self._folders.enter_context(worker_folder(scratch_folder(task.scratch)))
        paths = CachePaths(self._folder)
        StoredShards(task.url).fill(paths)
        write_json(paths.building, {"owner": task.owner})
        return replace(task, cache=str(self._folder), shards=load_catalog(paths).folders)

    def clear(self) -> None:
        """Remove the folder of this actor."""
        self._engine.close()
        self._folders.close()

    def start(self, shard: str) -> None:
        """Start a worker that writes a shard of this name."""
        try:
            self._worker = self._engine.start(0, self._outbox.put, shard=shard)
        except BaseException as error:  # noqa: BLE001 - raised by the build
            self._outbox.put(Ended(error=portable(error)))

    def send(self, message: Work | Stop) -> None:
        """Hand a message to the worker."""
        self._worker.send(message)

    def kill(self) -> None:
        """End the worker at once."""
        self._worker.kill()

    def poll(self) -> list[Any]:
        """Messages of the worker; waits a moment for the first one."""
        messages = []
        with suppress(queue.Empty):
            messages.append(self._outbox.get(timeout=_POLL_S))
            while True:
                messages.append(self._outbox.get_nowait())
        return messages

    def ask(self, target: str, arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
        """What a function returned or raised in the worker."""
        try:
            return self._engine.ask(target, **arguments), None
        except BaseException as error:  # noqa: BLE001 - raised by the build
            return None, portable(error)


class RayWorker:
    """A worker in an actor, see :class:`Worker`; None: the actor was lost before."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def send(self, message: Work | Stop) -> None:
        """See :class:`Worker`."""
        if self._actor is not None:
            self._actor.send.remote(message)

    def kill(self) -> None:
        """See :class:`Worker`."""
        if self._actor is not None:
            self._actor.kill.remote()


@dataclass(slots=True, eq=False, kw_only=True)
class _Actor:
    """An actor, as the build sees it."""

    handle: Any
    node: str
    label: str
    call: Any = None
    """The call that it has not answered; None: it is ready and has no worker."""
    is_ready: bool = False
    post: Post | None = None
    """Takes the messages of its worker; None: it has none."""
    shard: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    """A node that an actor was started on."""

    has_worked: bool = False
    """True once an actor was ready: others may come back."""
    losses: int = 0
    paused_until: float = 0.0
    left_out: str = ""
    """Why it gets no actor any more."""


class RayEngine(AbstractContextManager["RayEngine"]):
    """Workers of a Ray cluster, see :class:`Engine`.

    Args:
        address: ``host:port`` of the head node [default: ``RAY_ADDRESS``, else the cluster of this machine].
        workers: Actors at most in the whole cluster [default: one for each GPU; on CPUs one for each node, or for
            each CPU if the field is made on CPUs].
        device: ``auto`` (GPUs if the cluster has one), ``cuda`` or ``cpu``.
        warn: Takes sentences for the user; called in the thread that calls :meth:`slots`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        device: str = "auto",
        warn: Callable[[str], None],
    ) -> None:
        self._ray, self._is_ours = connected(address)
        self._stdout = redirect_stdout(sys.stderr)  # Ray prints what happens to nodes
        self._stdout.__enter__()
        self._workers, self._warn = workers, warn
        self._actor_class = self._ray.remote(concurrency_groups={"poll": 1})(Supervisor)
        gpus = any(node["Resources"].get("GPU") for node in self._alive())
        self.device = device if device != "auto" else "cuda" if gpus else "cpu"
        if self.device == "cuda" and not gpus and workers is None:
            self._disconnect()
            fix = "--device cpu, or --workers N to wait for nodes that join"
            raise WorkerError("no node of the Ray cluster has a GPU", fix=fix)
        self._per_cpu = False
        """True if each CPU gets an actor."""
        self._on_gpu = self.device == "cuda"
        self._most = 0
        self._task: Task | None = None
        self._facts = facts(None)
        self._cost = 0
        self._actors: dict[int, _Actor] = {}
        self._numbers = count()
        self._nodes = defaultdict[str, _Node](_Node)
        self._notes: deque[str] = deque()
        self._error: BaseException | None = None
        self._looked_at = self._asked_at = self._without_since = time.monotonic()
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._serve, name="ray", daemon=True)
        self._thread.start()

    def open(self, task: Task, cost: int) -> int:
        """See :class:`Engine`. Nodes are compared and actors started meanwhile."""
        kind = field_kinds()[task.field]
        on_gpu = self.device == "cuda" and kind.device == "accelerator" and task.needs_torch
        per_cpu = kind.device == "cpu" or (self._workers is not None and not on_gpu)
        known = facts(task)
        with self._lock:
            if (on_gpu, per_cpu) != (self._on_gpu, self._per_cpu):
                for number in list(self._actors):
                    self._drop(number)
            self._on_gpu, self._per_cpu, self._task, self._facts = on_gpu, per_cpu, task, known
            alive = self._alive()
            self._most = self._workers or (max(cost // kind.work.worker_cost, 1) if kind.device == "cpu" else 1 << 30)
            self._cost = cost // max(min(self._most, sum(map(self._size, alive))), 1)
            for actor in self._actors.values():
                actor.is_ready = False
                actor.call = actor.handle.prepare.remote(known, task, self._cost)
        if self._workers:
            self._request(self._workers)
        memory = int(max((node["Resources"].get("memory", 0) for node in alive), default=0))
        budget = task.host_memory or min(memory // 4, 4 << 30)
        return budget if kind.device == "cpu" else max(budget, memory)

    def slots(self) -> dict[int, str]:
        """See :class:`Engine`; raises what ends the build."""
        while self._notes:
            self._warn(self._notes.popleft())
        now = time.monotonic()
        if now - self._asked_at > _SILENT_S / 2:
            self._looked_at = now  # the build itself was paused
        self._asked_at = now
        if self._error is None and now - self._looked_at > _SILENT_S:
            self._error = _silence(TimeoutError(f"it has been silent for {_SILENT_S:.0f} s"))
        if self._error is not None:
            raise self._error
        with self._lock:
            return {number: actor.label for number, actor in self._actors.items() if actor.is_ready}

    def start(self, slot: int, post: Post) -> RayWorker:
        """See :class:`Engine`."""
        with self._lock:
            actor = self._actors.get(slot)
            if actor is None:  # lost since it was named
                post(Ended(died=True, lost=True, how="was lost"))
                return RayWorker(None)
            actor.post = post
            actor.shard = os.urandom(8).hex()
            actor.handle.start.remote(actor.shard)
            actor.call = self._polled(actor)
            return RayWorker(actor.handle)

    def ask(self, target: str, /, **arguments: Any) -> Any:
        """See :class:`Engine`; the first node that is ready answers."""
        self._most = max(self._most, 1)
        while not self.slots():
            time.sleep(_TICK_S)
        actor = self._actors[next(iter(self.slots()))]
        try:
            value, error = self._ray.get(actor.handle.ask.remote(target, arguments))
        except self._ray.exceptions.RayError as failure:
            why = f"{actor.label}: {_last_line(failure)}"
            fix = "run the same command again"
            raise WorkerError("a Ray actor ended before it answered", where=target, why=why, fix=fix) from failure
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """See :class:`Engine`."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(_ANSWER_S)
        if self._task is not None and self._task.url:
            self._ray.wait([actor.handle.clear.remote() for actor in self._actors.values()], timeout=_ANSWER_S)
        for number in list(self._actors):
            self._drop(number)
        if self._workers:
            self._request(0)
        self._disconnect()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _disconnect(self) -> None:
        if self._is_ours:
            self._ray.shutdown()
        self._stdout.__exit__(None, None, None)

    # -- the thread that looks after actors

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                nodes = self._alive() if time.monotonic() - self._looked_at >= _NODES_S else None
                with self._lock:
                    if nodes is not None:
                        self._looked_at = time.monotonic()
                        self._look({node["NodeID"]: node for node in nodes})
                    calls = {actor.call: number for number, actor in self._actors.items() if actor.call is not None}
                if not calls:
                    self._closed.wait(_TICK_S)
                    continue
                self._ray.wait(list(calls), timeout=_TICK_S)
                answered, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
                for call in answered:
                    with self._lock:
                        self._take(calls[call], call)
        except WorkerError as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001 - raised by slots()
            self._error = _silence(error)

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _size(self, node: Mapping[str, Any]) -> int:
        """Actors that a node has room for."""
        resources = node["Resources"]
        if self._on_gpu:
            return int(resources.get("GPU", 0))
        cpus = int(resources.get("CPU", 0))
        return cpus if self._per_cpu else min(cpus, 1)

    def _look(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        """Start the actors that are missing on these nodes, the first of each node first."""
        for number, actor in list(self._actors.items()):
            if actor.node not in nodes:
                self._lost(number, TimeoutError("its node is gone"))
        usable = {name: node for name, node in nodes.items() if not self._nodes[name].left_out}
        wanted = sorted((number, name) for name, node in usable.items() for number in range(self._size(node)))
        counts = Counter(name for _, name in wanted[: self._most])
        actors = Counter(actor.node for actor in self._actors.values())
        for name, neighbors in counts.items():
            if time.monotonic() >= self._nodes[name].paused_until:
                for _ in range(neighbors - actors[name]):
                    self._create(nodes[name], neighbors)
        left_out = [self._nodes[name].left_out for name in nodes if self._nodes[name].left_out]
        if left_out and not wanted and not any(node.has_worked for node in self._nodes.values()):
            fix = "make the node like the build's machine, or take it out of the cluster, and run the command again"
            raise WorkerError("no node of the Ray cluster can be used", why=left_out[0], fix=fix)
        if any(actor.is_ready for actor in self._actors.values()) or not self._most:
            self._without_since = time.monotonic()
        elif time.monotonic() - self._without_since > _TELL_S:
            self._without_since = float("inf")
            self._notes.append(f"waiting for a free {'GPU' if self._on_gpu else 'CPU'} in the Ray cluster")

    def _create(self, node: Mapping[str, Any], neighbors: int) -> None:
        """An actor on a node; it waits there until its device is free."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = node["NodeID"]
        variables = {key: value for key, value in os.environ.items() if key.startswith(("LATENTCACHE_", _THREADS))}
        if self._nodes[name].losses:
            variables.pop(failpoint.VARIABLE, None)
        handle = self._actor_class.options(
            num_cpus=0 if self._on_gpu else 1,
            num_gpus=1 if self._on_gpu else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
        ).remote(variables, "cuda" if self._on_gpu else "cpu", neighbors)
        actor = _Actor(handle=handle, node=name, label=f"node {node['NodeManagerAddress']} ({name[:6]})")
        actor.call = handle.prepare.remote(self._facts, self._task, self._cost)
        self._actors[next(self._numbers)] = actor

    def _polled(self, actor: _Actor) -> Any:
        return actor.handle.poll.options(concurrency_group="poll").remote()

    def _take(self, number: int, call: Any) -> None:
        """An actor has answered, or is lost."""
        actor = self._actors.get(number)
        if actor is None or actor.call is not call:
            return
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            self._lost(number, error)
            return
        actor.call = None
        if actor.post is None:  # it has compared its node
            if answer:
                self._leave_out(actor.node, f"{actor.label}: {'; '.join(answer)}")
            actor.is_ready = not answer
            self._nodes[actor.node].has_worked |= actor.is_ready
            return
        for message in answer:
            actor.post(message)
        if answer and isinstance(answer[-1], Ended):
            actor.post = None
        else:
            actor.call = self._polled(actor)

    def _leave_out(self, name: str, why: str) -> None:
        if not self._nodes[name].left_out:
            self._nodes[name].left_out = why
            self._notes.append(f"{why}; the node is left out")
        for number in [number for number, actor in self._actors.items() if actor.node == name]:
            self._drop(number)

    def _lost(self, number: int, error: BaseException) -> None:
        """An actor is gone, or cannot be reached."""
        actor = self._actors[number]
        node = self._nodes[actor.node]
        self._drop(number)
        node.paused_until = time.monotonic() + min(_PAUSE_S * 2.0 ** min(node.losses, 10), _MOST_PAUSE_S)
        node.losses += 1
        if not node.has_worked and node.losses >= _MOST_FAILURES:
            self._leave_out(actor.node, f"{actor.label}: {_last_line(error)}")

    def _drop(self, number: int) -> None:
        """End an actor; its worker, if it has one, is lost."""
        actor = self._actors.pop(number)
        with suppress(Exception):  # it is gone
            self._ray.kill(actor.handle)
        if actor.post is not None and self._task is not None and not self._closed.is_set():
            task = replace(self._task, shard=actor.shard)
            threading.Thread(target=_recover, args=(task, actor.post), daemon=True).start()

    def _request(self, count: int) -> None:
        """Ask the autoscaler of the cluster, if there is one, for room for ``count`` actors."""
        from ray.autoscaler.sdk import request_resources

        with suppress(Exception):  # there is none
            request_resources(bundles=[{"GPU": 1} if self._on_gpu else {"CPU": 1}] * count)


def _recover(task: Task, post: Post) -> None:
    """Say that a worker is lost, once its process has had the time to seal its shard."""
    until = time.monotonic() + _ORPHAN_S
    sealed = CachePaths(Path(task.cache)).shard(task.shard)
    while not sealed.exists() and time.monotonic() < until:
        time.sleep(_TICK_S)
    end = Ended(died=True, lost=True, how="was lost with its actor or node")
    try:
        post(end._replace(keys=recovered(task)))
    except BaseException as error:  # noqa: BLE001 - raised by the scheduler
        post(end._replace(error=error))


def _silence(error: BaseException) -> WorkerError:
    fix = "start the cluster again, then run the same command: committed entries are kept"
    return WorkerError("the Ray cluster does not answer any more", why=_last_line(error), fix=fix)


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def connected(address: str | None) -> tuple[Any, bool]:
    """The module of Ray, connected to a cluster; False if this process was connected before.

    Raises UsageError or WorkerError.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as error:
        fix = "pip install 'latentcache[ray]', on every node"
        raise UsageError("Ray is not installed", argument="engine", value="ray", fix=fix) from error
    if ray.is_initialized():
        return ray, False
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_address(address)
    failure = _connect(ray, address)
    if failure is None:
        return ray, True
    fix = "start a cluster with `ray start --head`, or name its head node with --address HOST:6379"
    if "ersion mismatch" in str(failure):
        fix = "install the same versions of Ray and Python on every node"
    name = "of this machine" if address == "auto" else f"at {address}"
    why = " ".join(str(failure).split())[:300]
    raise WorkerError(f"the Ray cluster {name} cannot be used", why=why, fix=fix) from failure


def _connect(ray: Any, address: str) -> BaseException | None:
    """Connect to a cluster; gives what went wrong.

    In a thread, because Ray takes SIGTERM in the main one, and tries for minutes to find a cluster that is gone.
    """
    failure: list[BaseException] = [TimeoutError(f"it did not answer within {_INIT_S:.0f} s")]

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
            failure.clear()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            failure[0] = error

    logging.getLogger("ray").setLevel(logging.ERROR)
    thread = threading.Thread(target=init, name="ray-init", daemon=True)
    thread.start()
    thread.join(_INIT_S)
    return failure[0] if failure else None


def _check_address(address: str) -> None:
    """See that something listens; Ray itself would try for minutes."""
    if "://" in address:
        fix = "run the build on a node of the cluster: `ray job submit -- latentcache build ...` does"
        raise UsageError("Ray clients cannot share a cache folder", argument="address", value=address, fix=fix)
    host, _, port = address.rpartition(":")
    if address in ("auto", "local"):
        return
    if not host or not port.isdecimal():
        raise UsageError("must be HOST:PORT", argument="address", value=address, fix="--address HOST:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        fix = "check that the head node runs (`ray status`) and that this machine may reach the port"
        raise WorkerError(f"no Ray cluster answers at {address}", why=str(error), fix=fix) from error
