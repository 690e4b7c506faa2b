"""The cells of a table as tasks of Ray, and the clients of a large run as its actors.

Where a task runs, what it waits for, how data reach it, and that it runs once more where a node died, is Ray's. Nodes need
this package and Ray: no shared folder, no data set, no file of a method, which go through Ray's object store, to each node
once. A run plays in a folder of its node's; what a round changed in it is stored by the `Desk`, an actor on the driver's
node, before the next round begins. A task that Ray starts again is given what is stored, and resumes.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import inputs, pool, registry, run
from ..cells import Cell
from ..clients import Clients, DictMemory, Worked
from ..data.cache import cache_dir
from ..errors import UserError
from ..files import write_bytes
from ..records import checksum, pack, unpack
from ..run import Prepared
from ..tree import Tree
from .desk import Change, Desk, Event, changed, stamps, write
from .place import Place
from .workers import attempt, cores

POLL = 0.2
"""Seconds between two looks at what the tasks tell."""

GRACE = 5.0
"""Seconds that tasks have to end when they are interrupted."""

PATIENCE = 60.0
"""Seconds for which a run waits for all processes of its clients; then it takes those that Ray found room for."""


@dataclass(frozen=True)
class Order:
    """What a task is given: a cell, the digest that it has for the driver, and what a node lacks of it.

    data: of `inputs.needed`, in the object store; files: of its method, by name; processes: for its clients.
    """

    number: int
    cell: Cell
    digest: str
    data: dict[tuple[Any, ...], Any]
    files: dict[str, bytes]
    processes: int


# ---- the driver -----------------------------------------------------------------------------------------------------


@contextmanager
def connected(place: Place) -> Iterator[str]:
    """Ray, found or started on this machine -> what it has, in words."""
    address = place.found
    ours: dict[str, Any] = {"num_cpus": cores(), "include_dashboard": False} if address == "local" else {}
    before = signal.getsignal(signal.SIGTERM)
    try:
        _answers(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **ours)
        signal.signal(signal.SIGTERM, before)  # Ray's own would end with another code
        nodes, there = sum(node["Alive"] for node in ray.nodes()), ray.cluster_resources()
        yield f"Ray: nodes: {nodes}, CPUs: {there.get('CPU', 0):g}, GPUs: {there.get('GPU', 0):g}"
    except (OSError, RuntimeError, ValueError) as e:
        if ray.is_initialized():
            raise
        raise UserError(f"--engine ray: no cluster at {address!r}: {' '.join(str(e).split())}") from None
    finally:
        ray.shutdown()  # of a cluster that stays it ends what this process has there


def _answers(address: str) -> None:
    """Raise `OSError` where nothing listens: Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def run_all(
    cells: Sequence[Prepared], results: Path, place: Place, tell: Callable[[int, Event], None],
    ended: Callable[[int, Any, tuple[str, str] | None], None],
) -> None:  # fmt: skip
    """Play cells on the cluster that is connected; tell and ended: as in `workers.run`."""
    orders = _orders(cells, place)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    folders = [str((results / ready.folder).resolve()) for ready in cells]
    desk = ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here).remote(folders)
    tasks = [_task(order, place) for order in orders]
    waiting, running = deque(orders), dict[Any, int]()
    try:
        while waiting or running:
            while waiting and len(running) < (place.most or len(orders)):
                order = waiting.popleft()
                running[tasks[order.number].remote(order, desk)] = order.number
            ready, _ = ray.wait(list(running), timeout=POLL)
            for number, event in ray.get(desk.news.remote()):
                tell(number, event)
            for ref in ready:
                ended(running.pop(ref), *_result(ref))
    finally:
        with contextlib.suppress(RayError):
            for ref in running:
                ray.cancel(ref)
            if running:  # interrupted: they leave nothing behind on their nodes
                ray.wait(list(running), num_returns=len(running), timeout=GRACE)
            ray.get(desk.close.remote())


