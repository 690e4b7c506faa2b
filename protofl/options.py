"""Named choices: the fields of the protocol and the options of the methods, with their readings and reasons.

Every field is a dataclass field whose metadata say which values are legal, why the default is what it is and where it
comes from, so that `--help`, `protofl methods`, the check of a value and the reading of a text have one source.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known about a field besides its name and default.

    readings: the values that papers or codes give; closed: whether others are refused. `words` are texts that a number
    may be instead (such as "run"). `low` is included, `above` is not. `digest`: whether the field can change a number.
    """

    why: str = ""
    source: str = ""
    readings: tuple[Any, ...] = ()
    closed: bool = False
    words: tuple[str, ...] = ()
    low: float | None = None
    above: float | None = None
    high: float | None = None
    digest: bool = True

    def limits(self) -> str:
        """The legal values in words."""
        if self.closed:
            return " | ".join(text(v) for v in self.readings)
        parts = [f"> {text(self.above)}"] if self.above is not None else []
        parts += [f">= {text(self.low)}"] if self.low is not None else []
        parts += [f"<= {text(self.high)}"] if self.high is not None else []
        return " | ".join([*self.words, " and ".join(parts) or "any"])


def choice(default: Any, *others: Any, why: str = "", source: str = "", digest: bool = True) -> Any:
    """A field with a closed set of readings, the first being the default."""
    option = Option(why, source, (default, *others), closed=True, digest=digest)
    return dataclasses.field(default=default, metadata={"option": option})


def flag(default: bool, *, why: str = "", source: str = "") -> Any:
    """A yes-or-no field."""
    return choice(default, not default, why=why, source=source)


def number(
    default: Any,
    *readings: Any,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    words: tuple[str, ...] = (),
    why: str = "",
    source: str = "",
    digest: bool = True,
) -> Any:
    """A numeric field; `readings` are other values that papers or codes give, any within the limits is legal."""
    option = Option(why, source, (default, *readings), False, words, low, above, high, digest)
    return dataclasses.field(default=default, metadata={"option": option})


def value(default: Any, *, readings: tuple[Any, ...] = (), why: str = "", source: str = "", digest: bool = True) -> Any:
    """A free text or a list."""
    return dataclasses.field(default=default, metadata={"option": Option(why, source, readings, digest=digest)})


def text(v: Any) -> str:
    """A value as it is written on the command line; an empty list is `none`."""
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, tuple | list):
        return ",".join(text(one) for one in v) or "none"
    return f"{v:g}" if isinstance(v, float) and float(f"{v:g}") == v else str(v)


def fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass (or of an instance) by name."""
    return {f.name: f for f in dataclasses.fields(cls)}


def option(field: dataclasses.Field[Any]) -> Option:
    """The metadata of a field; an unadorned field of somebody's own method may have any value."""
    return field.metadata.get("option", Option())  # type: ignore[no-any-return]


def read(cls: Any, given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Texts (or values of a file) -> checked values for the fields of `cls`; `owner` names its method in messages."""
    known = fields(cls)
    out = {}
    for name, raw in given.items():
        if name not in known:
            raise UserError(unknown(owner or "the protocol", name, known))
        out[name] = convert(known[name], raw, f"{owner} {name}".strip())
    return out


def unknown(owner: str, name: str, known: Iterable[str]) -> str:
    """What is said of an option that `owner` does not have."""
    known = list(known)
    return f"{owner} has no option {name!r}{nearest(name, known)}; it has: {', '.join(known) or 'none'}"


def convert(field: dataclasses.Field[Any], raw: Any, label: str) -> Any:
    """One text or value -> a legal value of the field, or a `UserError` that says what would be right."""
    o, default = option(field), field.default
    if isinstance(default, tuple):
        given = () if raw == "none" else raw.split(",") if isinstance(raw, str) else raw
        items = given if isinstance(given, tuple | list) else [given]
        items = [i.strip() if isinstance(i, str) else i for i in items if i != ""]
        try:
            made: Any = (
                tuple(float(i) for i in items) if default and isinstance(default[0], float) else tuple(map(str, items))
            )
        except (TypeError, ValueError):
            raise UserError(f"{label}: {text(raw)!r} is not a list of numbers") from None
        return made
    if o.closed:
        for reading in o.readings:
            if text(raw).lower() == text(reading).lower() or (raw == reading and type(raw) is type(reading)):
                return reading
            if _is_number(reading) and _as_number(raw) == reading:
                return reading
        raise UserError(f"{label}: {text(raw)!r} is not one of {o.limits()}{nearest(text(raw), map(text, o.readings))}")
    if isinstance(raw, str) and raw in o.words:
        return raw
    if _is_number(default) or o.words:
        return _number(o, default, raw, label)
    if isinstance(default, str) and not isinstance(raw, str):
        raise UserError(f"{label}: {text(raw)!r} is not a text")
    return raw


def _is_number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool)


def _as_number(raw: Any) -> float | None:
    if isinstance(raw, bool):
        return None
    try:
        return float(raw)
    except (TypeError, ValueError):
        return None


def _number(o: Option, default: Any, raw: Any, label: str) -> Any:
    got = _as_number(raw)
    whole = isinstance(default, int) or bool(o.words)
    if got is None or not math.isfinite(got) or (whole and got != int(got)):
        kind = "a whole number" if whole else "a number"
        raise UserError(f"{label}: {text(raw)!r} is not {kind} ({o.limits()})")
    if (
        (o.low is not None and got < o.low)
        or (o.above is not None and got <= o.above)
        or (o.high is not None and got > o.high)
    ):
        raise UserError(f"{label}: {text(raw)} is outside its limits ({o.limits()})")
    return int(got) if whole else got


def validate(instance: Any, owner: str) -> None:
    """Check every field of an instance that was built in Python."""
    for name, field in fields(instance).items():
        convert(field, getattr(instance, name), f"{owner} {name}".strip())
