"""Tables: functions from runs to tidy data, and the summary for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from .blocks import Cell
from .groups import Entry, Setting, settings
from .oddities import oddities
from .read import Run, number
from .select import METRICS, RULES, Row, evaluated, last, mean, undefined, value

WEIGHTINGS = ("pm_v", "pm_l", "pm_uniform")
SPREADS = tuple(f"{m}_{s}" for m in WEIGHTINGS for s in ("std", "worst10"))
PARTS = ("train", "prototype", "aggregate", "evaluate")
MISSING = "-"
UNDEFINED = "not defined"
SEEDS, PARTIES = "seeds", "parties"

PER_RUN = ["setting", "method", "label", "digest", "seed", "status", "metric", "rule", "value", "round"]
ACCURACY = [
    "setting",
    "method",
    "label",
    "metric",
    "rule",
    "n",
    "mean",
    "sd",
    "over",
    "ddof",
    "low",
    "high",
    "seeds",
    "rounds",
    "finished",
    "status",
    "undefined",
]
COST = [
    "setting",
    "method",
    "label",
    "n",
    "rounds",
    "down_mb",
    "up_mb",
    "once_mb",
    "total_mb",
    "trained",
    "forward",
    "state_mb",
    *[f"seconds_{p}" for p in PARTS],
    "seconds_total",
    "memory_mb",
    "finished",
    "status",
]


def frame(rows: Iterable[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Rows as a frame with these columns, `None` kept as a missing value."""
    return pd.DataFrame(list(rows), columns=columns)


def readings(entry: Entry, scores: str = "gm_scores") -> list[str]:
    """The readings of the global (or with pm_scores of the personal) models that a method records, if several."""
    rows = [r for run in entry.used for r in run.rounds]
    names = list(dict.fromkeys(name for r in rows for name in r.get(scores, {})))
    return names if len(names) > 1 else []


def metrics(entry: Entry) -> list[str]:
    """What a method may have been measured by."""
    personal = [f"{m}:{name}" for name in readings(entry, "pm_scores") for m in WEIGHTINGS]
    return [*METRICS, *SPREADS, *(f"gm:{name}" for name in readings(entry)), *personal]


def per_run(made: Sequence[Setting]) -> pd.DataFrame:
    """Every run that enters a number: metric x selection rule -> value (a share of 1), its (last) round."""
    return frame(
        (
            {
                "setting": s.number,
                "method": e.method,
                "label": e.label,
                "digest": run.digest,
                "seed": run.seed,
                "status": run.status,
                "metric": metric,
                "rule": rule.name,
                "value": mean(rows := e.reported(run, rule), metric),
                "round": rows[-1]["round"] if rows else None,
            }
            for s in made
            for e in s.entries
            for run in e.used
            for metric in metrics(e)
            for rule in RULES.values()
        ),
        PER_RUN,
    )


def accuracy(made: Sequence[Setting]) -> pd.DataFrame:
    """Setting x method x metric x selection rule -> mean and spread over the seeds, as shares of 1.

    `n` counts the seeds that have the metric; `sd` is missing for fewer than two. Where `over` says parties, `sd` is
    that over the parties of one run, a mean over the seeds' runs. A method without a usable run has n = 0 and its fate
    in `status`.
    """
    return frame(
        (
            {**head(s, e), "metric": metric, "rule": rule, **_summary(e, metric, rule, s.ddof)}
            for s in made
            for e in s.entries
            for metric in metrics(e)
            for rule in RULES
        ),
        ACCURACY,
    )


def head(setting: Setting, entry: Entry) -> dict[str, Any]:
    """What tells a row of a tidy table from the others, and whether its runs finished."""
    return {
        "setting": setting.number,
        "method": entry.method,
        "label": entry.label,
        "finished": entry.finished,
        "status": entry.state,
    }


def _summary(entry: Entry, metric: str, rule: str, ddof: int) -> dict[str, Any]:
    """Mean and range of a metric over the seeds that have it, and its standard deviation over them or over parties."""
    chosen = {run.path: entry.reported(run, RULES[rule]) for run in entry.used}
    found = [(run, v) for run in entry.used if (v := mean(chosen[run.path], metric)) is not None]
    values = [v for _, v in found]
    options = entry.runs[0].options
    by_party = options.get("std_over") == PARTIES and metric in WEIGHTINGS
    if by_party:
        ddof = 1 if options.get("std_ddof") == 1 else 0
        sds = [_over_parties(chosen[run.path], metric, ddof) for run, _ in found]
        sd = _mean([v for v in sds if v is not None], len(found))
    else:
        sd = _spread(values, ddof)
    return {
        "n": len(found),
        "mean": statistics.fmean(values) if values else None,
        "sd": sd,
        "over": PARTIES if by_party else SEEDS,
        "ddof": ddof,
        "low": min(values, default=None),
        "high": max(values, default=None),
        "seeds": " ".join(str(run.seed) for run, _ in found),
        "rounds": " ".join(str(chosen[run.path][-1]["round"]) for run, _ in found),
        "undefined": not found and any(undefined(r, metric) for rows in chosen.values() for r in rows),
    }


