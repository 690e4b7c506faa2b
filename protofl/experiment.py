"""From what a user asks for to the cells of a table. Needs no torch: wrong names are refused at once."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import options, registry
from . import protocol as protocols
from .cells import Cell
from .errors import UserError, nearest
from .protocol import Protocol

ALIASES = {"lr": "client_lr", "net": "model"}
"""Short names of protocol fields."""

LISTS = ("methods", "seeds", "beta")
"""Settings that span the table: every combination is a cell."""


@dataclass
class Settings:
    """What was asked for, from a suite file and the command line; `fields` are of the protocol, by its names."""

    methods: list[str] = field(default_factory=lambda: list(registry.ORDER))
    preset: str | None = None
    seeds: list[int] | None = None
    betas: list[Any] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    data_dir: str | None = None

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
            self.betas = _texts(given)
        elif name == "data_dir":
            self.data_dir = str(given)
        elif name == "seed":
            raise UserError(f"{where}: the run seeds are a list, set seeds")
        elif name in options.fields(Protocol):
            self.fields |= protocols.coerce({name: given})
        else:
            known = [*LISTS, "preset", "data_dir", *ALIASES, *options.fields(Protocol)]
            raise UserError(f"{where}: there is no setting {name!r}{nearest(name, known)}")

    def take_option(self, method: str, name: str, given: Any) -> None:
        """A method's option; a file's method goes by its stem."""
        self.options.setdefault(registry.label(method), {})[name] = given

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


def _texts(given: Any) -> list[Any]:
    items = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    items = [i.strip() if isinstance(i, str) else i for i in items]
    return [i for i in items if i != ""]


def _seed(given: Any) -> int:
    try:
        return int(protocols.coerce({"seed": given})["seed"])
    except UserError as e:
        raise UserError(str(e).replace("seed", "seeds", 1)) from None


def read_suite(path: Path, settings: Settings) -> None:
    """Take the settings of a suite file: names of the protocol, methods, preset, seeds, and [method.NAME] tables."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as e:
        raise UserError(f"suite file {str(path)!r} cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"suite file {str(path)!r} is not valid TOML: {e}") from None
    tables = document.pop("method", {})
    for method, table in tables.items() if isinstance(tables, dict) else [("NAME", None)]:
        if not isinstance(table, dict):
            raise UserError(f"suite file {str(path)!r}: [method.{method}] must be a table of options")
        for name, given in table.items():
            settings.take_option(method, name, given)
    for name, given in document.items():
        settings.take(name, given, f"suite file {str(path)!r}")


def cells(settings: Settings) -> list[Cell]:
    """Every (method, beta, seed) of the settings, checked as far as names and limits go."""
    for name in settings.methods:
        registry.known(name)
    labels = [registry.label(m) for m in settings.methods]
    if len(set(labels)) < len(labels):
        raise UserError(f"a method is asked for twice: {', '.join(settings.methods)}")
    for method in settings.options:
        if method not in labels:
            registry.known(method)
            raise UserError(f"options are set for {method}, which the table does not have: add it to --methods")
    for method in settings.methods:
        registry.check_options(method, settings.options.get(registry.label(method), {}))
    preset, fields = _fields(settings)
    seeds, betas = settings.seeds or fields.pop("seeds", [0, 1, 2]), settings.betas or [fields["beta"]]
    fields.pop("seeds", None)
    if settings.betas and fields.get("partition") in ("iid", "file"):
        raise UserError(f"beta means nothing to partition={fields['partition']}: leave it out")
    made = []
    for beta in _once(betas):
        for seed in _once(seeds):
            experiment = Protocol(**protocols.coerce({**fields, "beta": beta, "seed": seed}))
            for name in settings.methods:
                given = settings.options.get(registry.label(name), {})
                made.append(Cell(registry.Spec(name, tuple(given.items()), preset), experiment, settings.data_dir))
    return made


def _fields(settings: Settings) -> tuple[str, dict[str, Any]]:
    """The preset and the protocol's fields: what was given wins over the preset, the preset over the defaults."""
    asked = settings.preset
    base = protocols.preset(asked) if asked else {}
    dataset = settings.fields.get("dataset", base.get("dataset", "digits"))
    preset = asked or protocols.default_preset(dataset) or "moon.common"
    base = base or protocols.preset(preset)
    return preset, {"beta": Protocol.beta, **base, **settings.fields, "dataset": dataset}


def _once(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
