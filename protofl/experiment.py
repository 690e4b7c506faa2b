"""From what a user asks for to the cells of a table. Needs no torch: wrong names are refused at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import options, registry
from . import protocol as protocols
from .cells import Cell
from .errors import UserError, nearest
from .protocol import ALIASES, Protocol

LISTS = ("methods", "seeds", "beta")
"""Settings that take a list: every combination is a cell."""

APART = {"methods": "--methods", "seeds": "--seeds", "seed": "--seeds", "preset": "--preset", "dataset": "--dataset",
         "data_dir": "--data-dir"}  # fmt: skip
"""What no grid is over, and the option that gives it instead."""


@dataclass
class Settings:
    """What was asked for, from a suite file and the command line; `fields` are of the protocol, by its names."""

    methods: list[str] = field(default_factory=lambda: list(registry.ORDER))
    preset: str | None = None
    seeds: list[int] | None = None
    over: dict[str, list[Any]] = field(default_factory=dict)
    """The grid: values by protocol field or METHOD.OPTION; every combination is run."""
    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    data_dir: str | None = None
    given: dict[str, str] = field(default_factory=dict)
    """What one source (a suite file, or the command line) says of a key: that it is set, or that it is varied."""

    def _say(self, key: str, how: str) -> None:
        """Refuse a key that one source sets and varies."""
        if self.given.setdefault(key, how) != how:
            raise UserError(f"{key} is varied and set as well: leave one out")

    def take(self, name: str, given: Any, where: str) -> None:
        """One setting by its name; later ones win."""
        name = ALIASES.get(name, name)
        if given == "":
            raise UserError(f"{where}: {name} is empty")
        if name in LISTS and not (_texts(given) and all(isinstance(v, str | int | float) for v in _texts(given))):
            raise UserError(f"{where}: {name} must be a value or a list of values, and not an empty one")
        if name == "methods":
            asked = [str(m) for m in _texts(given)]
            self.methods = [m for one in asked for m in (registry.names() if one == "all" else [one])]
        elif name == "preset":
            self.preset = str(given)
        elif name == "seeds":
            self.seeds = [_seed(s) for s in _texts(given)]
        elif name == "beta":
            self._say(name, "set")
            self.over[name] = _texts(given)
        elif name == "data_dir":
            self.data_dir = str(given)
        elif name == "seed":
            raise UserError(f"{where}: the run seeds are a list, set seeds")
        elif name in options.fields(Protocol):
            self._say(name, "set")
            self.over.pop(name, None)
            self.fields |= protocols.coerce({name: given})
        else:
            known = [*LISTS, "preset", "data_dir", *ALIASES, *options.fields(Protocol)]
            raise UserError(f"{where}: there is no setting {name!r}{nearest(name, known)}")

    def take_option(self, method: str, name: str, given: Any) -> None:
        """A method's option; a file's method goes by its stem."""
        label = registry.label(method)
        self._say(f"{label}.{name}", "set")
        self.over.pop(f"{label}.{name}", None)
        self.options.setdefault(label, {})[name] = given

    def take_over(self, name: str, given: Any, where: str) -> None:
        """A dimension of the grid: a field or METHOD.OPTION, and its values."""
        method, dot, name = name.strip().rpartition(".")
        name = f"{registry.label(method)}.{name}" if dot else ALIASES.get(name, name)
        values = [tuple(v) if isinstance(v, list) else v for v in _texts(given)]
        if not values or not all(isinstance(v, str | int | float | tuple) for v in values):
            raise UserError(f"{where}: {name} must have a value or a list of values")
        if not dot:
            _check_field(name, values, where)
        if self.given.get(name) == "varied":
            raise UserError(f"{where}: {name} is varied twice: give all its values at once")
        self._say(name, "varied")
        owner, _, key = name.rpartition(".")
        (self.options.get(owner, {}) if dot else self.fields).pop(key, None)
        self.over[name] = values

    def take_grid(self, over: Iterable[str], named: Mapping[str, str]) -> None:
        """The dimensions of --over, then those of a named sweep that the command line gives no other values."""
        for assignment in over:
            key, equals, given = assignment.partition("=")
            if not equals or not key:
                raise UserError(f"--over {assignment!r}: write --over key=a,b or --over method.option=a,b")
            self.take_over(key, given, "--over")
        for key, values in named.items():
            if key not in self.given or key not in self.over:
                self.take_over(key, values, "sweep")

    def take_text(self, assignment: str) -> None:
        """`key=value` or `method.option=value` of --set."""
        key, equals, given = assignment.partition("=")
        if not equals or not key:
            raise UserError(f"--set {assignment!r}: write --set key=value or --set method.option=value")
        method, dot, name = key.strip().rpartition(".")
        if dot:
            self.take_option(method, name, given)
        else:
            self.take(name, given, "--set")

    def take_document(self, document: Mapping[str, Any], where: str) -> None:
        """The settings of a suite file: names of the protocol, methods, preset, seeds, [method.NAME], [over]."""
        document = dict(document)
        grid = document.pop("over", {})
        if not isinstance(grid, dict):
            raise UserError(f"{where}: [over] must be a table of lists")
        for name, given in grid.items():
            dimensions = {f"{name}.{k}": v for k, v in given.items()} if isinstance(given, dict) else {name: given}
            for key, values in dimensions.items():
                self.take_over(key, values, f"{where}: [over]")
        tables = document.pop("method", {})
        for method, table in tables.items() if isinstance(tables, dict) else [("NAME", None)]:
            if not isinstance(table, dict):
                raise UserError(f"{where}: [method.{method}] must be a table of options")
            for name, given in table.items():
                self.take_option(method, name, given)
        for name, given in document.items():
            self.take(name, given, where)
        self.given.clear()  # what a later source says of a key wins


def _check_field(name: str, values: Sequence[Any], where: str) -> None:
    """A field that a grid can be over, and values that it can have."""
    known = options.fields(Protocol)
    if name in APART:
        raise UserError(f"{where}: {name} is no dimension of a grid; use {APART[name]}")
    if name not in known:
        raise UserError(f"{where}: there is no setting {name!r}{nearest(name, known)}")
    if not options.option(known[name]).digest:
        raise UserError(f"{where}: {name} moves no number, there is nothing to vary")
    for value in values:
        protocols.coerce({name: value})


def _texts(given: Any) -> list[Any]:
    items = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    items = [i.strip() if isinstance(i, str) else i for i in items]
    return [i for i in items if i != ""]


def _seed(given: Any) -> int:
    try:
        return int(protocols.coerce({"seed": given})["seed"])
    except UserError as e:
        raise UserError(str(e).replace("seed", "seeds", 1)) from None


def cells(settings: Settings) -> list[Cell]:
    """Every point of the grid x seed x method, each once, checked as far as names and limits go."""
    for name in settings.methods:
        registry.known(name)
    labels = [registry.label(m) for m in settings.methods]
    if len(set(labels)) < len(labels):
        raise UserError(f"a method is asked for twice: {', '.join(settings.methods)}")
    varied = [key.rpartition(".") for key in settings.over]
    for method in [*settings.options, *(owner for owner, dot, _ in varied if dot)]:
        if method not in labels:
            registry.known(method)
            raise UserError(f"options are set for {method}, which the table does not have: add it to --methods")
    for method, label in zip(settings.methods, labels):
        mine = [name for owner, _, name in varied if owner == label]
        registry.check_options(method, [*settings.options.get(label, {}), *mine])
    preset, fields = _fields(settings)
    seeds = settings.seeds or fields.pop("seeds", [0, 1, 2])
    fields.pop("seeds", None)
    if "beta" in settings.over and fields.get("partition") in ("iid", "file"):
        raise UserError(f"beta means nothing to partition={fields['partition']}: leave it out")
    made: dict[Any, Cell] = {}
    for point in itertools.product(*(_once(values) for values in settings.over.values())):
        chosen = {tuple(key.rpartition(".")[::2]): v for key, v in zip(settings.over, point)}
        shared = {name: v for (owner, name), v in chosen.items() if not owner}
        for seed in _once(seeds):
            experiment = Protocol(**protocols.coerce({**fields, **shared, "seed": seed}))
            for method, label in zip(settings.methods, labels):
                own = {name: v for (owner, name), v in chosen.items() if owner == label}
                given = {**settings.options.get(label, {}), **own}
                told = tuple((n, options.text(v)) for n, v in {**shared, **own}.items() if n != "beta")
                cell = Cell(registry.Spec(method, tuple(given.items()), preset), experiment, settings.data_dir, told)
                made.setdefault((method, experiment, tuple(own.items())), cell)
    return list(made.values())


def _fields(settings: Settings) -> tuple[str, dict[str, Any]]:
    """The preset and the protocol's fields: what was given wins over the preset, the preset over the defaults."""
    asked = settings.preset
    base = protocols.preset(asked) if asked else {}
    dataset = settings.fields.get("dataset", base.get("dataset", "digits"))
    preset = asked or protocols.default_preset(dataset) or "moon.common"
    base = base or protocols.preset(preset)
    return preset, {**base, **settings.fields, "dataset": dataset}


def _once(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