def _spread(values: Sequence[float], ddof: int) -> float | None:
    """The standard deviation; None for fewer than two values."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if ddof else statistics.pstdev(values)


def _over_parties(rows: Sequence[Row], metric: str, ddof: int) -> float | None:
    """The standard deviation over the parties of one run, of each party's mean over the reported rounds."""
    each: dict[float, list[float]] = {}
    for row in rows:
        told = row.get("pm_each", {})
        for i, v in zip(told.get("client", []), told.get(metric.removeprefix("pm_"), [])):
            if (known := number(v)) is not None:
                each.setdefault(i, []).append(known)
    return _spread([statistics.fmean(values) for values in each.values()], ddof)


# ---- cost -------------------------------------------------------------------------------------------------


def cost(made: Sequence[Setting]) -> pd.DataFrame:
    """Setting x method -> communication (MB = 1e6 bytes), seconds and memory, means over the seeds.

    `down_mb`, `up_mb`: per round and drawn client; `once_mb`: constants, the exchange before round 0 and that after the
    last; `total_mb`: all that crossed in the run; `trained`, `forward`: samples passed forward and backward, and forward
    alone, per round and drawn client; `state_mb`: the most that a client kept between rounds; `seconds_*`: per round,
    `seconds_total`: the whole run.
    """
    return frame(({**head(s, e), "n": len(e.used), **_mean_cost(e)} for s in made for e in s.entries), COST)


def _mean_cost(entry: Entry) -> dict[str, float | None]:
    made = [_cost(entry.rows(run)) for run in entry.used]
    names = made[0] if made else {}
    return {n: _mean([v for m in made if (v := m[n]) is not None], len(made)) for n in names}


def _mean(values: list[float], wanted: int) -> float | None:
    """The mean, if none is missing."""
    return statistics.fmean(values) if values and len(values) == wanted else None


def _cost(rows: Sequence[Row]) -> dict[str, float | None]:
    """What one run cost; None where a part was not recorded."""
    played = [r for r in rows if r["round"] >= 0]
    finals = [r["final"] for r in rows if isinstance(r.get("final"), dict)]
    apart = [*(r for r in rows if r["round"] < 0), *finals]
    samples = [r.get("samples", {}) for r in played]
    state = [v for r in rows if (v := number(r.get("state_bytes"))) is not None]
    drawn = sum(len(r.get("clients") or []) for r in played)
    down, up = total(played, "bytes_down"), total(played, "bytes_up")
    extra = [total([*rows, *finals], "bytes_once"), *(total(apart, n) for n in ("bytes_down", "bytes_up") if apart)]
    once = _sum(extra)
    seconds = {p: total([r.get("seconds", {}) for r in played], p) for p in PARTS}
    everything = [total([r.get("seconds", {}) for r in rows], p) for p in PARTS]
    memory = [m for r in rows if (m := number(r.get("memory_mb"))) is not None]
    return {
        "rounds": float(len(played)),
        "down_mb": _per(down, drawn * 1e6),
        "up_mb": _per(up, drawn * 1e6),
        "once_mb": _per(once, 1e6),
        "total_mb": _per(_sum([down, up, once]), 1e6),
        "trained": _per(total(samples, "trained"), drawn),
        "forward": _per(total(samples, "forward"), drawn),
        "state_mb": _per(max(state, default=None), 1e6),
        **{f"seconds_{p}": _per(v, len(played)) for p, v in seconds.items()},
        "seconds_total": _sum([v for v in everything if v is not None]),
        "memory_mb": max(memory, default=None),
    }


def total(rows: Sequence[Row], name: str) -> float | None:
    """The sum of a field over rows; None if no row has it."""
    known = [v for r in rows if (v := number(r.get(name))) is not None]
    return sum(known) if known else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def _per(value: float | None, by: float) -> float | None:
    return None if value is None or not by else value / by


# ---- cells ------------------------------------------------------------------------------------------------


class Cells:
    """Look-up of formatted cells in the frame of `accuracy`, for one setting."""

    def __init__(self, tidy: pd.DataFrame, setting: int) -> None:
        mine = tidy[tidy["setting"] == setting].astype(object)
        mine = mine.where(mine.notna(), None)
        rows: list[dict[str, Any]] = mine.to_dict("records")  # type: ignore[assignment]
        self._rows = {(r["label"], r["metric"], r["rule"]): r for r in rows}

    def row(self, label: str, metric: str, rule: str) -> dict[str, Any]:
        """The tidy row; an empty one with n = 0 if the method has no such metric."""
        empty: dict[str, Any] = {"n": 0, "mean": None, "sd": None, "rounds": "", "finished": False, "undefined": False}
        return self._rows.get((label, metric, rule), empty)

    def percent(self, label: str, metric: str, rule: str) -> str:
        """`63.17 ± 0.42`, without the ± for fewer than two seeds; a word or `-` where there is no number."""
        return self.cell(label, metric, rule).text

    def cell(self, label: str, metric: str, rule: str, *, bold: bool = False, spread: bool = True) -> Cell:
        """The same as a cell; spread: with the ±."""
        row = self.row(label, metric, rule)
        if row["mean"] is None:
            return Cell(UNDEFINED if row["undefined"] else MISSING)
        return Cell(with_spread(row["mean"], row["sd"] if spread else None), row["mean"], bold)

    def highest(self, labels: Sequence[str], metric: str, rule: str) -> set[str]:
        """Which finished methods have the highest mean as printed; none if fewer than two can be compared."""
        rows = {label: self.row(label, metric, rule) for label in labels}
        shown = {k: f"{100 * r['mean']:.2f}" for k, r in rows.items() if r["mean"] is not None and r["finished"]}
        top = max(map(float, shown.values()), default=0.0)
        return {k for k, v in shown.items() if float(v) == top} if len(shown) > 1 else set()


