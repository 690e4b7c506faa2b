"""Figures of the report, one setting at a time; a function returns the blocks of its section."""

from __future__ import annotations

from . import figures, frames, shapes
from .blocks import Block, Heading
from .content import Report
from .groups import Setting
from .read import DIVERGED, UNFINISHED
from .sections import chance_level


def curves(made: Report, s: Setting) -> list[Block]:
    """Accuracy over rounds and over what was spent, test loss, and the terms of the training loss."""
    points, terms = frames.budget([s]), frames.terms([s])
    loss = points[points["metric"] == "loss"][frames.CURVES]
    budget = points[points["metric"].isin(figures.ACCURACIES)]
    shown = budget[frames.CURVES]
    budget = budget[budget[list(figures.BUDGET)].notna().any(axis=1)]
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
    if len(budget):
        caption = (
            "The same over MB (1e6 bytes) sent and received until then, constants and the exchange before round 0 included, and "
            "over seconds of training, prototype pass and aggregation until then, evaluation apart: means over seeds. Seconds "
            f"hold for the machine named above. {band}.{_marks(set(budget['fate']))}"
        )
        alt = "Test accuracy over bytes and over seconds"
        parts.append(made.figure("budget", drawn, budget, alt, caption, figures.draw_budget, s))
    if len(loss):
        caption = f"Loss of the global model on the test set. {band}.{_marks(set(loss['fate']))}"
        parts.append(made.figure("loss", drawn, loss, "Test loss over rounds", caption, figures.draw_loss, s))
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
    """The geometry of prototypes and of features."""
    return [*shapes.prototypes(made, s), *shapes.of_features(made, s)]
