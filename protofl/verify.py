"""The contract that every method keeps, as checks on small made-up federations (`trials`): `protofl verify METHOD`.

A check looks at one promise and says what is wrong and where: method, function, round, client. Nothing here knows a
method by name, and no data set is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from . import options, records, registry
from .cells import Cell
from .engine.base import MethodError
from .errors import UserError
from .evaluate import TestSet, global_row, personal_row, score
from .experiment import Settings, cells
from .federation import Round
from .method import Bill, Diverged, Method, Rows, Tree
from .protocol import Protocol
from .run import set_up_process
from .tree import nbytes
from .trials import (
    CLASSES,
    TOLERANCE,
    Held,
    Trial,
    Watched,
    apart,
    awkward,
    billed,
    leaves,
    misplaced,
    separable,
    skewed,
    undisturbed,
)

LEARNT = 0.95
"""Accuracy that every method reaches on separable data."""


class Broken(Exception):
    """What is wrong, and where: a promise is not kept."""


class Unjudged(Exception):
    """Why a check does not apply to a method."""


class Verdict(NamedTuple):
    """What came of a check; kept: None where it does not apply. line: what is wrong, why not, or a remark."""

    check: Check
    kept: bool | None
    line: str = ""


@dataclass(frozen=True)
class Check:
    """One promise: its name, what it means, and the look, which raises `Broken` or `Unjudged` or returns a remark."""

    name: str
    says: str
    look: Callable[[Subject], str | None]

    def judge(self, subject: Subject) -> Verdict:
        """Look, and turn whatever is raised into a line."""
        try:
            with undisturbed():
                return Verdict(self, True, self.look(subject) or "")
        except Unjudged as e:
            return Verdict(self, None, str(e))
        except Exception as e:
            return Verdict(self, False, told(e))


CHECKS: list[Check] = []
"""All checks, in the order in which they are made."""


def check(says: str) -> Callable[[Callable[[Subject], str | None]], Callable[[Subject], str | None]]:
    """Add a check of the function's name."""

    def add(look: Callable[[Subject], str | None]) -> Callable[[Subject], str | None]:
        CHECKS.append(Check(look.__name__, says, look))
        return look

    return add


def told(e: Exception) -> str:
    """An error in a line, with its place where it does not tell it itself."""
    line = " ".join(str(e).split())
    if isinstance(e, Broken | MethodError | UserError | Diverged):
        return line
    frames = traceback.extract_tb(e.__traceback__)
    at = [f for f in frames if "site-packages" not in f.filename][-1]
    return f"{type(e).__name__}: {line} [{Path(at.filename).name}, line {at.lineno}, {at.name}]"


class Subject:
    """A method on trial. Runs that several checks look at are made once; an error in one is kept with it."""

    def __init__(self, make: Method | Callable[[], Method]) -> None:
        self.make = make

    @functools.cached_property
    def method(self) -> Method:
        """The method with its options."""
        return self.make if isinstance(self.make, Method) else self.make()

    def again(self) -> Method:
        """An equal method that remembers nothing, as a new process has it."""
        return dataclasses.replace(self.method)

    @functools.cached_property
    def watched(self) -> Watched:
        """The awkward scene in the loop, looked over the shoulder."""
        return Watched(self.method, awkward())

    @functools.cached_property
    def batched(self) -> Trial:
        """The same, many clients at once."""
        return Trial(self.again(), awkward(), engine="batched").run()

    def ran(self) -> Watched:
        """The watched run, if it came to its end."""
        with contextlib.suppress(Exception):  # `runs` tells it
            if self.watched.error is None:
                return self.watched
        raise Unjudged("it does not run")

    def clear(self, of: str) -> None:
        """Raise what the watched run saw; unjudged where it saw nothing and did not come to its end."""
        faults: list[str] = []
        with contextlib.suppress(Exception):  # `runs` tells it
            faults = self.watched.faults.get(of, [])
        if faults:
            raise Broken(faults[0] + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""))
        self.ran()


