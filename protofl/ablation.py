"""One factor at a time: what each open choice of a method does, against the method as it is set.

A row is a reading of a choice; its runs differ from those of the base in that reading alone: same split, initial
weights, client draws and batches. Readings that a method's file claims to change nothing (`protofl.same`) are not run
but proved: three rounds in float64, compared in what the models score.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from . import options, registry, run
from .cells import Cell
from .engine import workers
from .errors import UserError, nearest
from .experiment import Settings, cells
from .federation import Federation
from .method import Method, Model
from .protocol import ALIASES, Protocol
from .same import FIELDS, Same, Scene

ROUNDS = 3
"""Rounds of a proof."""

IMAGES, CLIENTS = 500, 5
"""Test images, and clients of a round, on which a proof compares scores."""

TOLERANCE = 1e-10
"""How far two ways to the same float64 number may be apart, in units of the larger of 1 and the number."""

SPLITS = (1, 2, 3, 4)
"""Seeds of the other splits."""


@dataclass(frozen=True)
class Row:
    """A reading of a choice.

    changed: by option (METHOD.OPTION) or protocol field, what differs from the base; beside: what differs from the
    method as it is set in the row and its base alike.
    """

    choice: str
    reading: str
    default: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    rule: str = ""
    """The rule by which the same runs are reported instead, where the choice is which round counts."""


Rescale = Callable[[Any, Any, Any], Any]
"""(federation, round, shared) -> shared."""


@dataclass(frozen=True)
class Sides:
    """What a claim says to be equal, as cells; rescale: what undoes a factor on the left.

    alike: whether both sides score in the same way; of another method's headline the predictions alone are compared.
    """

    left: Cell
    right: Cell
    rescale: Rescale | None = None
    alike: bool = True


@dataclass(frozen=True)
class Proved:
    """How far apart two sides are, as the largest difference of scores after any of `rounds` rounds."""

    gap: float
    rounds: int

    def holds(self, same: Same) -> bool:
        """Whether they are as equal as was claimed: in all bits, or as real numbers."""
        return self.gap == 0 if same.exact else self.gap <= TOLERANCE


@dataclass
class Studied:
    """A row with its cells and those of its base, or with the reason why it cannot be run; and what is claimed of it."""

    row: Row
    cells: list[Cell] = field(default_factory=list)
    base: list[Cell] = field(default_factory=list)
    refused: str = ""
    instead: str = ""
    """Where it can be set, if the method's file or the protocol says so."""
    claims: list[tuple[Same, Sides]] = field(default_factory=list)
    proofs: list[Proved | str] = field(default_factory=list)
    """In the order of the claims; a text says why there is none."""

    @property
    def idle(self) -> bool:
        """Whether it is proved to change nothing."""
        return any(
            same.idle and isinstance(p, Proved) and p.holds(same) for (same, _), p in zip(self.claims, self.proofs)
        )


# ---- which readings there are ---------------------------------------------------------------------------------------


def rows(
    method: Method, name: str, protocol: Protocol, choices: Sequence[str] = (), pairs: Sequence[Sequence[str]] = ()
) -> list[Row]:
    """Every reading that differs from the method as it is set. choices: some alone, `a` or `a=reading`; pairs: `a,b` in full.

    With pairs and no choices, the pairs alone.
    """
    known = _choices(method, protocol)
    asked = [choice.partition("=") for choice in dict.fromkeys(choices or ([] if pairs else known))]
    for choice in (*(choice for choice, _, _ in asked), *(c for pair in pairs for c in pair)):
        if choice not in known:
            raise UserError(f"{name} has no open choice {choice!r}{nearest(choice, known)}; it has: {', '.join(known)}")
    crossed: list[Sequence[str]] = list(pairs) or ([] if choices else list(method.crossed))
    made: list[Row] = []
    for choice, single, reading in asked:
        others = list(_readings(method, name, protocol, choice, known[choice]))
        wanted = [row for row in others if not single or row.reading.partition(" (")[0] == reading]
        if single and not wanted:
            there = ", ".join(row.reading.partition(" (")[0] for row in others)
            raise UserError(f"{choice}={reading} is no other reading of {name}'s {choice}, which has: {there}")
        made += [row for row in wanted if row not in made]
    alone = {tuple(row.changed.items()) for row in made}
    both = [row for pair in crossed for row in _cross(method, name, protocol, pair, known)]
    return made + [row for row in both if tuple(row.changed.items()) not in alone]


def _named(choice: str) -> str:
    """`a` or `a=reading` by its full name."""
    name, equals, reading = choice.partition("=")
    return ALIASES.get(name, name) + equals + reading