def with_spread(mean: float, sd: float | None) -> str:
    """A share of 1 in percent, two decimals."""
    return f"{100 * mean:.2f}" + (f" ± {100 * sd:.2f}" if sd is not None else "")


def over(counts: Iterable[int], ddof: int) -> str:
    """What a ± is over, in words."""
    several = sorted({n for n in counts if n > 1})
    by = "n-1" if ddof else "n"
    if not several:
        return "One seed, hence no ±"
    return f"±: sd over {several[0] if len(several) == 1 else 'the n'} seeds, {by}"


def plus_minus(rows: Iterable[Mapping[Any, Any]], ddof: int, shown: Callable[[str], str] = str) -> str:
    """What every ± in these rows of `accuracy` is over, in words; `shown`: how a label is written."""
    rows = list(rows)
    apart = {r["label"]: r for r in rows if r.get("over") == PARTIES and pd.notna(r["sd"])}
    seeds = [int(r["n"]) for r in rows if r.get("over") != PARTIES]
    parts = [over(seeds, ddof)] if any(seeds) or not apart else []
    for label, r in apart.items():
        by = "n-1" if r["ddof"] else "n"
        runs = f", its mean over {int(r['n'])} seeds" if r["n"] > 1 else ""
        parts.append(f"± of {shown(label)}: sd over the parties of one run, {by}{runs}")
    return "; ".join(parts)


def terminal(runs: Sequence[Run]) -> Table:
    """The headline numbers for the terminal: one row per setting and method."""
    made = settings(runs)
    tidy = accuracy(made)
    has_pm = bool(tidy.loc[tidy["metric"].isin(WEIGHTINGS), "mean"].notna().any())
    table = Table(
        title="Accuracy, %",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    heads = [
        "method",
        *(f"GM {r.short}" for r in RULES.values()),
        *(["PM(V) last", "PM(L) last"] if has_pm else []),
        "n",
    ]
    for name in [*(["setting"] if len(made) > 1 else []), *heads, "status"]:
        worded = name in ("method", "status")
        width = 12 if name[:2] in ("GM", "PM") else 8 if worded else None
        table.add_column(Text(name), justify="left" if worded else "right", min_width=width)
    for s in made:
        for cells in _terminal_rows(s, Cells(tidy, s.number), has_pm):
            table.add_row(*([Text(str(s.number))] if len(made) > 1 else []), *cells)
        table.add_section()
    table.caption = Text(_caption(made, tidy))
    return table


def _terminal_rows(setting: Setting, cells: Cells, has_pm: bool) -> Iterable[list[Text]]:
    labels = [e.label for e in setting.entries]
    top = cells.highest(labels, "gm", setting.headline.name)
    for e in setting.entries:
        row = [Text(e.label)]
        for name in RULES:
            bold = e.label in top and name == setting.headline.name
            row.append(Text(cells.percent(e.label, "gm", name), style="bold" if bold else ""))
        if has_pm:
            row += [Text(cells.percent(e.label, m, last.name)) for m in ("pm_v", "pm_l")]
        yield [*row, Text(str(len(e.used))), Text(e.state, style="" if e.state == "finished" else "yellow")]


def _caption(made: Sequence[Setting], tidy: pd.DataFrame) -> str:
    personal = tidy["metric"].isin(("pm_v", "pm_l")) & (tidy["rule"] == last.name) & (tidy["over"] == PARTIES)
    rows = tidy[(tidy["metric"] == "gm") | personal].to_dict("records")
    parts = [plus_minus(rows, made[0].ddof if made else 1), "bold: highest mean of the headline"]
    if any(
        not e.used or value(r, "gm") is None
        for s in made
        for e in s.entries
        for run in e.used
        for r in evaluated(run.rounds)[-1:]
    ):
        parts.append(f"{MISSING}: not measured")
    lines = [f"setting {s.number}: {s.name}" for s in made if s.name]
    return "\n".join([*lines, "; ".join(parts)])


def odd(runs: Sequence[Run]) -> list[str]:
    """What should make a reader look twice, a sentence each."""
    made = settings(runs)
    return [f"setting {s.number}: {told}" if len(made) > 1 else told for s in made for told in oddities(s)]
