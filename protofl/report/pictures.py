"""Figures of the report, one setting at a time; a function returns the blocks of its section."""

from __future__ import annotations

from . import figures, frames, geometry
from .blocks import Block, Heading, Text
from .content import Report
from .groups import Setting
from .markdown import escape
from .read import DIVERGED, UNFINISHED
from .sections import chance_level


def curves(made: Report, s: Setting) -> list[Block]:
    """Accuracy over rounds, and the terms of the training loss."""
    shown, terms = frames.curves([s]), frames.terms([s])
    shown = shown[shown["metric"].isin(figures.ACCURACIES)]
    drawn = [run for e in s.entries for run in e.drawn]
    parts: list[Block] = []
    band = "Line: mean over seeds; band: lowest to highest seed" if len(s.seeds) > 1 else "One seed"
    if len(shown):
        who = ", ".join(map(str, shown["label"].unique()))
        parts.append(
            made.figure(
                "curves",
                drawn,
                shown,
                f"Test accuracy over rounds of {who}",
                f"{band}.{_marks(set(shown['fate']))}",
                lambda data: figures.draw_curves(data, chance_level(s)),
                s,
            )
        )
    if len(terms):
        caption = (
            "Terms of the training loss, unweighted, mean over the steps of the round's clients. "
            f"{band}.{_marks(set(terms['fate']))}"
        )
        alt = "Terms of the training loss over rounds"
        parts.append(made.figure("terms", drawn, terms, alt, caption, figures.draw_terms, s))
    return [Heading("Curves", 3), *parts] if parts else []


def _marks(fates: set[str]) -> str:
    """What the marks at the ends of curves mean, if there are any."""
    words = {DIVERGED: "A cross ends a diverged method.", UNFINISHED: "A diamond ends an unfinished method."}
    return "".join(f" {text}" for fate, text in words.items() if fate in fates)


def cost(made: Report, s: Setting) -> list[Block]:
    """What the methods cost, side by side."""
    mine = made.of("cost.csv", s)
    mine = mine[mine["down_mb"].notna()]
    if mine.empty:
        return []
    caption = "Means over rounds and seeds. A sample-pass is forward and backward; a forward pass alone counts a third."
    alt = "Cost by method: bytes, samples, memory, server time"
    used = [run for e in s.entries for run in e.used]
    return [made.figure("cost", used, mine, alt, caption, figures.draw_cost, s)]


def split(made: Report, s: Setting) -> list[Block]:
    """The heat map of the split."""
    mine, run = frames.split([s]), frames.split_run(s)
    if run is None or mine.empty:
        return []
    varies = s.first.protocol.get("partition_seed") == "run"
    whose = f" of seed {run.seed}; each seed has its own" if varies else ""
    alt = "Heat map of samples by client and class, with client sizes"
    caption = f"Split of the training samples{whose}."
    return [Heading("Split", 3), made.figure("split", [run], mine, alt, caption, figures.draw_split, s)]


def prototypes(made: Report, s: Setting) -> list[Block]:
    """Prototypes in the plane, and why some are left out."""
    mine, notes = geometry.prototypes([s])
    parts: list[Block] = []
    if len(mine):
        who = ", ".join(map(str, mine["label"].unique()))
        classes = max(len(s.first.data.get("classes", [])), int(mine["class_id"].max()) + 1)
        caption = (
            "Stars: global prototypes; dots: the clients' own; colour: class. Last stored round of one seed; "
            "distances between panels mean nothing."
        )
        shown = set(mine["label"])
        parts.append(
            made.figure(
                "prototypes",
                [e.drawn[0] for e in s.entries if e.label in shown],
                mine,
                f"Prototypes in the plane of {who}",
                caption,
                lambda data: figures.draw_prototypes(data, classes),
                s,
            )
        )
    parts += [Text(f"*{escape(note)}.*") for note in notes]
    return [Heading("Prototypes", 3), *parts] if parts else []
