"""The report: README.md and index.html with the same content, figures, tables, and the data behind them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import ablation as ablations
from . import comparison, describe, figures, html, looks, markdown, papers, pictures, sections, summary, sweeps, tables
from .blocks import Block, Cell, Code, Heading, Table, Text
from .content import DATA, Report
from .groups import Setting
from .markdown import escape
from .read import UNFINISHED, Run
from .read import runs as read_runs

Given = Run | Path | str


def report(
    runs: Given | Iterable[Given], out: Path | str, *, title: str, command: str | None = None,
    baseline: str | None = None, target: float | None = None, formats: Sequence[str] = figures.VECTOR,
    notes: Sequence[str] = (), ablation: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write `out`/README.md and index.html with their figures, tables and data, and return the latter's path.

    `runs`: runs, or folders with runs (one, or a sequence of them). `command`: the command line to be quoted. `baseline`:
    the method that others are compared with (default: FedAvg, else the first); `target`: a GM, as a share of 1, whose cost
    is told (default: the baseline's). `formats`: what figures are written as, besides PNG: "svg", "pdf". `notes`: what a
    reader should know of the table; `ablation`: its rows, as a recorded table has them.
    The same records give the same bytes.
    """
    found = _runs(runs)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        stored = tuple(DATA) if ablation is None else ("accuracy.csv", "cost.csv")
        made = Report(found, out, baseline, target, formats, stored)
        blocks = _blocks(made, title, command, notes, ablation)
        (out / "README.md").write_text(markdown.write(blocks), "utf-8", newline="\n")
        page = out / "index.html"
        page.write_text(html.write(blocks, out, command), "utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"the report cannot be written to {out}: {error.strerror or error}") from None
    return page


def _runs(given: Given | Iterable[Given]) -> list[Run]:
    items = [given] if isinstance(given, Run | Path | str) else list(given)
    made = [i for i in items if isinstance(i, Run)]
    paths = [i for i in items if not isinstance(i, Run)]
    found = [*made, *(read_runs(paths) if paths else [])]
    if not found:
        raise UserError("there are no runs to report")
    return found


def _blocks(
    made: Report, title: str, command: str | None, notes: Sequence[str], ablation: Mapping[str, Any] | None
) -> list[Block]:  # fmt: skip
    parts: list[Block] = [Heading(title, 1)]
    if notes:
        parts.append(Text("\n".join(f"* {escape(note)}" for note in notes)))
    if ablation is not None:
        parts += [*_opening(made, command, False), *ablations.blocks(made, ablation)]
    else:
        parts += [*summary.summary(made), *_opening(made, command), *comparison.ranks(made), *sweeps.sweeps(made)]
        for s in made.settings:
            parts += _setting(made, s)
    files = "\n".join(f"* [{name}](data/{name}): {what}" for name, what in DATA.items() if name in made.stored)
    labels = ablations.labels(ablation) if ablation is not None else {}
    return [*parts, Heading("Runs"), _run_list(made, labels), Heading("Data"), Text(files)]


def _opening(made: Report, command: str | None, settings: bool = True) -> list[Block]:
    """The command, the versions, and (settings) which settings there are."""
    parts: list[Block] = [Text("Made from records by this command:"), Code(command)] if command else []
    if versions := describe.versions(made.runs):
        parts.append(Text(versions))
    if not made.settings:
        parts.append(Text("**No run could be read**; the list below says why."))
    if settings and len(made.settings) > 1:
        heads = ["setting", *made.settings[0].differs, "methods"]
        rows = [
            [Cell(str(s.number), s.number), *map(Cell, s.differs.values()), Cell(", ".join(e.label for e in s.entries))]
            for s in made.settings
        ]
        told = "Settings that differ are not compared with each other."
        parts.append(made.table(Table("settings", "Settings", heads, rows, told, left=len(heads))))
    return parts


def _setting(made: Report, s: Setting) -> list[Block]:
    """All parts of one setting."""
    return [
        Heading(f"Setting {s.number}: {s.name}" if s.name else "Setting"),
        Text(describe.what_was_run(s)),
        made.table(describe.methods(s, made.name("methods", s))),
        *sections.accuracy(made, s),
        *sections.personal(made, s),
        *sections.readings(made, s),
        *sections.personal_readings(made, s),
        *comparison.differences(made, s, made.baseline),
        *papers.against_papers(made, s),
        *comparison.target(made, s, made.target, made.baseline),
        *sections.cost(made, s),
        *pictures.cost(made, s),
        *pictures.curves(made, s),
        *pictures.split(made, s),
        *pictures.prototypes(made, s),
        *looks.gradcam(made, s),
    ]


# ---- traceability -----------------------------------------------------------------------------------------


def _run_list(made: Report, labels: Mapping[str, str]) -> Table:
    """Every folder, what it is (labels: by digest, of those that have a better name), whether it counts, and why not."""
    used = {run.path for s in made.settings for e in s.entries for run in e.used}
    where = {run.path: s.number for s in made.settings for run in s.runs}
    label = {run.path: e.label for s in made.settings for e in s.entries for run in e.runs}
    repeated = {path: other for s in made.settings for path, other in s.repeated.items()}
    rows = []
    for run in made.runs:
        why = [run.reason] if run.reason else []
        if run.path in repeated:
            why.append(f"repeats {_relative(repeated[run.path], made.out)}")
        elif run.status == UNFINISHED and run.rounds and run.path not in used:
            why.append("another seed of its method finished")
        rows.append(
            [
                Cell(_relative(run.path, made.out)),
                Cell(run.digest or tables.MISSING),
                Cell(labels.get(run.digest) or label.get(run.path, run.name or tables.MISSING)),
                Cell(str(run.seed) if run.known else tables.MISSING),
                Cell(str(where.get(run.path, tables.MISSING))),
                Cell(run.status),
                Cell("yes") if run.path in used else Cell("no", bold=True),
                Cell("; ".join(why)),
            ]
        )
    out = sum(run.path not in used for run in made.runs)
    text = f"{len(made.runs)} run folders{f', {out} left out of the numbers' if out else ''}."
    heads = ["folder", "digest", "method", "seed", "setting", "status", "in the numbers", "remark"]
    return made.table(Table("runs", "Run folders", heads, rows, text, len(heads)))


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()