# ---- what can be read off, and what the watched run saw --------------------------------------------------------------


@check("it builds with its defaults, every option says its reason and source, its file says what it is")
def builds(subject: Subject) -> None:
    method, scene = subject.method, awkward()
    cls = type(method)
    if "__dataclass_fields__" not in vars(cls):
        raise Broken(f"{cls.__name__} is no dataclass of its own: @dataclass(frozen=True) stands before the class")
    if not (sys.modules[cls.__module__].__doc__ or "").strip():
        raise Broken(f"the file of {cls.__name__} has no docstring, which `protofl methods` shows: idea, source, map")
    fields = options.fields(cls)
    for name in fields:
        o = options.option(fields[name])
        if not (o.why and o.source):
            raise Broken(f"option {name} has no reason or source: choice, number, flag, value take why= and source=")
    options.validate(method, cls.__name__)
    for preset, values in cls.presets.items():
        if "preset" not in fields or preset not in options.option(fields["preset"]).readings:
            raise Broken(f"presets name {preset!r}, which is no reading of an option `preset`")
        options.read(cls, values, f"preset {preset}")
    if strange := sorted(set(cls.open_fields) - set(options.fields(Protocol))):
        raise Broken(f"open_fields: the protocol has no field {strange[0]!r}")
    try:
        registry.check(method, scene.protocol(), method.adapt(scene.protocol()), scene.net)
    except UserError as e:
        raise Broken(f"with its defaults it refuses a plain setting: {e}") from None


@check("it plays rounds of ragged clients with BatchNorm, augmentation, momentum, decay and clip")
def runs(subject: Subject) -> None:
    if subject.watched.error is not None:
        raise subject.watched.error


@check("what it shares, keeps, sends and shows are trees of tensors, Rows and trees: countable, storable")
def trees(subject: Subject) -> None:
    subject.clear("trees")


@check("functions of a batch and client programs write into nothing that they are given")
def functions(subject: Subject) -> None:
    subject.clear("functions")


@check("functions in a request are methods or functions of a module, the same for all clients")
def requests(subject: Subject) -> None:
    subject.clear("requests")


@check("rows of padding change nothing that a function of a batch says")
def padding(subject: Subject) -> None:
    subject.clear("padding")


@check("surveys and tallies are sums: however the data are cut into batches, they add up to the same")
def sums(subject: Subject) -> None:
    subject.clear("sums")


@check("server functions leave uploads, shared and private as they are")
def aggregate(subject: Subject) -> None:
    subject.clear("aggregate")


@check("uploads of different clients share no memory")
def uploads(subject: Subject) -> None:
    made = {"loop": subject.ran().rounds}
    with contextlib.suppress(Exception):  # `engines` tells it
        made["batched"] = subject.batched.rounds
    for engine, rounds in made.items():
        for played in rounds:
            owner: dict[int, tuple[int, str]] = {}
            for i, upload in zip(played.ids, played.uploads):
                for path, v in leaves(upload):
                    j, other = owner.setdefault(v.untyped_storage().data_ptr(), (i, path)) if v.numel() else (i, path)
                    if i != j:
                        raise Broken(f"{path} of client {i} and {other} of client {j} are one memory "
                                     f"[{engine}, round {played.t}]")  # fmt: skip


# ---- the same numbers ------------------------------------------------------------------------------------------------


def listed(numbers: Sequence[int]) -> str:
    """Numbers in words."""
    return ", ".join(map(str, numbers))


def figures(played: Round) -> Tree:
    """What a round came to, as a tree."""
    scalars = {**played.bytes, **played.samples, "state_bytes": played.state_bytes, **played.terms}
    sent = zip(played.ids, played.uploads, played.client_terms)
    return Tree({k: torch.tensor(float(v), dtype=torch.float64) for k, v in scalars.items()}) | {
        f"client {i}": Tree(upload=upload, terms=terms) for i, upload, terms in sent
    }


