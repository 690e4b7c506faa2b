"""Pictures of the report, one setting at a time; a function returns the blocks of its section."""

from __future__ import annotations

from . import figures
from .content import Report
from .groups import Setting
from .markdown import escape
from .read import DIVERGED, UNFINISHED
from .sections import chance_level


def curves(made: Report, s: Setting) -> list[str]:
    """Accuracy over rounds, and the terms of the training loss."""
    shown, terms = made.of("curves.csv", s), made.of("terms.csv", s)
    shown = shown[shown["metric"].isin(figures.ACCURACIES)]
    parts = []
    band = "Line: mean over seeds; band: lowest to highest seed" if len(s.seeds) > 1 else "One seed"
    if len(shown):
        who = ", ".join(map(str, shown["label"].unique()))
        caption = f"{band}.{_marks(set(shown['fate']))} Data: [curves.csv](curves.csv)"
        parts.append(
            made.picture(
                "curves",
                s,
                f"Test accuracy over rounds of {who}",
                caption,
                lambda path: figures.draw_curves(shown, chance_level(s), path),
            )
        )
    if len(terms):
        caption = (
            "Terms of the training loss, unweighted, mean over the steps of the round's clients. "
            f"{band}.{_marks(set(terms['fate']))} Data: [terms.csv](terms.csv)"
        )
        parts.append(
            made.picture(
                "terms",
                s,
                "Terms of the training loss over rounds",
                caption,
                lambda path: figures.draw_terms(terms, path),
            )
        )
    return ["### Curves", *parts] if parts else []


def _marks(fates: set[str]) -> str:
    """What the marks at the ends of curves mean, if there are any."""
    words = {DIVERGED: "A cross ends a diverged method.", UNFINISHED: "A diamond ends an unfinished method."}
    return "".join(f" {text}" for fate, text in words.items() if fate in fates)


def cost(made: Report, s: Setting) -> list[str]:
    """What the methods cost, side by side."""
    mine = made.of("cost.csv", s)
    mine = mine[mine["down_mb"].notna()]
    if mine.empty:
        return []
    caption = (
        "Means over rounds and seeds. A sample-pass is forward and backward; a forward pass alone counts a third. "
        "Data: [cost.csv](cost.csv)"
    )
    return [made.picture("cost", s, "Cost by method: bytes, samples, memory, server time", caption,
                         lambda path: figures.draw_cost(mine, path))]  # fmt: skip


def split(made: Report, s: Setting) -> list[str]:
    """The heat map of the split."""
    mine = made.of("split.csv", s)
    if mine.empty:
        return []
    varies = s.first.protocol.get("partition_seed") == "run"
    whose = f" of seed {mine['seed'].iloc[0]}; each seed has its own" if varies else ""
    caption = f"Split of the training samples{whose}. Data: [split.csv](split.csv)"
    return [
        "### Split",
        made.picture(
            "split",
            s,
            "Heat map of samples by client and class, with client sizes",
            caption,
            lambda path: figures.draw_split(mine, path),
        ),
    ]


def prototypes(made: Report, s: Setting) -> list[str]:
    """Prototypes in the plane, and why some are left out."""
    mine, notes = made.of("prototypes.csv", s), made.notes.get(s.number, [])
    parts = []
    if len(mine):
        who = ", ".join(map(str, mine["label"].unique()))
        classes = max(len(s.first.data.get("classes", [])), int(mine["class_id"].max()) + 1)
        caption = (
            "Stars: global prototypes; dots: the clients' own; colour: class. Last stored round of one seed; "
            "distances between panels mean nothing. Data: [prototypes.csv](prototypes.csv)"
        )
        parts.append(
            made.picture(
                "prototypes",
                s,
                f"Prototypes in the plane of {who}",
                caption,
                lambda path: figures.draw_prototypes(mine, classes, path),
            )
        )
    parts += [f"*{escape(note)}.*" for note in notes]
    return ["### Prototypes", *parts] if parts else []
