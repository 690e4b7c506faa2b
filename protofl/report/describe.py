"""What was run, in words: data, split, network, training, checks of fairness, methods, versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from .. import options
from ..protocol import Protocol
from . import frames
from .blocks import Table, cells
from .groups import Entry, Setting
from .markdown import escape
from .read import Run, number
from .select import evaluated
from .tables import MISSING, frame

SKEW = {
    "entropy": "label entropy",
    "label_entropy": "label entropy (nats)",
    "label_entropy_normalised": "label entropy / ln K",
    "classes_per_client": "classes per client",
    "size_cv": "size sd / mean",
    "distance": "distance of label mixes",
    "total_variation": "total variation",
    "js_distance": "JS distance",
}
"""Skew figures in words."""

TRAINING = {
    "rounds": "T",
    "local_epochs": "E",
    "batch_size": "B",
    "client_lr": "lr",
    "lr_decay_per_round": "lr decay per round",
    "momentum": "momentum",
    "weight_decay": "weight decay",
    "grad_clip_norm": "gradient clip",
}

SHOWN = {
    *TRAINING,
    "dataset",
    "partition",
    "beta",
    "clients",
    "participation",
    "partition_seed",
    "model",
    "seed",
    "report",
    "std_over",
    "std_ddof",
    "metrics",
}
"""Protocol fields that have a place of their own."""


def text(value: Any) -> str:
    """A value of a record as it is written on the command line."""
    return MISSING if value is None else options.text(value)


def versions(runs: Sequence[Run]) -> str:
    """The versions and machines behind the runs; several values where they differ."""
    names = dict.fromkeys(n for r in runs for n in r.env)
    parts = []
    for name in names:
        values = list(dict.fromkeys(text(r.env[name]) for r in runs if r.env.get(name) not in (None, "", {}, [])))
        if values:
            parts.append(f"{escape(name)} {escape(' / '.join(values))}")
    return f"Versions and machine: {', '.join(parts)}." if parts else ""


def what_was_run(s: Setting) -> str:
    """The list of what all methods of a setting share."""
    lines = {
        "Data": _data(s),
        "Split": _split(s),
        "Network": _network(s),
        "Training": _training(s),
        "Of its own": _adapted(s),
        "Seeds": escape(", ".join(map(str, s.seeds))),
        "Not as by default": _changed(s),
        "Checks": checks(s),
    }
    return "\n".join(f"* **{name}**: {line}" for name, line in lines.items() if line)


def _data(s: Setting) -> str:
    d = s.first.data
    parts = [escape(text(s.first.protocol.get("dataset")))]
    parts += [f"{len(d['classes'])} classes"] if d.get("classes") else []
    parts += [f"{d[n]:,} {n}" for n in ("train", "test") if isinstance(d.get(n), int)]
    parts += [f"fingerprint {escape(d['fingerprint'])}"] if d.get("fingerprint") else []
    # a report travels: where a file lay is nobody's business
    parts += [f"source {escape(os.path.basename(str(d['source'])))}"] if d.get("source") else []
    return ", ".join(parts) + (f"; {escape(d['note'])}" if d.get("note") else "")


def _split(s: Setting) -> str:
    p, part = s.first.protocol, s.first.partition
    names = {"beta": "beta", "clients": "N", "partition_seed": "seed"}
    parts = [escape(text(p.get("partition")))]
    parts += [f"{word} = {escape(text(p[n]))}" for n, word in names.items() if n in p]
    hashes = list(dict.fromkeys(str(r.partition["index_hash"]) for r in s.runs if r.partition.get("index_hash")))
    parts += [f"index hash {escape(' / '.join(hashes))}"] if hashes else []
    same = p.get("partition_seed") != "run"
    parts += [f"count hash {escape(part['count_hash'])}"] if part.get("count_hash") and same else []
    sizes = [sum(row) for row in counts] if (counts := frames.counts(part)) is not None else []
    parts += [f"sizes {min(sizes):,} to {max(sizes):,}"] if sizes else []
    parts += [f"**{sizes.count(0)} clients without data**"] if 0 in sizes else []
    skew = part.get("skew")
    figures = {k: v for k, v in skew.items() if number(v) is not None} if isinstance(skew, dict) else {}
    parts += [f"{escape(SKEW.get(k, k))} {v:.3g}" for k, v in figures.items()]
    parts += [f"draws {part['attempts']}"] if isinstance(part.get("attempts"), int) else []
    of = "" if same else f" (figures of seed {s.first.seed})"
    return ", ".join(parts) + of + (f". {escape(part['note'])}" if part.get("note") else "")


def _network(s: Setting) -> str:
    """The network, and the methods that train another number of parameters."""
    own = {e.label: _parameters(e.runs[0]) for e in s.entries}
    common = max(own.values(), key=list(own.values()).count)
    others = [f"{escape(label)}: {words}" for label, words in own.items() if words != common]
    if others:
        return f"{common}. **Differs for** {'; '.join(others)}"
    return f"{common}, the same for all methods" if len(own) > 1 else common


def _parameters(run: Run) -> str:
    net, sizes = run.network, run.network.get("parameters")
    sizes = sizes if isinstance(sizes, dict) else {}
    named = [f"{escape(k)} {_count(v)}" for k, v in sizes.items() if v and k != "total"]
    words = escape(text(net.get("name", run.protocol.get("model"))))
    words += f", {_count(sizes['total'])} parameters" if "total" in sizes else ""
    words += f" ({', '.join(named)})" if named else ""
    trained = net.get("trained")
    return words + (f", of its own model {_count(trained)}" if trained not in (None, 0, sizes.get("total")) else "")


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else escape(text(value))


def _training(s: Setting) -> str:
    p = s.first.protocol
    parts = [f"{word} = {escape(text(p[n]))}" for n, word in TRAINING.items() if n in p]
    shared = [run for run in s.runs if not run.adapted] or s.runs
    drawn = _span(len(row.get("clients") or []) for run in shared for row in run.rounds if row["round"] >= 0)
    if "participation" in p:
        parts.insert(1, f"participation {escape(text(p['participation']))} ({drawn} clients per round)")
    engines = list(dict.fromkeys(str(r.network["engine"]) for r in s.runs if r.network.get("engine")))
    return ", ".join(parts) + (f", engine {escape(' / '.join(engines))}" if engines else "")


def _adapted(s: Setting) -> str:
    """Methods with a budget or a population of their own."""
    told = [(e.label, e.runs[0].adapted) for e in s.entries if e.runs[0].adapted]
    return "; ".join(
        f"{escape(label)}: {', '.join(f'{escape(n)} = {escape(text(v))}' for n, v in fields.items())}"
        for label, fields in told
    )


def _span(counts: Iterable[int]) -> str:
    """`10`, or `9-10` where it varies."""
    known = sorted(set(counts))
    return MISSING if not known else str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def _changed(s: Setting) -> str:
    """Protocol fields that have no place of their own and are not at their default."""
    known = options.fields(Protocol)
    p = s.first.protocol
    names = [n for n, v in p.items() if n not in SHOWN and (n not in known or text(v) != text(known[n].default))]
    return ", ".join(f"{escape(n)} = {escape(text(p[n]))}" for n in names)


def checks(s: Setting) -> str:
    """Whether what must be the same for all methods of a seed is the same."""
    verdicts = _verdicts(s)
    good = [name for name, verdict in verdicts.items() if verdict is True]
    parts = [f"the same for all methods of a seed: {', '.join(good)}"] if good else []
    bad = [name for name, verdict in verdicts.items() if verdict is False]
    return "; ".join([*parts, *([f"**not the same for all methods of a seed: {', '.join(bad)}**"] if bad else [])])


def _verdicts(s: Setting) -> dict[str, bool | None]:
    """By what must be the same: whether it is, None if nothing can be compared."""

    def shares(run: Run) -> bool:
        """Whether the method draws clients as the table does."""
        return not {"participation", "rounds", "client_sampling"} & run.adapted.keys()

    checks: dict[str, Callable[[Run], Any]] = {
        "split": lambda r: r.partition.get("index_hash"),
        "initial weights (of networks of one size)": lambda r: r.network.get("w0"),
        "drawn clients": lambda r: {
            row["round"]: row.get("clients") for row in r.rounds if row["round"] >= 0 and shares(r)
        },
    }
    return {name: _agree(s, read, weights=name.startswith("initial")) for name, read in checks.items()}


def _agree(s: Setting, read: Callable[[Run], Any], weights: bool) -> bool | None:
    """Whether all runs of a seed (for weights: of one size too) agree; None if nothing can be compared."""
    groups: dict[tuple[int, str], list[Any]] = {}
    for run in s.runs:
        if found := read(run):
            size = text(run.network.get("trained")) if weights else ""
            groups.setdefault((run.seed, size), []).append(found)
    compared = [group for group in groups.values() if len(group) > 1]
    return all(_same(a, group[0]) for group in compared for a in group) if compared else None


def _same(a: Any, b: Any) -> bool:
    """Equality; of tables by round, where both have the round."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(a[t] == b[t] for t in a.keys() & b.keys())
    return bool(a == b)