def compare(first: Trial, other: Trial, tolerance: float = 0.0, skip: int = 0) -> None:
    """Two runs must not differ; the first `skip` exchanges of `first` are left out."""
    for a, state, b, mine in zip(first.rounds[skip:], first.states[skip:], other.rounds, other.states):
        for pair in ((figures(a), figures(b)), (state, mine)):
            difference, path = apart(*pair)
            if difference > tolerance:
                raise Broken(f"{path} differs by {difference:.1e} [round {a.t}, clients {listed(a.ids)}]")


@check("many clients in one call (batched) come to the numbers of one after the other (loop), to 1e-10")
def engines(subject: Subject) -> None:
    loop = subject.ran()
    compare(loop, subject.batched, TOLERANCE)
    difference, path = apart(loop.scores(), subject.batched.scores())
    if difference > TOLERANCE:
        raise Broken(f"scores of {path} differ by {difference:.1e} [after the last round]")


@check("the same run again gives the same bits, whatever ran before or the global generators hold")
def repeatable(subject: Subject) -> None:
    compare(subject.ran(), Trial(subject.method, awkward(), salt=2).run())


@check("stopped, stored, read back by a new process and resumed, a run gives the same bits")
def resume(subject: Subject) -> None:
    straight = subject.ran()
    done = [k for k, r in enumerate(straight.rounds) if 0 <= r.t < straight.protocol.rounds - 1]
    if not done:
        raise Unjudged("its run is a single round")
    t, state, met = straight.rounds[done[0]].t + 1, straight.states[done[0]], straight.mets[done[0]]
    with tempfile.TemporaryDirectory() as name:
        folder = records.RunFolder(Path(name))
        memory = folder.memory(round=t)
        for client, kept in state.clients.items():
            if kept:
                memory.put(int(client), kept)
        folder.save_state(records.State(t, state.shared, state.private, met, memory.files))
        stored = records.RunFolder(Path(name)).states()[0]
        trial = Trial(subject.again(), awkward(), salt=1, memory=folder.memory(stored.clients, stored.round))
        trial.shared, trial.private, trial.met = stored.shared, stored.private, set(stored.met)
        difference, path = apart(state, trial.state())
        if difference:
            raise Broken(f"{path} is not what was stored [after round {t - 1}]")
        compare(straight, trial.run(t), skip=done[0] + 1)


@check("evaluation changes nothing: state and uploads stay as they are, later rounds are the same")
def evaluation(subject: Subject) -> None:
    straight, method = subject.ran(), subject.again()
    everybody = "all" if method.keeps_personal else "active"
    trial = Trial(method, awkward(), salt=1, metrics=("gm", "pm_v"), pm_clients=everybody)
    trial.introduce()
    for t in range(min(2, trial.protocol.rounds)):
        played = trial.play(t)
        held = Held({**trial.state(), "received": played.received, "uploads": played.uploads, "shown": played.shown})
        for name, ask in questions(trial, played).items():
            ask()
            if wrong := held.changed():
                raise Broken(f"{name} changed {wrong} [after round {t}]")
    try:
        compare(straight, trial)
    except Broken as e:
        raise Broken(f"where rounds are evaluated, {e}") from None


def questions(trial: Trial, played: Round) -> dict[str, Callable[[], Any]]:
    """What the evaluation asks after a round, by name."""
    method = trial.method
    return {
        "global_model or personal_model": trial.scores,
        "refresh": lambda: list(trial.refreshed()) if trial.personalised else [],
        "stages": lambda: method.stages(trial.shared, trial.private),
        "prototypes": lambda: method.prototypes(trial.shared, trial.private),
        "client_prototypes": lambda: [method.client_prototypes(u) for u in played.uploads],
    }


# ---- what it says of itself ------------------------------------------------------------------------------------------


