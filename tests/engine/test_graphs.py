"""Recorded steps are the loop's: every method, without a GPU, on a recorder that does what CUDA's graphs do.

`Tape` writes down the operations of a step with the very tensors they read and write, undoes them, and does them again when
it is asked to: Python's numbers of the recorded step stay what they were, tensors that are made anew in it are the same
memory every time, and what CUDA cannot record (to wait for a number, to send one) is refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from elsewhere import AWAITED, DEVICE, PICKED, SENT, Away, elsewhere, fetched
from protofl.methods.fedavg import FedAvg
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from toy import build, everything, gap, outputs, toy

from protofl import registry
from protofl.engine import graphs
from protofl.engine.base import MethodError
from protofl.errors import UserError
from protofl.protocol import Protocol
from protofl.tree import Tree


def memory(tree: Any) -> set[int]:
    """Where the tensors of a tree lie."""
    leaves = [fetched(v) for v in pytree.tree_leaves(tree)]
    return {v.untyped_storage().data_ptr() for v in leaves if isinstance(v, Tensor)}


def refused(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether CUDA cannot record it: it waits for numbers, or sends some from here to there."""
    given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    if func in SENT:
        return len({isinstance(v, Away) for v in given}) > 1 or (
            kwargs.get("device") is not None
            and (torch.device(kwargs["device"]).type == DEVICE) != isinstance(args[0], Away)
        )
    masked = func.overloadpacket in PICKED and any(v.dtype == torch.bool for v in given[1:])
    return masked or func.overloadpacket in AWAITED


class Gone:
    """An operand from outside, which the tape does not keep alive: a graph knows its address alone."""

    def __init__(self, v: Tensor) -> None:
        self.there = weakref.ref(v)

    def get(self) -> Tensor:
        v = self.there()
        assert v is not None, "a replayed step reads memory that was freed"
        return v


class Tape(TorchDispatchMode):
    """ops: what was done, in order; made: memory that is the tape's own; before: what was in other memory that was written."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: set[int] = set()
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if refused(func, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        written = [
            v
            for spec, given in zip(func._schema.arguments, args)
            if spec.alias_info is not None and spec.alias_info.is_write
            for v in pytree.tree_leaves(given)
        ]
        self.before += [(v, v.clone()) for v in written if not memory(v) <= self.made]
        out = func(*args, **kwargs)
        new = [v for v in pytree.tree_leaves(out) if isinstance(v, Tensor) and not any(v is w for w in written)]
        self.made |= memory(new) - memory((args, kwargs))
        self.ops.append((func, *pytree.tree_map(self.operand, (args, kwargs)), new))
        return out

    def operand(self, v: Any) -> Any:
        """As it is written down."""
        return v if not isinstance(v, Tensor) or memory(v) <= self.made else Gone(v)

    def replay(self) -> None:
        for func, args, kwargs, places in self.ops:
            if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
                continue  # a view: its memory is another's
            args, kwargs = pytree.tree_map(lambda v: v.get() if isinstance(v, Gone) else v, (args, kwargs))
            out = func(*args, **kwargs)
            new = [v for v in pytree.tree_leaves(out) if isinstance(v, Tensor)]
            if places:
                for place, v in zip(places, new, strict=True):
                    place.copy_(v)


class Recorder:
    """In the place of `graphs.Recorder`. count: recorded and replayed steps."""

    count: ClassVar[dict[str, int]] = {"recorded": 0, "replayed": 0}

    def __init__(self, device: torch.device) -> None:
        pass

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        yield

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        with Tape() as tape:
            step()
        with torch.no_grad():
            for v, was in reversed(tape.before):
                v.copy_(was)
        tape.before.clear()
        self.count["recorded"] += 1

        def again() -> None:
            self.count["replayed"] += 1
            with torch.no_grad():
                tape.replay()

        return again


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "recorder", Recorder)
    monkeypatch.setattr(Recorder, "count", {"recorded": 0, "replayed": 0})


LONG: dict[str, Any] = {"rounds": 2, "local_epochs": 5, "batch_size": 16}
"""Epochs enough for full and for short batches to be recorded."""


SHORTER = {
    "fedcspc": {"calib_epochs": 6},
    "solo": {"epochs": 5},
    "creff": {"match_epochs": 6, "retrain_epochs": 6},
    "fedrep": {"head_epochs": 5},
}
"""Not so many steps of a method's own."""
QUICK = ("fedcspc", "moon", "scaffold")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in registry.names()]
)
def test_replayed_is_the_loop(name: str) -> None:
    method = build(name, SHORTER.get(name))
    here = toy(method, **LONG).run()
    with elsewhere():
        there = toy(method, engine="graphs", device=DEVICE, **LONG).run()
        left, told = fetched(everything(there)), fetched(outputs(there))
    assert Recorder.count["replayed"] > 3 * Recorder.count["recorded"] > 0
    assert gap(left, everything(here)) == 0
    assert gap(told, outputs(here)) == 0
    assert there.terms == here.terms
    assert there.rounds[-1].samples == here.rounds[-1].samples


