"""Which runs are compared: settings with their methods, and which runs of a method enter its numbers."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import options
from ..protocol import Protocol
from .read import DAMAGED, DIVERGED, FAILED, FINISHED, UNFINISHED, Run, number
from .select import RULES, Row, Rule, last

APART = {"seed", "partition_file"} | {n for n, f in options.fields(Protocol).items() if not options.option(f).digest}
"""Protocol fields in which runs of one setting may differ: the seed, and what moves no number.

A split is known by its hash, not by the file that it was read from.
"""

HASHES = ("data fingerprint", "split hash", "numbers")
"""What must be equal besides the protocol's fields."""

PREFERRED = (FINISHED, UNFINISHED, DIVERGED, FAILED, DAMAGED)
"""Which of two runs of the same method, options and seed counts."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A method with its options in one setting: a row of every table."""

    label: str
    variant: int
    """0, 1, ...: which set of options of this method it is."""
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        return self.runs[0].method

    @functools.cached_property
    def used(self) -> tuple[Run, ...]:
        """The runs that enter the numbers: the finished ones; the unfinished ones where none has finished."""
        by = {s: tuple(r for r in self.runs if r.status == s and r.rounds) for s in (FINISHED, UNFINISHED)}
        return by[FINISHED] or by[UNFINISHED]

    @functools.cached_property
    def drawn(self) -> tuple[Run, ...]:
        """The runs that curves show: those used; the diverged ones where there are none."""
        return self.used or tuple(r for r in self.runs if r.status == DIVERGED and r.rounds)

    @property
    def finished(self) -> bool:
        """Whether the numbers are those of finished runs."""
        return bool(self.used) and self.used[0].status == FINISHED

    def rows(self, run: Run) -> Sequence[Row]:
        """The rounds of a run that count: all; of unfinished runs only those that all seeds have."""
        if self.finished or not self.used:
            return run.rounds
        common = min(r.rounds[-1]["round"] for r in self.used)
        return [r for r in run.rounds if r["round"] <= common]

    @functools.cached_property
    def _reported(self) -> dict[tuple[Path, str], Sequence[Row]]:
        return {(run.path, rule.name): rule.rows(self.rows(run)) for run in self.used for rule in RULES.values()}

    def reported(self, run: Run, rule: Rule) -> Sequence[Row]:
        """The rounds that a rule reports of one of the runs in use."""
        return self._reported[run.path, rule.name]

    @property
    def state(self) -> str:
        """What became of the runs, in words."""
        if all(r.status == FINISHED for r in self.runs):
            return FINISHED
        done = sum(r.status == FINISHED for r in self.runs)
        parts = [f"{done} of {len(self.runs)} finished"] if done else []
        parts += [_fate(r, len(self.runs) > 1) for r in self.runs if r.status != FINISHED]
        return "; ".join(parts)


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ in method, options and seed alone.

    `differs`: what tells it from other settings; `name`: the same in short, nothing where there is one setting.
    """

    number: int
    differs: Mapping[str, str]
    name: str
    entries: tuple[Entry, ...]
    repeated: Mapping[Path, Path]
    """Runs left out because another has the same method, options and seed -> that other."""

    @property
    def first(self) -> Run:
        return self.entries[0].runs[0]

    @property
    def runs(self) -> list[Run]:
        """The runs of all entries."""
        return [run for entry in self.entries for run in entry.runs]

    @property
    def seeds(self) -> list[int]:
        return sorted({r.seed for r in self.runs})

    @property
    def ddof(self) -> int:
        """What is taken off n in a standard deviation."""
        return 0 if self.first.protocol.get("std_ddof") == 0 else 1

    @property
    def headline(self) -> Rule:
        """The rule that the protocol reports by."""
        return RULES.get(str(self.first.protocol.get("report")), last)


def _fate(run: Run, several: bool) -> str:
    """What became of a run that did not finish."""
    fates = {UNFINISHED: f"unfinished ({run.played} of {'?' if run.total is None else run.total} rounds)"}
    if run.status == DIVERGED and run.diverged_at is not None:
        fates[DIVERGED] = f"diverged at round {run.diverged_at}"
    return (f"seed {run.seed} " if several else "") + fates.get(run.status, run.status)


def settings(runs: Iterable[Run]) -> list[Setting]:
    """The settings among the runs that say what they are, in the order of what tells them apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.known:
            groups.setdefault(_text(_key(run)), []).append(run)
    keys = {key: json.loads(key) for key in groups}
    differing = _telling(list(keys.values()))
    named = _naming(differing, list(keys.values()))
    order = sorted(groups, key=lambda key: [_natural(keys[key].get(n)) for n in (*named, *differing)])
    made = []
    for i, key in enumerate(order):
        differs = {n: _shown(keys[key].get(n)) for n in differing}
        parts = [f"{n}={differs[n]}" for n in named] + ["..."] * (len(named) < len(differing))
        made.append(Setting(i + 1, differs, ", ".join(parts), *_entries(groups[key])))
    return made