@check("prototypes and client_prototypes are of classes of the data, of one width, and finite")
def prototypes(subject: Subject) -> None:
    trial = subject.ran()
    table = trial.method.prototypes(trial.shared, trial.private)
    widths: set[tuple[int, ...]] = set()
    if table is not None:
        if not isinstance(table, Rows) or misplaced(Tree(rows=table), "") or table.values.shape[:1] != (CLASSES,):
            raise Broken(f"prototypes must be Rows with values [{CLASSES}, d] and has [{CLASSES}]")
        if not bool(table.values[table.has].isfinite().all()):
            raise Broken("a row of prototypes that `has` marks is not finite")
        widths.add(tuple(table.values.shape[1:]))
    played = trial.trained()[-1]
    for i, upload in zip(played.ids, played.uploads):
        mine, where = trial.method.client_prototypes(upload), f"[round {played.t}, client {i}]"
        if mine is None:
            continue
        rows, ids = mine
        if rows.dim() < 2 or ids.shape != rows.shape[:1] or ids.is_floating_point():
            raise Broken(f"client_prototypes must be [rows, d] and class ids [rows], not {list(rows.shape)} and "
                         f"{list(ids.shape)} of {ids.dtype} {where}")  # fmt: skip
        if strange := set(ids.tolist()) - set(trial.task.counts[i].nonzero()[:, 0].tolist()):
            raise Broken(f"client_prototypes name class {min(strange)}, which the client does not have {where}")
        if not bool(rows.isfinite().all()):
            raise Broken(f"a row of client_prototypes is not finite {where}")
        widths.add(tuple(rows.shape[1:]))
        if len(widths) > 1:
            raise Broken(f"prototypes of several widths: {', '.join(str(list(w)) for w in sorted(widths))} {where}")
    if not widths:
        raise Unjudged("it has no prototypes")


@check("`bill` is what a round measures: bytes, samples and state; entries of `constant` never change")
def bill(subject: Subject) -> None:
    subject.ran()
    said = subject.method.bill()
    if not isinstance(said, Bill) or not said.server:
        raise Broken("bill must return a Bill, whose `server` says in words what the server does")
    trial = Trial(subject.again(), billed())
    trial.introduce()
    start, known = trial.shared, 0
    for t in range(trial.protocol.rounds):
        table = trial.method.prototypes(trial.shared, trial.private)
        known = 0 if table is None else int(table.has.sum())
        played = trial.play(t)
    where = f"[round {played.t}, clients {listed(played.ids)}]"
    for name in trial.method.constant:
        if apart(start[name], trial.shared[name])[0]:
            raise Broken(f"shared/{name} is declared constant and changes {where}")
    each = [symbols(trial, i, u, known) for i, u in zip(played.ids, played.uploads)]
    measured = {**played.bytes, **played.samples, "state": played.state_bytes}
    for name in ("down", "up", "trained", "forward", "state"):
        text = getattr(said, name)
        try:
            values = [float(eval(text, {"__builtins__": {}}, s)) for s in each]
        except (NameError, SyntaxError, TypeError) as e:
            raise Broken(f"{name}={text!r}: {e}; the symbols are {', '.join(each[0])}") from None
        wanted = (1 if name in played.samples else 4) * (max(values) if name == "state" else sum(values))
        if wanted != measured[name]:
            raise Broken(f"{name}={text!r} comes to {wanted:g}, a run measures {measured[name]:g} {where}")


def symbols(trial: Trial, client: int, upload: Tree, known: int) -> dict[str, float]:
    """The symbols of a bill for one client; known: classes with a global prototype."""
    net, w = trial.task.net, trial.task.initial
    mine = trial.method.client_prototypes(upload)

    def floats(tree: Tree) -> float:
        return nbytes(tree) / 4

    return {
        "P": floats(w), "B": floats(w.without(net.head)), "H": floats(w.only(net.head)),
        "L": floats(w.only(net.projection)), "V": floats(w.only(net.last_block or "$")), "K": net.classes, "K_t": known,
        "K_i": int((trial.task.counts[client] > 0).sum()), "N_i": 0 if mine is None else len(mine[1]),
        "d": net.encoded, "q": net.dim, "z": net.projected or net.encoded, "n": trial.task.sizes[client],
        "E": trial.protocol.local_epochs, "int": 2,
    }  # fmt: skip