class Waiting(FedAvg):
    """Looks at a number of its step."""

    def loss(self, net: Any, w: Any, b: Any, view: Any) -> Any:
        loss, parts = super().loss(net, w, b, view)
        return loss if loss.item() > 0 else -loss, parts


class Picking(FedAvg):
    """Takes as many rows as there are of a kind."""

    def loss(self, net: Any, w: Any, b: Any, view: Any) -> Any:
        return F.cross_entropy(net(w, b.x[b.y >= 0]), b.y[b.y >= 0]), Tree()


class Sending(FedAvg):
    """Makes a number anew in every step."""

    def loss(self, net: Any, w: Any, b: Any, view: Any) -> Any:
        loss, parts = super().loss(net, w, b, view)
        return loss * torch.tensor([2.0], device=loss.device, dtype=loss.dtype)[0], parts


@pytest.mark.parametrize("method", [Waiting, Picking, Sending])
def test_what_cannot_be_recorded_is_refused(method: type[FedAvg]) -> None:
    said = rf"{method.__name__}\.loss raised RuntimeError: operation not permitted"
    with elsewhere(), pytest.raises(MethodError, match=said):
        toy(method(), engine="graphs", device=DEVICE, **LONG).run()


class Stale(graphs.Graphs):
    """Batches are not copied to where they are read."""

    def record(self, *given: Any) -> graphs.Recorded:
        return graphs.dataclasses.replace(super().record(*given), rows=[])


class Apart(graphs.Graphs):
    """What a step leaves is where it was made."""

    def in_place(self, *given: Any) -> None:
        self.advance(*given)


class OneKind(graphs.Graphs):
    """Short batches are replayed as full ones."""

    def kind(self, *given: Any) -> graphs.Kind:
        return (0, *super().kind(*given)[1:])


@pytest.mark.parametrize("fault", [Stale, OneKind])
def test_faults_are_noticed(fault: type[graphs.Graphs]) -> None:
    with elsewhere():
        faulty = toy("fedavg", engine="graphs", device=DEVICE, **LONG)
        faulty.clients.engine = fault(faulty.task)
        left = fetched(everything(faulty.run()))
    assert Recorder.count["replayed"]
    assert gap(left, everything(toy("fedavg", **LONG).run())) > 1e-6


def test_memory_that_was_freed_is_noticed() -> None:
    with elsewhere():
        faulty = toy("fedavg", engine="graphs", device=DEVICE, **LONG)
        faulty.clients.engine = Apart(faulty.task)
        with pytest.raises(MethodError, match="reads memory that was freed"):
            faulty.run()


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(UserError, match="engine=graphs records the steps of a GPU: give --device cuda"):
        Protocol(engine="graphs")