MOST = 4
"""Fields in the name of a setting; where more differ it has those that tell settings apart, the first of these first."""
FIRST = ("dataset", "partition", "beta", "clients", "participation", "model", "rounds", "local_epochs")


def _naming(differing: Sequence[str], keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in the names of settings."""
    if len(differing) <= MOST:
        return list(differing)
    ordered = sorted(differing, key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST))
    for count in range(1, len(ordered)):
        if len({_text([key.get(n) for n in ordered[:count]]) for key in keys}) == len(keys):
            return ordered[:count]
    return ordered


def _natural(value: Any) -> tuple[float, str]:
    """A key that sorts numbers by size, before texts."""
    known = number(value)
    return (math.inf, _shown(value)) if known is None else (known, "")


def _telling(keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields that tell the settings apart; hashes only where nothing else does."""
    names = dict.fromkeys(name for key in keys for name in key)
    differing = [n for n in names if len({_text(key.get(n)) for key in keys}) > 1]
    plain = [n for n in differing if n not in HASHES]
    return plain if len({_text([key.get(n) for n in plain]) for key in keys}) == len(keys) else differing


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _shown(value: Any) -> str:
    return "-" if value is None else options.text(value)


def _key(run: Run) -> dict[str, Any]:
    """All that must be equal for runs to be compared."""
    shared = {n: v for n, v in run.protocol.items() if n not in APART}
    split = None if run.protocol.get("partition_seed") == "run" else run.partition.get("index_hash")
    return shared | dict(zip(HASHES, (run.data.get("fingerprint"), split, run.numbers)))


def _entries(runs: Sequence[Run]) -> tuple[tuple[Entry, ...], dict[Path, Path]]:
    """The rows of a setting, and the runs that repeat another's method, options and seed."""
    rows: dict[str, dict[int, Run]] = {}
    repeated = {}
    for run in sorted(runs, key=lambda r: PREFERRED.index(r.status)):
        seeds = rows.setdefault(_same(run), {})
        if run.seed in seeds:
            repeated[run.path] = seeds[run.seed].path
        seeds.setdefault(run.seed, run)
    order = list(dict.fromkeys(map(_same, runs)))
    groups = [tuple(rows[key][seed] for seed in sorted(rows[key])) for key in order]
    labels = _labels([group[0] for group in groups])
    seen: dict[str, int] = {}
    made = []
    for label, group in zip(labels, groups):
        variant = seen.setdefault(group[0].method, 0)
        seen[group[0].method] += 1
        made.append(Entry(label, variant, group))
    return tuple(made), repeated


def _same(run: Run) -> str:
    """What runs of one row have in common: the method, its options and its code."""
    return _text([run.method, run.options, run.source])


def _labels(firsts: Sequence[Run]) -> list[str]:
    """The display names; where several share one, with the options that tell them apart."""
    out: list[str] = []
    for run in firsts:
        alike = [r for r in firsts if r.name == run.name]
        names = dict.fromkeys(n for r in alike for n in r.options)
        differing = [n for n in names if len({_text(r.options.get(n)) for r in alike}) > 1]
        parts = [f"{n}={_shown(run.options.get(n))}" for n in differing if n in run.options]
        if len({r.method for r in alike}) > 1:
            parts.insert(0, run.method)
        if len({r.source for r in alike if r.method == run.method}) > 1:
            parts.append(f"code {run.source[:8] or '-'}")
        label = f"{run.name} ({', '.join(parts)})" if parts else run.name
        out.append(f"{label} #{out.count(label) + 1}" if label in out else label)
    return out