def _orders(cells: Sequence[Prepared], place: Place) -> list[Order]:
    """What the tasks are given; data sets go into the object store, each once."""
    count = int(ray.cluster_resources().get("CPU", 1))
    share = max(1, min(count, place.most or count) // len(cells))
    stored: dict[tuple[Any, ...], Any] = {}
    made = []
    for number, ready in enumerate(cells):
        needed = inputs.needed(ready.cell)
        stored.update({key: ray.put(what) for key, what in needed.items() if key not in stored})
        files = {name: Path(name).read_bytes() for name in registry.files(ready.cell.method.name)}
        processes = share if ready.protocol.device == "cpu" else 1
        made.append(Order(number, ready.cell, ready.digest, {k: stored[k] for k in needed}, files, processes))
    return made


def _task(order: Order, place: Place) -> Any:
    """A task with the resources of a cell. One that spreads its clients waits while they work: it takes no CPU."""
    device = order.cell.protocol.device
    needs = {"CPU": 1.0, "GPU": place.gpus_of(device)}
    if ":" in device:
        raise UserError(f"device {device!r}: which GPU a run gets is Ray's to say, use --device cuda")
    if not any(all(node["Resources"].get(k, 0) >= v for k, v in needs.items()) for node in ray.nodes()):
        raise UserError(
            f"--engine ray: no node of the cluster has {' and '.join(f'{v:g} {k}' for k, v in needs.items() if v)}"
        )
    spread = {"num_cpus": 0, "scheduling_strategy": "SPREAD"} if order.processes > 1 else {"num_cpus": 1}
    return ray.remote(play).options(num_gpus=needs["GPU"], retry_exceptions=[RayActorError], **spread)


def _result(ref: Any) -> tuple[Any, tuple[str, str] | None]:
    """What a task gave, or (line, traceback) of its failure."""
    try:
        kind, what = ray.get(ref)
    except RayError as e:
        line = next(iter(str(e).splitlines()), type(e).__name__)
        return None, (f"Ray gave it up: {line}; what it had finished is kept, run the command again", "")
    return (what, None) if kind == "done" else (None, what)


# ---- a node ---------------------------------------------------------------------------------------------------------


def play(order: Order, desk: Any) -> tuple[str, Any]:
    """A task: one run, from what is stored of it to its end -> as `workers.attempt`. Raises where Ray is to try again."""
    return attempt(partial(_play, order, desk), (RayActorError,))


def _play(order: Order, desk: Any) -> dict[str, Any]:
    turn, files = got(desk.begin.remote(order.number))
    with tempfile.TemporaryDirectory(prefix="protofl-", ignore_cleanup_errors=True) as scratch:
        ready = prepared(order)
        folder = Path(scratch) / ready.folder
        write(folder, [Change(name, content) for name, content in files.items()])
        sent = stamps(folder)

        def send(event: Event | None) -> None:
            got(desk.store.remote(order.number, turn, changed(folder, sent), event))

        spread = Spread(order) if order.processes > 1 else None
        try:
            summary = run.play(ready, Path(scratch), send, pool=spread)
        except Exception:
            send(None)
            raise
        send(None)
        return summary


def prepared(order: Order) -> Prepared:
    """The cell of an order, with what was sent along instead of what this node may lack."""
    for key, ref in order.data.items():
        if key not in inputs.received:
            inputs.received[key] = ray.get(ref)
    for name, content in order.files.items():
        if name not in registry.received:
            path = cache_dir() / "methods" / checksum(content) / Path(name).name
            write_bytes(path, content)
            registry.received[name] = path
    ready = run.prepare(order.cell)
    if ready.digest != order.digest:
        raise UserError(
            f"node {ray.util.get_node_ip_address()} makes another run of this cell ({ready.digest}, not {order.digest}): "
            "install the same version of protofl there"
        )
    return ready


def got(ref: Any) -> Any:
    """What a call gave; what it raised is raised here."""
    try:
        return ray.get(ref)
    except RayTaskError as e:
        raise (e.cause if isinstance(e.cause, Exception) else e) from e


# ---- the clients of a round -----------------------------------------------------------------------------------------


class Owner:
    """An actor that works on crews of one cell and keeps what the clients remember that it has worked on."""

    def open(self, order: Order) -> None:
        """Prepare the cell."""
        ready = prepared(order)
        self.clients = Clients(ready.method, run.task(ready)[0])
        self.memory, self.shared = DictMemory(), Tree()
        self.told: list[Any] = []
        run.set_up_process()

    def work(self, hook: str, t: int, ids: list[int], told: list[Any], kept: Mapping[int, bytes | None]) -> pool.Done:
        """Run a hook of the method for a crew.

        told: what was broadcast, in the object store; kept: the memories of those that another owner had, or nobody.
        """
        if told != self.told:
            self.told, self.shared = told, unpack(ray.get(told[0]))[0]
        self.memory.update({i: unpack(m)[0] for i, m in kept.items() if m is not None})
        worked = pool.crew(self.clients, hook, t, ids, self.shared, [self.memory.get(i) for i in ids])
        self.memory.update({i: one.memory for i, one in zip(ids, worked) if any(one.memory.values())})
        return pool.packed(self.clients, worked)


class Spread:
    """As `pool.Pool`, over the cluster. A client that remembers something stays with its owner; what it remembers is told
    to the run, which stores it, and goes to an owner where that is new: at first, and after a run was resumed."""

    everything = False  # a single crew is not worth a message

    def __init__(self, order: Order) -> None:
        self.order = order
        self.owners: list[Any] = []
        self.holds: dict[int, int] = {}

    def close(self) -> None:
        """End the actors."""
        for owner in self.owners:
            ray.kill(owner)
        self.owners = []

    def _open(self) -> None:
        made = ray.remote(Owner).options(num_cpus=1, scheduling_strategy="SPREAD")
        count = min(self.order.processes, int(ray.cluster_resources().get("CPU", 1)))  # nodes may have died
        asked = {(owner := made.remote()).open.remote(self.order): owner for _ in range(count)}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE)
        if not ready:
            ready, _ = ray.wait(list(asked))
        for ref in ready:
            with contextlib.suppress(RayActorError):  # its node died meanwhile
                got(ref)
                self.owners.append(asked[ref])
        if not self.owners:
            raise RayActorError

    def work(
        self, clients: Clients, hook: str, t: int, groups: list[list[int]], shared: Tree,
        memory: Callable[[int], Tree | None],
    ) -> Iterator[tuple[list[int], list[Worked]]]:  # fmt: skip
        """Run a hook of the method for these crews -> each crew as it is done."""
        if not self.owners:
            self._open()
        told, load, busy = [ray.put(pack(shared, {}))], [0] * len(self.owners), dict[Any, tuple[list[int], int]]()
        for ids in sorted(groups, key=clients.samples, reverse=True):
            free = min(range(len(load)), key=load.__getitem__)
            owner = self.holds.get(ids[0], free)
            load[owner] += clients.samples(ids)
            kept = {i: None if (m := memory(i)) is None else pack(m, {}) for i in ids if self.holds.get(i) != owner}
            busy[self.owners[owner].work.remote(hook, t, ids, told, kept)] = ids, owner
        while busy:
            (ref,), _ = ray.wait(list(busy))
            ids, owner = busy.pop(ref)
            worked = pool.taken(clients, got(ref))
            self.holds.update({i: owner for i, one in zip(ids, worked) if any(one.memory.values())})
            yield ids, worked
