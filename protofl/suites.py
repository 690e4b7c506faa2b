"""Suites: TOML files that say what is run, one per table or figure of a paper, each at several scales.

A file has settings of `protofl bench` (shared by all), tables [[part]] with more of them (a table over two data sets
has two parts), and a table per scale, `paper` and `laptop`, with what that scale changes; parts may have such tables
too. The more special wins. `smoke` needs no table: it is `laptop` on digits, as short as can be.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from . import options
from .errors import UserError, nearest
from .experiment import LISTS, Settings
from .protocol import Protocol

SCALES = ("paper", "laptop", "smoke")

APART = ("title", "about", "cut", "skip", "choices")
"""Keys that are no settings: what is said; skip, of a part at a scale: it is left out there; choices of an ablation."""

SMOKE = dict(
    dataset="digits", model="mlp", augment=[], mean=[0.0], std=[1.0], rounds=1, local_epochs=1, batch_size=64, seeds=[0],
    clients=3, partition_min_size=2, eval_every=1, device="cpu",
)  # fmt: skip
"""What every suite becomes to be tried in seconds: its methods, options and grid, on the embedded data set."""

SHORT: Mapping[str, Mapping[str, Any]] = {
    "fedcspc": {"calib_epochs": 1}, "moon+cspc": {"calib_epochs": 1}, "solo": {"budget": "epochs", "epochs": 1},
    "creff": {"match_epochs": 1, "retrain_epochs": 1}, "fedbabu": {"finetune_epochs": 1},
}  # fmt: skip
"""Options of methods with a clock of their own."""

SMALL = {"clients": [3, 4], "local_epochs": [1, 2], "rounds": [1, 2]}
"""What a grid over these becomes."""


@dataclass(frozen=True)
class Suite:
    """A suite file at one scale: its settings, one per part, and what a reader of its report should know."""

    name: str
    title: str
    scale: str | None
    parts: tuple[Settings, ...]
    notes: tuple[str, ...] = ()
    ablate: str | None = None
    choices: tuple[str, ...] = ()
    pairs: tuple[tuple[str, ...], ...] = ()


@functools.cache
def shipped() -> dict[str, Path]:
    """The suites of this package by name."""
    folder = Path(str(resources.files("protofl.benchmarks")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find(asked: str) -> Path:
    """The file of a suite: a name, or a path that ends in .toml."""
    if asked.endswith(".toml"):
        return Path(asked)
    if asked not in shipped():
        raise UserError(
            f"there is no suite {asked!r}{nearest(asked, shipped())}; see `protofl suite list`, or give a file ./NAME.toml"
        )
    return shipped()[asked]


def read(asked: str, scale: str | None = None) -> Suite:
    """A suite by name or file. scale: one of `SCALES`; None: laptop, where the file has scales."""
    path = find(asked)
    where = f"suite file {str(path)!r}"
    document = _document(path, where)
    scales = [name for name in SCALES if name in document]
    if scale is not None and scale not in SCALES:
        raise UserError(f"--scale {scale!r} is not one of {', '.join(SCALES)}{nearest(scale, SCALES)}")
    scale = scale or ("laptop" if scales else None)
    if scale not in (None, "smoke", *scales):
        raise UserError(f"{where} has no table [{scale}]; it has {', '.join(scales) or 'no scales'}")
    chosen = "laptop" if scale == "smoke" and "smoke" not in scales else scale
    by_scale = {name: _table(document.pop(name), f"{where}: [{name}]") for name in scales}
    parts = document.pop("part", [{}])
    unknown = _table(document.pop("unknown", {}), f"{where}: [unknown]")
    ablate, choices, pairs = (
        document.pop(key, default) for key, default in (("ablate", None), ("choices", []), ("pairs", []))
    )
    if not (isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)):
        raise UserError(f"{where}: parts are written [[part]]")
    title = str(document.get("title", path.stem))
    own = by_scale.get(chosen or "", {})
    layers = [_layers(part, own, chosen, where) for part in parts]
    shared = document if ablate is None else {**document, "methods": ablate}
    made = [_settings([shared, *each], scale == "smoke", where) for each in layers if not each[-1].get("skip")]
    if not made:
        raise UserError(f"{where}: every part is left out at scale {scale}")
    if ablate is not None and (not isinstance(ablate, str) or len(made) > 1):
        raise UserError(f"{where}: ablate is the name of one method, of a suite in one part")
    _known(unknown, where)
    choices = own.get("choices", choices)
    if not _words(choices) or not (isinstance(pairs, list) and all(_words(pair) and len(pair) == 2 for pair in pairs)):
        raise UserError(f"{where}: choices is a list of names, or of NAME=READING, pairs a list of lists of two names")
    notes = [str(document["about"])] if "about" in document else []
    notes += [f"Scale {scale}." + (f" Cut: {own['cut']}" if "cut" in own else "")] if scale else []
    notes += (
        ["A smoke run: it shows that the suite runs, and says nothing about the methods."] if scale == "smoke" else []
    )
    notes += (
        [f"Unknown in the paper, chosen here: {'; '.join(f'{k}: {v}' for k, v in unknown.items())}."] if unknown else []
    )
    return Suite(path.stem, title, scale, tuple(made), tuple(notes), ablate, tuple(choices), tuple(map(tuple, pairs)))


def _document(path: Path, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as e:
        raise UserError(f"{where} cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{where} is not valid TOML: {e}") from None


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a table")
    return value


def _words(value: Any) -> bool:
    """Whether it is a list of texts."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _known(unknown: Mapping[str, Any], where: str) -> None:
    """[unknown] speaks of settings."""
    names = [*LISTS, "preset", "dataset", *options.fields(Protocol)]
    for key in unknown:
        if key not in names and "." not in key and key != "contents":
            raise UserError(f"{where}: [unknown] {key!r} is no setting{nearest(key, names)}")


def _layers(part: Mapping[str, Any], scale: Mapping[str, Any], chosen: str | None, where: str) -> list[dict[str, Any]]:
    """A part, the scale, and what the scale changes in the part."""
    plain = {k: v for k, v in part.items() if k not in SCALES}
    own = _table(part.get(chosen or "", {}), f"{where}: [part.{chosen}]")
    return [plain, dict(scale), own]


def _settings(layers: Sequence[Mapping[str, Any]], smoke: bool, where: str) -> Settings:
    """Later layers win over earlier ones."""
    made = Settings()
    for layer in layers:
        made.take_document({k: v for k, v in layer.items() if k not in APART}, where)
    if smoke:
        _shrink(made)
    return made


def _shrink(settings: Settings) -> None:
    """Make what is asked for as small as can be, and keep its methods, options and grid: two values of what is varied first,
    one of the rest."""
    grid = {key: SMALL.get(key, values) for key, values in settings.over.items() if key in SMALL or key not in SMOKE}
    grid.setdefault("beta", [0.5])
    first = next((key for key, values in settings.over.items() if len(values) > 1 and key in grid), None)
    settings.take_document({k: v for k, v in SMOKE.items() if k not in grid}, "smoke")
    settings.over = {key: values[: 2 if key == first else 1] for key, values in grid.items()}
    for method, short in SHORT.items():
        if method in settings.methods:
            settings.options[method] = {**settings.options.get(method, {}), **short}
