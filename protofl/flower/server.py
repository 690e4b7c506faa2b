"""The server's part: an ordinary federation whose pool is a grid of Flower's nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from torch import Tensor

from .. import __version__, records, run
from ..clients import Clients, Worked
from ..evaluate import TestSet, accuracy, score
from ..federation import Federation, Round
from ..handles import RunTask
from ..method import Diverged
from ..tree import Tree
from . import settings
from .client import Loader
from .messages import HELLO, LOG, NEVER, WORK, content, record, tree

POLL = 0.5
"""Seconds between two looks for replies."""


class Nodes:
    """A pool whose processes are Flower's nodes, one for each client.

    wait: seconds for all clients that are needed to be there; timeout: seconds for a client's part of an exchange.
    """

    everything = True  # a client is nowhere but on its node

    def __init__(self, grid: Any, clients: int, wait: float, timeout: float) -> None:
        self.grid, self.wait, self.timeout = grid, wait, timeout
        self.counts: list[list[int]] = [[] for _ in range(clients)]
        self.at: dict[int, int] = {}  # the node of a client
        self.asked: dict[str, int] = {}  # the node that a question went to
        self.greeted: set[int] = set()
        self.since: dict[int, int] = {}  # the round of what a client remembers

    # -- who is there ---------------------------------------------------------------------------------------------

    def meet(self, needed: Iterable[int], when: str) -> None:
        """Wait until every client has a node that is there; nodes that came since are asked who they are."""
        end, found, told = time.monotonic() + self.wait, dict[int, int](), list[int]()
        while True:
            there = set(self.grid.get_node_ids())
            self._greet(there)
            self._hear(found, when)
            self.at = {i: node for i, node in {**self.at, **found}.items() if node in there}
            missing = [i for i in needed if i not in self.at]
            if not missing and not self.asked:
                return
            if missing and missing != told:
                LOG.info("waiting for client %s, %s", ", ".join(map(str, missing)), when)
                told = missing
            if time.monotonic() > end:
                which = ", ".join(map(str, missing))
                who = f"no node for client {which}" if missing else "a node does not say who it is"
                raise RuntimeError(f"{who} within {self.wait:g} s, {when}: start its SuperNode, or raise `wait`")
            time.sleep(POLL)

    def _greet(self, there: set[int]) -> None:
        """Ask nodes that nobody knows; one that has gone is asked again if it comes back under the same number."""
        self.asked = {k: node for k, node in self.asked.items() if node in there}
        self.greeted &= there
        for node in sorted(there - self.greeted):
            self.asked[self._send(RecordDict(), node, HELLO, "hello")] = node
            self.greeted.add(node)

    def _hear(self, found: dict[int, int], when: str) -> None:
        """Who nodes say they are, into `found`: client -> node."""
        for reply in self.grid.pull_messages(list(self.asked)) if self.asked else ():
            node = self.asked.pop(reply.metadata.reply_to_message_id)
            told = content(reply, f"node {node}, {when}")
            i, counts, version = told["told"]["client"], list(told["told"]["counts"]), told["with"]["protofl"]
            if version != __version__:
                raise RuntimeError(f"client {i} (node {node}) has protofl {version}, the server {__version__}")
            if i in found:
                raise RuntimeError(f"nodes {found[i]} and {node} both say that they are client {i}: see partition-id")
            if self.counts[i] and self.counts[i] != counts:
                raise RuntimeError(f"client {i} came back with other data (node {node}), {when}")
            found[i], self.counts[i] = node, counts

    # -- an exchange ----------------------------------------------------------------------------------------------

    def work(
        self, clients: Clients, hook: str, t: int, groups: list[list[int]], shared: Tree,
        memory: Callable[[int], Tree | None],
    ) -> Iterator[tuple[list[int], list[Worked]]]:  # fmt: skip
        """Let the clients' nodes run a hook of the method -> each client as it is done.

        memory: not looked at; what a client remembers is on its node. A node that is gone, slow or fails ends the round.
        """
        ids, when = [i for crew in groups for i in crew], f"round {t}"
        self.meet(ids, when)
        broadcast, waiting = record(shared), dict[str, int]()
        order: dict[str, Any] = {"hook": hook, "t": t, "sizes": clients.task.sizes}
        for i in ids:
            mine = ConfigRecord(order | {"since": self.since.get(i, NEVER)})
            given = RecordDict({"order": mine, "shared": broadcast})
            waiting[self._send(given, self.at[i], WORK, when)] = i
        end = time.monotonic() + self.timeout
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                i = waiting.pop(reply.metadata.reply_to_message_id)
                yield [i], [self._worked(i, t, content(reply, self._who(i, when)), clients)]
            if waiting and time.monotonic() > end:
                who = "; ".join(self._who(i, when) for i in waiting.values())
                raise RuntimeError(f"no answer within {self.timeout:g} s: {who}")
            if waiting:
                time.sleep(POLL)

    def _who(self, client: int, when: str) -> str:
        return f"client {client} (node {self.at[client]}), {when}"

    def _worked(self, client: int, t: int, told: Any, clients: Clients) -> Worked:
        """A client's part as the federation knows it; what it cost is counted."""
        cost = told["told"]
        for kind in clients.engine.samples:
            clients.engine.samples[kind] += cost[kind]
        for part in clients.engine.seconds:
            clients.engine.seconds[part] += cost[part]
        if cost["keeps"]:
            self.since[client] = t
        upload, terms = (tree(told[name], clients.task.device) for name in ("upload", "terms"))
        return Worked(upload, Tree(), Tree(), terms)

    def _send(self, given: Any, node: int, kind: str, group: str) -> str:
        """Send a message -> its id."""
        message = Message(given, dst_node_id=node, message_type=kind, ttl=self.timeout, group_id=group)
        (sent,) = self.grid.push_messages([message]) or (None,)
        if sent is None:
            raise RuntimeError(f"the SuperLink takes no message to node {node}, {group}")
        return str(sent)