def _choices(method: Method, protocol: Protocol) -> dict[str, tuple[Any, ...]]:
    """The readings of every choice: options of the method, protocol fields that its paper leaves open, the split."""
    mine = {n: options.option(f).readings for n, f in options.fields(method).items()}
    fields = {n: options.option(f).readings for n, f in options.fields(Protocol).items() if n in method.open_fields}
    out = {**mine, **fields, "partition_seed": (0, *SPLITS)}
    return {n: readings for n, readings in out.items() if len(readings) > 1 or n == "preset"}


def _readings(method: Method, name: str, protocol: Protocol, choice: str, readings: Sequence[Any]) -> Iterator[Row]:
    """The other readings of one choice."""
    if choice == "preset":
        for preset in readings:
            if preset != method.preset and preset != options.fields(method)["preset"].default:  # type: ignore[attr-defined]
                yield Row(choice, preset, method.preset, {f"{name}.preset": preset}, dict(method.needs.get(preset, {})))  # type: ignore[attr-defined]
        return
    now = _value(method, protocol, choice)
    if choice == "report":
        yield from (Row(choice, r, now, rule=r) for r in readings if r != now)
        return
    for reading in readings:
        if options.text(reading) != options.text(now):
            with_ = method.together.get((choice, reading), {})
            changed = {_key(method, name, n): v for n, v in {choice: reading, **with_}.items()}
            told = f" (with {', '.join(f'{n}={options.text(v)}' for n, v in with_.items())})" if with_ else ""
            yield Row(choice, options.text(reading) + told, options.text(now), changed)


def _cross(
    method: Method, name: str, protocol: Protocol, pair: Sequence[str], known: Mapping[str, tuple[Any, ...]]
) -> Iterator[Row]:  # fmt: skip
    """All readings of two choices together, but the method as it is set."""
    now = [_value(method, protocol, choice) for choice in pair]
    readings = [list(dict.fromkeys([value, *known[choice]])) for choice, value in zip(pair, now)]
    for values in itertools.product(*readings):
        if [options.text(v) for v in values] != [options.text(v) for v in now]:
            differs = [(n, v) for n, v, was in zip(pair, values, now) if options.text(v) != options.text(was)]
            changed = {_key(method, name, n): v for n, v in differs}
            told = [", ".join(options.text(v) for v in each) for each in (values, now)]
            yield Row(" x ".join(pair), told[0], told[1], changed)


def _value(method: Method, protocol: Protocol, choice: str) -> Any:
    return getattr(method if choice in options.fields(method) else protocol, choice)


def _key(method: Method, name: str, choice: str) -> str:
    return f"{name}.{choice}" if choice in options.fields(method) else choice


# ---- their cells ----------------------------------------------------------------------------------------------------


def study(settings: Settings, choices: Sequence[str] = (), pairs: Sequence[Sequence[str]] = ()) -> list[Studied]:
    """The ablation of the one method of `settings`; raises `UserError` for what cannot be."""
    if len(settings.methods) != 1:
        raise UserError(f"an ablation is of one method, not of {', '.join(settings.methods)}")
    if varied := [k for k, values in settings.over.items() if len(values) > 1]:
        raise UserError(f"an ablation is made in one setting: give one value of {', '.join(varied)}")
    base, name = cells(settings), registry.label(settings.methods[0])
    ready = run.prepare(base[0])
    full = [tuple(map(_named, pair)) for pair in pairs]
    found = rows(ready.method, name, base[0].protocol, [_named(c) for c in choices], full)
    made = []
    for row in found:
        one = Studied(row)
        try:
            one.base = _legal(_cells(settings, row.beside), row.beside)
            told = {row.choice: row.reading, **row.beside}
            one.cells = _legal(_cells(settings, {**row.beside, **row.changed}), told)
            one.claims = list(_claims(settings, row, ready, name))
        except UserError as refusal:
            one.base, one.refused = [], str(refusal)
            one.instead = _instead(row, ready, name)
        made.append(one)
    return made


def _cells(settings: Settings, changes: Mapping[str, Any]) -> list[Cell]:
    """The cells of the settings with some of them changed."""
    changed = copy.deepcopy(settings)
    changed.given.clear()
    for key, value in changes.items():
        owner, dot, option = key.rpartition(".")
        if dot:
            changed.take_option(owner, option, value)
        else:
            changed.take(key, list(value) if isinstance(value, tuple) else value, "ablation")
    return cells(changed)


