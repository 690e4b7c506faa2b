"""The report: Markdown with its pictures and the data behind every table and picture."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import UserError
from . import describe, pictures, sections, tables
from .content import DATA, Report
from .groups import Setting
from .markdown import block, escape, table
from .read import UNFINISHED, Run
from .read import runs as read_runs

Given = Run | Path | str


def report(runs: Given | Iterable[Given], out: Path | str, *, title: str, command: str | None = None) -> Path:
    """Write `out`/README.md with its pictures and CSV files, and return its path.

    `runs`: runs, or folders with runs (one, or a sequence of them). `command`: the command line to be quoted.
    The same records give the same bytes.
    """
    found = _runs(runs)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        made = Report(found, out)
        for name, data in made.data.items():
            data.to_csv(out / name, index=False, lineterminator="\n")
        page = out / "README.md"
        page.write_text(_page(made, title, command), "utf-8", newline="\n")
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


def _page(made: Report, title: str, command: str | None) -> str:
    parts = [f"# {escape(title)}", *_opening(made, command)]
    for s in made.settings:
        parts += _setting(made, s)
    parts += ["## Runs", _run_list(made), "## Files", _files()]
    return "\n\n".join(filter(None, parts)) + "\n"


def _opening(made: Report, command: str | None) -> list[str]:
    """The command, the versions, and which settings there are."""
    parts = ["Made from records by this command:", block(command)] if command else []
    parts.append(describe.versions(made.runs))
    if not made.settings:
        parts.append("**No run could be read**; the list below says why.")
    if len(made.settings) > 1:
        heads = ["setting", *map(escape, made.settings[0].differs), "methods"]
        rows = [
            [str(s.number), *map(escape, s.differs.values()), escape(", ".join(e.label for e in s.entries))]
            for s in made.settings
        ]
        parts += ["Settings that differ are not compared with each other:", table(heads, rows, len(heads))]
    return parts


def _setting(made: Report, s: Setting) -> list[str]:
    """All parts of one setting."""
    named = ", ".join(f"{k}={v}" for k, v in s.differs.items())
    top = f"## Setting {s.number}: {escape(named)}" if named else "## Setting"
    return [
        top,
        describe.what_was_run(s),
        describe.methods(s),
        *sections.accuracy(made, s),
        *sections.personal(made, s),
        *sections.readings(made, s),
        *sections.personal_readings(made, s),
        *sections.cost(made, s),
        *pictures.cost(made, s),
        *pictures.curves(made, s),
        *pictures.split(made, s),
        *pictures.prototypes(made, s),
    ]


# ---- traceability -----------------------------------------------------------------------------------------


def _run_list(made: Report) -> str:
    """Every folder, what it is, whether it counts, and why not."""
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
                escape(_relative(run.path, made.out)),
                escape(run.digest or tables.MISSING),
                escape(label.get(run.path, run.name or tables.MISSING)),
                str(run.seed) if run.known else tables.MISSING,
                str(where.get(run.path, tables.MISSING)),
                run.status,
                "yes" if run.path in used else "**no**",
                escape("; ".join(why)),
            ]
        )
    out = sum(run.path not in used for run in made.runs)
    text = f"{len(made.runs)} run folders{f', {out} left out of the numbers' if out else ''}."
    heads = ["folder", "digest", "method", "seed", "setting", "status", "in the numbers", "remark"]
    return f"{text}\n\n{table(heads, rows, len(heads))}"


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()


def _files() -> str:
    return "\n".join(f"* [{name}]({name}): {what}" for name, what in DATA.items())