def methods(s: Setting, name: str) -> Table:
    """The methods with their options and the size of what they train."""
    rows = [
        cells([
            e.label,
            e.method,
            MISSING if not (size := e.runs[0].network.get("trained")) else f"{size:,}",
            ", ".join(f"{k}={text(v)}" for k, v in e.runs[0].options.items()) or MISSING,
        ])
        for e in s.entries
    ]  # fmt: skip
    return Table(name, "Methods", ["method", "id", "parameters", "options"], rows, left=2)


def population(entry: Entry) -> tuple[str, str]:
    """Whose models PM is over, and how many of them could be evaluated in the last round."""
    ends = [r for run in entry.used for r in evaluated(entry.rows(run))[-1:] if number(r.get("pm_clients")) is not None]
    if not ends:
        return MISSING, MISSING
    asked = {**entry.runs[0].protocol, **entry.runs[0].adapted}.get("pm_clients", MISSING)
    skipped = [int(number(r.get("pm_skipped")) or 0) for r in ends]
    everyone = any(r["pm_clients"] + k > len(r.get("clients") or []) > 0 for r, k in zip(ends, skipped))
    counted = _span(int(r["pm_clients"]) for r in ends)
    return "all" if everyone else escape(asked), counted + (f" ({_span(skipped)} skipped)" if any(skipped) else "")


def every_setting(made: Sequence[Setting]) -> pd.DataFrame:
    """Every protocol field and option of every method, tidy."""
    return frame(
        (
            {
                "setting": s.number,
                "label": e.label,
                "seed": run.seed,
                "kind": kind,
                "name": n,
                "value": text(v),
            }
            for s in made
            for e in s.entries
            for run in e.runs
            for kind, values in (("protocol", run.protocol), ("option", run.options))
            for n, v in values.items()
        ),
        ["setting", "label", "seed", "kind", "name", "value"],
    )