def _legal(asked: list[Cell], told: Mapping[str, Any]) -> list[Cell]:
    """The cells, checked; told: what is said of them beside method, beta and seed."""
    for cell in asked:
        run.prepare(cell)
    words = tuple((name, options.text(value)) for name, value in told.items())
    return [dataclasses.replace(cell, swept=words) for cell in asked]


def _covering(row: Row, ready: run.Prepared, name: str) -> Iterator[Same]:
    """The claims that the method's file and the protocol make of a row in this setting."""
    key = _key(ready.method, name, row.choice)
    if key in row.changed and not row.beside:
        scene = _scene(ready)
        made = [same for part in type(ready.method).__mro__ for same in vars(part).get("same", ())]
        yield from (
            same for same in (*made, *FIELDS)
            if same.option == row.choice and same.covers(row.changed[key]) and same.when(scene)
        )  # fmt: skip


def _scene(ready: run.Prepared) -> Scene:
    return Scene(ready.method, ready.cell.protocol, ready.net, ready.split.counts)


def _instead(row: Row, ready: run.Prepared, name: str) -> str:
    """A setting in which a reading that is refused here can be set."""
    return next((same.instead for same in _covering(row, ready, name)), "")


def _claims(settings: Settings, row: Row, ready: run.Prepared, name: str) -> Iterator[tuple[Same, Sides]]:
    """What is claimed of a row, with what has to be equal."""

    def keys(given: Mapping[str, Any]) -> dict[str, Any]:
        return {_key(ready.method, name, n): v for n, v in given.items()}

    for same in _covering(row, ready, name):
        scaled = {n: f(_scene(ready)) for n, f in same.scaled.items()}
        left = _cells(settings, keys(same.beside) | dict(row.changed) | keys(scaled))
        other = copy.deepcopy(settings)
        if same.method:
            known, given = options.fields(registry.load(same.method)), settings.options.get(name, {})
            other.methods, other.options = [same.method], {same.method: {k: v for k, v in given.items() if k in known}}
        right = _cells(other, keys(same.beside) | keys(same.against))
        yield same, Sides(left[0], right[0], same.rescale, not same.method)


# ---- proofs ---------------------------------------------------------------------------------------------------------


def prove(sides: Sides, tell: Any = None) -> Proved:
    """Play both sides in float64 and compare what all models score after every round."""
    run.set_up_process()
    both = [_federation(cell) for cell in (sides.left, sides.right)]
    count = min(ROUNDS, *(fed.protocol.rounds for fed, _ in both))
    for fed, _ in both:
        fed.introduce()
    gap = 0.0
    for t in range(count):
        left, right = (_play(fed, x, t, rescale) for (fed, x), rescale in zip(both, (sides.rescale, None)))
        gap = max(gap, _apart(left, right, sides.alike))
    return Proved(gap, count)


def _federation(cell: Cell) -> tuple[Federation, torch.Tensor]:
    """A cell in float64, ready to play, and the test images that are scored."""
    ready = run.prepare(dataclasses.replace(cell, protocol=dataclasses.replace(cell.protocol, precision="fp64")))
    made, test = run.task(ready)
    return Federation(ready.method, made), test.pipeline.test(test.x[:IMAGES])


HEADLINE = "the headline"
"""The name of the first scores, beside the name that a method gives them."""

Scores = Mapping[str, torch.Tensor | None]


def _play(fed: Federation, x: torch.Tensor, t: int, rescale: Rescale | None) -> list[Scores]:
    """Round t -> the scores of the global model and, where they are measured, of clients' own models."""
    played = fed.play(t)
    if rescale is not None:
        fed.shared = rescale(fed, played, fed.shared)
    models = [fed.global_model()]
    if set(fed.protocol.metrics) - {"gm"}:
        models += [model for _, model in itertools.islice(fed.personal(played), CLIENTS)]
    return [_scores(fed, model, x) for model in models]


def _scores(fed: Federation, model: Model | None, x: torch.Tensor) -> Scores:
    """By name, the first beside them as the headline."""
    if model is None:
        return {HEADLINE: None}
    with torch.no_grad():
        out = model.scores(fed.task.net.bound("eval"), model.tree, x)
    named = out if isinstance(out, dict) else {"network": out}
    return {**named, HEADLINE: next(iter(named.values()))}


def _apart(a: Sequence[Scores], b: Sequence[Scores], alike: bool) -> float:
    """The largest difference of the scores that both have, in units of the larger of 1 and the score.

    alike: of the headlines too, else of their predictions, where any difference is infinite.
    """
    gap = 0.0
    for x, y in zip(a, b):
        for name in x.keys() & y.keys():
            if name == HEADLINE and not alike:
                gap = max(gap, _disagree(x[name], y[name]))
            else:
                gap = max(gap, _distance(x[name], y[name]))
    return gap


