"""What the README shows: its links lead somewhere, and its numbers are those of the committed report."""

from __future__ import annotations

import importlib.util
import re
import tarfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from protofl.report import asked, tables
from protofl.report.groups import settings
from protofl.report.markdown import escape

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "reports" / "example"
COLUMNS = {"GM last": ("gm", "last"), "GM mean of last 5": ("gm", "mean_last_5"),
           "GM best (picked on test)": ("gm", "best"), "PM(V) last": ("pm_v", "last")}  # fmt: skip


def links(page: Path) -> list[Path]:
    """The files that a Markdown page links to."""
    found = re.findall(r"\]\(([^)#\s]+)\)", page.read_text("utf-8"))
    return [page.parent / link for link in found if "://" not in link]


def test_links() -> None:
    for page in (ROOT / "README.md", *(ROOT / "reports").glob("*/README.md")):
        runs = (page.parent / "../../results").resolve()  # what a report was made of need not be there
        dead = [p for p in links(page) if not p.exists() and not p.resolve().is_relative_to(runs)]
        assert not dead, dead


def test_the_table_is_that_of_the_report() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| method | GM last"))
    heads, _, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines[at : at + 8]]
    told = pd.read_csv(EXAMPLE / "data" / "accuracy.csv")
    told = told[told["setting"] == told.loc[told["n"] == 3, "setting"].iloc[0]]
    assert len(rows) == told["label"].nunique() == 6
    for label, *shown in rows:
        for head, text in zip(heads[1:], shown):
            if head == "n":
                continue
            metric, rule = COLUMNS[head]
            (row,) = told[(told.label == label) & (told.metric == metric) & (told.rule == rule)].itertuples()
            assert text == f"{100 * row.mean:.2f} ± {100 * row.sd:.2f}", (label, head)
            assert str(row.n) == shown[heads.index("n") - 1]


def test_the_committed_report_is_small() -> None:
    """Its page, which can be made again, is not committed."""
    committed = [path for path in EXAMPLE.rglob("*") if path.is_file() and path.name != "index.html"]
    assert len(committed) > 50 and sum(path.stat().st_size for path in committed) < 3_000_000


def tabulate() -> Any:
    """The script that writes the results into the README."""
    spec = importlib.util.spec_from_file_location("tabulate", ROOT / "results" / "tabulate.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_results_are_those_of_the_archives() -> None:
    """Run `python results/tabulate.py` where this fails."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert tabulate().replaced(text) == text and text.count("<!-- results") == 1


@pytest.mark.parametrize("archive", tabulate().archives(), ids=lambda path: path.name)
def test_reports_are_made_of_the_archives(archive: Path, tmp_path: Path) -> None:
    """The same runs, the same numbers, nothing of the machine, and small."""
    report = ROOT / "reports" / archive.name.removesuffix(".tar.xz")
    told = asked.find([archive])
    made = settings(told.runs)
    tables.accuracy(made).to_csv(tmp_path / "a.csv", index=False, lineterminator="\n")
    assert (tmp_path / "a.csv").read_text() == (report / "data/accuracy.csv").read_text()
    page = (report / "README.md").read_text("utf-8")
    assert all(run.digest in page and run.status == "finished" for run in told.runs)
    assert page.startswith(f"# {told.title}") and all(escape(note) in page for note in told.notes)
    with tarfile.open(archive) as packed:
        content = b"".join(packed.extractfile(entry).read() for entry in packed)  # type: ignore[union-attr]
    assert b"/tmp/" not in content and b"/work" not in content and b"/home/" not in content
    committed = [path for path in report.rglob("*") if path.is_file() and path.name != "index.html"]
    assert archive.stat().st_size + sum(path.stat().st_size for path in committed) < 8_000_000