# ---- the app ------------------------------------------------------------------------------------------------------


def server_app(test: Loader, place: str) -> Any:
    """The ServerApp of an exported app. place: a file of the app."""
    app, folder = ServerApp(), Path(place).parent

    def main(grid: Any, context: Any) -> None:
        play(grid, context, test, folder)

    app.main()(main)
    return app


def task_of(app: settings.App, counts: list[list[int]]) -> RunTask:
    """The server's task: how many samples of each class [N][K] every client has, and not one of them."""
    labels = [torch.arange(len(mine)).repeat_interleave(torch.tensor(mine)) for mine in counts]
    parts = torch.split(torch.arange(sum(map(len, labels))), list(map(len, labels)))
    return app.task(torch.empty(0), torch.cat(labels), list(parts), None)


def play(grid: Any, context: Any, test: Loader, folder: Path) -> Federation:
    """All rounds of an app -> the federation; the server's state lies in the file `out` after every round."""
    run.set_up_process()
    app, config = settings.read(context.run_config, folder), context.run_config
    given = test(context)
    tests = None if given is None else TestSet(*_placed(app, given), app.pipeline, app.net.classes)
    nodes = Nodes(grid, app.protocol.clients, float(config["wait"]), float(config["timeout"]))
    nodes.meet(range(app.protocol.clients), "before round 0")
    fed = Federation(app.method, task_of(app, nodes.counts), pool=nodes)
    out, rounds = Path(str(config["out"])), app.protocol.rounds
    rows: list[dict[str, Any]] = []
    fed.introduce()
    for t in range(rounds):
        played = fed.play(t)
        _check_finite(fed, played)
        final = fed.conclude() if t + 1 == rounds else None
        if final is not None:
            _check_finite(fed, final)
        rows.append(_row(fed, played, tests))
        LOG.info("round %d of %d: %s", t + 1, rounds, _words(rows[-1]))
        state = records.pack(Tree(shared=fed.shared, private=fed.private), {"round": t + 1})
        records.write_bytes(out, state)
        records.write_bytes(out.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows).encode())
    LOG.info("the server's state is in %s, the rounds in %s", out.resolve(), out.with_suffix(".jsonl").name)
    return fed


def _placed(app: settings.App, given: Any) -> tuple[Tensor, Tensor]:
    x, y = settings.checked(app, given, "test() in data.py")
    return x.to(app.protocol.device), y.to(app.protocol.device)


def _check_finite(fed: Federation, played: Round) -> None:
    if broken := fed.broken(played):
        raise Diverged(f"{broken} in round {played.t}")


def _row(fed: Federation, played: Round, tests: TestSet | None) -> dict[str, Any]:
    """The record of a round: accuracy of the global model where there is one and a test set, loss terms, cost."""
    p = fed.protocol
    due = tests is not None and ((played.t + 1) % p.eval_every == 0 or played.t + 1 == p.rounds)
    model = fed.global_model() if due else None
    scored = None if model is None or tests is None else score(model, fed.task.net, tests)
    gm = None if scored is None else accuracy(scored.headline)
    return {"round": played.t, "clients": played.ids, "gm": gm, "terms": played.terms, "bytes": played.bytes,
            "samples": played.samples, "seconds": played.seconds}  # fmt: skip


def _words(row: dict[str, Any]) -> str:
    """A record in one line."""
    gm = [] if row["gm"] is None else [f"accuracy {row['gm']:.2%}"]
    return ", ".join([*gm, *(f"{name} {v:.4f}" for name, v in row["terms"].items()), f"{len(row['clients'])} clients"])