def _disagree(x: torch.Tensor | None, y: torch.Tensor | None) -> float:
    same = x is y if x is None or y is None else bool((x.argmax(-1) == y.argmax(-1)).all())
    return 0.0 if same else math.inf


def _distance(x: torch.Tensor | None, y: torch.Tensor | None) -> float:
    if x is None or y is None:
        return 0.0 if x is y else math.inf
    distance = torch.where(x == y, 0.0, (x - y).abs() / x.abs().clamp(1, 1e300))
    return float(distance.nan_to_num(math.inf).max())


def prove_all(studied: Sequence[Studied], count: int, console: Console) -> None:
    """Prove every claim in `count` processes."""
    asked = [(one, i) for one in studied for i in range(len(one.claims))]
    for one in studied:
        one.proofs = [""] * len(one.claims)
    if not asked:
        return

    def ended(number: int, proved: Any, failure: tuple[str, str] | None) -> None:
        one, i = asked[number]
        one.proofs[i] = proved if failure is None else failure[0]
        console.print(f"claim {number + 1} of {len(asked)}: {_told(one, i)}", highlight=False, markup=False)

    items = [one.claims[i][1] for one, i in asked]
    if min(count, len(items)) == 1:
        for number, sides in enumerate(items):
            ended(number, prove(sides), None)
    else:
        workers.run(items, prove, count, lambda number, event: None, ended)


def _told(one: Studied, i: int) -> str:
    """What became of a claim, in a line."""
    proof, row, same = one.proofs[i], one.row, one.claims[i][0]
    what = f"{row.choice}={row.reading} ({same.why})"
    if isinstance(proof, str):
        return f"{what}: {proof}"
    how = "bit for bit" if proof.gap == 0 else f"to {proof.gap:.1g}"
    return f"{what}: equal {how}" if proof.holds(same) else f"{what}: REFUTED, scores differ by {proof.gap:.2g}"


def extent(studied: Sequence[Studied]) -> str:
    """What an ablation is about to do, in a line; before the proofs: what will be proved."""
    idle = sum(one.idle or (not one.proofs and any(same.idle for same, _ in one.claims)) for one in studied)
    refused, choices = sum(bool(one.refused) for one in studied), len({one.row.choice for one in studied})
    return (
        f"{len(studied)} readings of {choices} choices: {len(studied) - idle - refused} to run, {idle} proved to change nothing "
        f"instead, {refused} cannot be set here"
    )


# ---- as a record ----------------------------------------------------------------------------------------------------


def document(studied: Sequence[Studied], method: str) -> dict[str, Any]:
    """The ablation as a report reads it: rows, digests of their runs by seed, what was proved."""
    return {"method": method, "rows": [_document(one) for one in studied]}


def _document(one: Studied) -> dict[str, Any]:
    row = one.row
    claims = [{"why": same.why, "instead": same.instead, "idle": same.idle, "equals": _other(same), **_shown(same, proof)}
              for (same, _), proof in zip(one.claims, one.proofs)]  # fmt: skip
    runs = {} if one.refused or one.idle else _digests(one.cells)
    return {"choice": row.choice, "reading": row.reading, "default": row.default, "rule": row.rule,
            "beside": {k: options.text(v) for k, v in row.beside.items()}, "refused": one.refused, "instead": one.instead,
            "idle": one.idle, "claims": claims, "runs": runs, "base": {} if one.refused else _digests(one.base)}  # fmt: skip


def _other(same: Same) -> str:
    """What a reading that acts is equal to, in words; empty: the method as it is set."""
    told = [same.method, *(f"{n}={options.text(v)}" for n, v in same.against.items())]
    told += [f"({n} rescaled)" for n in same.scaled] + ["(prototypes rescaled)"] * (same.rescale is not None)
    told += [f"at {n}={options.text(v)}" for n, v in same.beside.items()]
    return " ".join(filter(None, told))


def _shown(same: Same, proof: Proved | str) -> dict[str, Any]:
    if isinstance(proof, str):
        return {"gap": None, "rounds": 0, "holds": False, "problem": proof}
    gap = proof.gap if math.isfinite(proof.gap) else None
    return {"gap": gap, "rounds": proof.rounds, "holds": proof.holds(same), "problem": ""}


def _digests(asked: Sequence[Cell]) -> dict[str, str]:
    return {str(cell.protocol.seed): run.prepare(cell).digest for cell in asked}
