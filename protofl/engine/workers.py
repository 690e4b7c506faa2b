"""Processes that run whole cells side by side, one thread each: more of them change no number.

The parent speaks to each worker through a pipe. A worker that dies fails the cell it was at, with its exit code, and
is replaced; workers whose parent is gone end by themselves.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from ..errors import failure

Work = Callable[[Any, Callable[[Mapping[str, Any]], None]], Any]
"""job(item, tell) -> result; a module-level function."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _context() -> Any:
    """Where it exists a server that has everything imported and forks workers; else every worker imports anew."""
    return mp.get_context("forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn")


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that start meanwhile import this package, and not the user's script, which would run once more in each.

    What they are given names things of this package or files, never objects of the script.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def warm(modules: Sequence[str]) -> None:
    """Begin to import what workers will need, in the process that forks them, while this one does other things."""
    context = _context()
    if context.get_start_method() == "forkserver":
        from multiprocessing import forkserver

        context.set_forkserver_preload(list(modules))
        with without_main():
            forkserver.ensure_running()


def _outlive_no_parent() -> None:
    """End this process when its parent is gone."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _serve(pipe: Connection, job: Work) -> None:
    """A worker's life: receive an item, run it, tell what happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_outlive_no_parent, daemon=True).start()
    while True:
        item = pipe.recv()
        if item is None:
            return
        pipe.send(attempt(partial(job, item, lambda event: pipe.send(("event", event)))))


def attempt(job: Callable[[], Any], raised: tuple[type[Exception], ...] = ()) -> tuple[str, Any]:
    """Do a job -> ("done", its result) or ("failed", (line, traceback)). raised: what is no failure of the job's."""
    try:
        return "done", job()
    except raised:
        raise
    except Exception as e:
        return "failed", failure(e)


class Worker:
    """One process and the pipe to it."""

    def __init__(self, job: Work) -> None:
        context = _context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, job))
        with without_main():
            self.process.start()
        theirs.close()
        self.item: int | None = None

    def give(self, number: int, item: Any) -> None:
        """Let it work on an item."""
        self.item = number
        self.pipe.send(item)

    def stop(self) -> None:
        """End the process, now."""
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def run(
    items: Sequence[Any], job: Work, count: int, tell: Callable[[int, Mapping[str, Any]], None],
    ended: Callable[[int, Any, tuple[str, str] | None], None],
) -> None:  # fmt: skip
    """Run `job` on every item in `count` processes.

    tell(number, event) for what a job tells; ended(number, result, failure) once per item, where failure is (line,
    traceback) or None.
    """
    waiting = deque(range(len(items)))
    workers = [Worker(job) for _ in range(min(count, len(items)))]
    try:
        for worker in workers:
            if waiting:
                _give(worker, waiting.popleft(), items)
        while any(w.item is not None for w in workers):
            ready = wait([w.pipe for w in workers if w.item is not None])
            for i, worker in enumerate(workers):
                if worker.pipe in ready:
                    _hear(worker, tell, ended)
                    if not worker.process.is_alive() and worker.item is None and waiting:
                        worker.stop()
                        workers[i] = worker = Worker(job)
                    if worker.item is None and waiting:
                        _give(worker, waiting.popleft(), items)
    finally:
        for worker in workers:
            worker.stop()


def _give(worker: Worker, number: int, items: Sequence[Any]) -> None:
    worker.give(number, items[number])


def _hear(
    worker: Worker, tell: Callable[[int, Mapping[str, Any]], None],
    ended: Callable[[int, Any, tuple[str, str] | None], None],
) -> None:  # fmt: skip
    """One message of a worker, or its death."""
    number = worker.item
    assert number is not None
    try:
        kind, what = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        code = worker.process.exitcode
        reason = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        worker.item = None
        ended(
            number,
            None,
            (f"its process died ({reason}); what it had finished is kept, run the command again", ""),
        )
        return
    if kind == "event":
        tell(number, what)
        return
    worker.item = None
    ended(number, what if kind == "done" else None, what if kind == "failed" else None)
