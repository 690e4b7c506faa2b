"""Tables as LaTeX: what is escaped, what is bold, and that the file is whole."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from protofl.report import comparison, latex, runs, sections, summary
from protofl.report.blocks import Cell, Table
from protofl.report.content import Report

ALL = "\\ & % $ # _ { } ~ ^ < > | \" ± × ≥ ' ` - --"


def table(*rows: list[Cell], notes: str = "", title: str = "Accuracy") -> Table:
    return Table("accuracy", title, ["method", "GM, %"], rows, notes)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\\", r"\textbackslash{}"),
        ("&", r"\&"),
        ("%", r"\%"),
        ("$", r"\$"),
        ("#", r"\#"),
        ("_", r"\_"),
        ("{x}", r"\{x\}"),
        ("~", r"\textasciitilde{}"),
        ("^", r"\textasciicircum{}"),
        ("<", r"\textless{}"),
        (">", r"\textgreater{}"),
        ("|", r"\textbar{}"),
        ('"', r"\char34{}"),
        ("[2em]*", "{[}2em{]}{*}"),
        ("63.17 ± 0.42", r"63.17 $\pm$ 0.42"),
        ("\\input{/etc/passwd}", r"\textbackslash{}input\{/etc/passwd\}"),
        ("a\n\nb\r\x00c\u2028d", "a b c d"),
        ("FedProx (mu=0.01)", "FedProx (mu=0.01)"),
    ],
)
def test_escape(text: str, shown: str) -> None:
    assert latex.escape(text) == shown


def test_whole_table() -> None:
    made = latex.write(
        table(
            [Cell("FedAvg"), Cell("63.17 ± 0.42", 0.6317)],
            [Cell("Fed_X & co"), Cell("65.00", 0.65, bold=True)],
            notes="In %. ±: sd over 3 seeds, n-1. *best* is optimistic.",
        )
    )
    assert made == "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            "% In %.",
            "% ±: sd over 3 seeds, n-1.",
            "% *best* is optimistic.",
            r"\begin{table}",
            r"\centering",
            r"\caption{Accuracy}",
            r"\label{tab:accuracy}",
            r"\begin{tabular}{lr}",
            r"\toprule",
            r"method & GM, \% \\",
            r"\midrule",
            r"FedAvg & 63.17 $\pm$ 0.42 \\",
            r"Fed\_X \& co & \textbf{65.00} \\",
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def test_no_name_leaves_its_place() -> None:
    """A comment stays one, a bracket after a row's end is no length, a name stays in its cell."""
    made = latex.write(
        table([Cell("[2em]"), Cell("1")], [Cell("*"), Cell("2")], [Cell(ALL), Cell("3")],
              notes="first\n\\end{table}\nlast", title="\\end{table} 5 %")
    )  # fmt: skip
    lines = made.splitlines()
    assert [line for line in lines if "first" in line] == ["% first \\end{table} last"]
    assert r"\caption{\textbackslash{}end\{table\} 5 \%}" in lines
    assert sound(made)
    # TeX reads \\[2em] as a gap of 2em and \\* as a row without a page break, even across a line's end
    rows = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert not any(row.startswith(("[", "*")) for row in rows)


def sound(text: str) -> bool:
    """Whether braces and mathematics are closed, environments are paired, and all rows have the same cells."""
    code = [line for line in text.splitlines() if not line.startswith("%")]
    plain = re.sub(r"\\\\", "", "\n".join(code))
    depth = 0
    for mark in re.findall(r"(?<!\\)[{}]", plain):
        depth += 1 if mark == "{" else -1
        if depth < 0:
            return False
    opened: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", plain):
        if kind == "begin":
            opened.append(name)
        elif not opened or opened.pop() != name:
            return False
    maths = len(re.findall(r"(?<!\\)\$", plain)) % 2
    cells = {len(re.findall(r"(?<!\\)&", line)) for line in code if line.endswith(r" \\")}
    return depth == 0 and not opened and not maths and len(cells) == 1


def test_long_cells_are_broken_into_lines() -> None:
    long = Cell("n_clusters=3, " * 20)
    assert r"\begin{tabular}{lp{0.50\linewidth}}" in latex.write(table([Cell("a"), long]))
    assert r"\begin{tabular}{p{0.25\linewidth}p{0.25\linewidth}}" in latex.write(table([long, long]))


def test_the_tables_of_a_report_are_sound(study: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    made = Report(runs([study]), tmp_path / "out")
    (s,) = made.settings
    summary.summary(made)
    for section in (sections.accuracy, sections.personal, sections.readings, sections.cost, comparison.differences):
        section(made, s)
    written = sorted((tmp_path / "out" / "tables").glob("*.tex"))
    assert {"summary.tex", "accuracy.tex", "personal.tex", "readings.tex", "cost.tex"} < {path.name for path in written}
    for path in written:
        text = path.read_text("utf-8")
        assert sound(text), path.name
        # what is outside ASCII has been turned into commands
        assert all(line.isascii() for line in text.splitlines() if not line.startswith("%")), path.name


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex on the PATH")
def test_it_compiles(tmp_path: Path) -> None:
    made = latex.write(table([Cell("[2em]"), Cell(ALL)], [Cell("*"), Cell("63.17 ± 0.42", bold=True)], title=ALL))
    head = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
    (tmp_path / "page.tex").write_text(f"{head}{made}\\end{{document}}\n", "utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
