"""The results table of the README, made from the archives in `results/`: python results/tabulate.py writes it.

Between the two markers nothing is written by hand; a test fails where the README differs from the archives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from protofl.report import asked, tables
from protofl.report.groups import Setting, settings
from protofl.report.select import KINDS

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- results: written by results/tabulate.py -->", "<!-- end of results -->"


def archives() -> list[Path]:
    """The committed results, tables and ablations."""
    return sorted((ROOT / "results").glob("*.tar.xz"), key=lambda path: path.name.removesuffix(".tar.xz"))


def written() -> str:
    """The part of the README between the markers."""
    return "\n".join([BEGIN, "", *(line for path in archives() for line in section(path)), END])


def section(path: Path) -> Iterator[str]:
    """One archive: what it is, with its scale and what was cut; a table per kind of accuracy; nothing for an ablation."""
    told = asked.find([path])
    if told.ablation:
        return
    name = path.name.removesuffix(".tar.xz")
    made = settings(told.runs)
    yield f"**{told.title}.** {' '.join(note if note.endswith('.') else note + '.' for note in told.notes)}"
    yield f"{len(told.runs)} runs, [`results/{path.name}`](results/{path.name}); [report](reports/{name}/README.md)."
    yield ""
    tidy = tables.accuracy(made)
    for metric, word in KINDS.items():
        shown = [s for s in made if _measured(tables.Cells(tidy, s.number), s, metric)]
        if shown:
            labels = list(dict.fromkeys(e.label for s in shown for e in s.entries))
            cells = {s.number: tables.Cells(tidy, s.number) for s in shown}
            rows = [[label, *(cells[s.number].percent(label, metric, "last") for s in shown)] for label in labels]
            yield f"| {' | '.join(['method', *(f'{word}, {s.name}' if s.name else word for s in shown)])} |"
            yield f"|---|{'---:|' * len(shown)}"
            yield from (f"| {' | '.join(row)} |" for row in rows if any(cell != tables.MISSING for cell in row[1:]))
            yield ""
            counts = {int(cells[s.number].row(label, metric, "last")["n"]) for s in shown for label in labels} - {0}
            yield f"{word}, last round, %; {tables.over(counts, made[0].ddof)} (n = {' or '.join(map(str, sorted(counts)))})."
            yield ""


def _measured(cells: tables.Cells, s: Setting, metric: str) -> bool:
    return any(cells.row(e.label, metric, "last")["n"] for e in s.entries)


def replaced(text: str) -> str:
    """The README with its results anew."""
    head, _, rest = text.partition(BEGIN)
    return head + written() + rest.partition(END)[2]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(replaced(readme.read_text("utf-8")), "utf-8")