# ---- what it is good for ---------------------------------------------------------------------------------------------


@check("one client a round, a single sample, a class that nobody has, beta 0.05: everything stays finite")
def extremes(subject: Subject) -> None:
    subject.ran()
    trial = Trial(subject.again(), skewed()).run()
    for played, state in zip(trial.rounds, trial.states):
        for path, v in leaves(figures(played) | state):
            if v.is_floating_point() and not bool(v.isfinite().all()):
                sizes = listed([trial.task.sizes[i] for i in played.ids])
                raise Broken(f"{path} is not finite [round {played.t}, clients {listed(played.ids)}, {sizes} samples]")
    if trial.personalised and (missing := set(trial.able()) - set(dict(trial.refreshed()))):
        raise Broken(f"refresh has no model for client {min(missing)}")
    for path, v in leaves(trial.scores()):
        if bool(v.isnan().any()) or bool(v.isneginf().all(1).any()):
            raise Broken(f"scores of {path} mean nothing [after the last round]")


@check("it learns four separable classes: GM over 95 % within 25 rounds (PM(V) where GM is undefined)")
def learns(subject: Subject) -> str:
    subject.ran()
    scene = separable()
    trial = Trial(subject.again(), scene, engine="batched", metrics=("gm", "pm_v"))
    test = TestSet(scene.x, scene.y, scene.pipeline, scene.net.classes)
    trial.introduce()
    for t in range(trial.protocol.rounds):
        played = trial.play(t)
        name, reached = accuracy(trial, played, test)
        if reached > LEARNT:
            break
    if trial.conclude() is not None:
        name, reached = accuracy(trial, played, test)
    line = f"{name} {100 * reached:.1f} % after {played.t + 1} round{'s' * (played.t > 0)}"
    if not reached > LEARNT:
        raise Broken(line)
    return line


def accuracy(trial: Trial, played: Round, test: TestSet) -> tuple[str, float]:
    """GM, or PM(V) where GM is undefined."""
    net, model = trial.task.net, trial.global_model()
    gm = None if model is None else global_row(score(model, net, test))["gm"]
    if gm is not None:
        return "GM", gm
    if not trial.personalised:
        raise Unjudged("it has neither a global nor personal models")
    models = trial.refreshed() if trial.protocol.pm_protocol == "refresh" else trial.personal(played)
    scored = {i: score(m, net, test) for i, m in models}
    counts = np.stack([c.numpy() for c in trial.task.counts])
    value = personal_row(scored, counts, test.per_class())["pm_v"]
    if value is None:
        raise Unjudged("neither its global nor its personal models have scores")
    return "it has no GM; PM(V)", value


# ---- for callers -----------------------------------------------------------------------------------------------------

MARKS = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("-", "dim")}


def report(methods: list[str], assignments: Sequence[str], out: Console) -> int:
    """Try methods by name or file, with settings `method.option=value`, and print what came of it -> exit code."""
    settings = Settings(methods=methods, seeds=[0])
    for assignment in assignments:
        settings.take_text(assignment)
    asked = cells(settings)
    for cell in asked:
        registry.load(cell.method.name)
    set_up_process()
    kept = [_tried(cell, out) for cell in asked]
    return 0 if all(kept) else 1


def _tried(cell: Cell, out: Console) -> bool:
    """Print a method's verdicts as they come -> whether it keeps the contract."""
    out.print(Text(registry.label(cell.method.name), style="bold"))
    subject = Subject(functools.partial(cell.method.build, cell.protocol))
    broken = 0
    for one in CHECKS:
        _, kept, line = one.judge(subject)
        mark, style = MARKS[kept]
        out.print(Text.assemble((f"{mark} {one.name:<11}", style), line if kept is None else one.says))
        if line and kept is not None:
            out.print(Padding(Text(line, style="dim" if kept else "bold"), (0, 0, 0, 13), expand=False))
        broken += kept is False
    out.print(f"{broken} of {len(CHECKS)} checks failed" if broken else "it keeps the contract", style="bold")
    return not broken
