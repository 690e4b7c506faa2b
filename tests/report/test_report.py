"""The written report: content, pictures, robustness, the same bytes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from protofl.errors import UserError
from protofl.report import geometry, groups, report, runs
from protofl.report.markdown import escape
from protofl.report.style import COLOURS, colour, spread

Write = Callable[..., Path]


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def markdown(page: Path) -> str:
    """The same report in Markdown."""
    return (page.parent / "README.md").read_text()


def cells(text: str, start: str) -> list[str]:
    """The cells of the first table line that begins with a text."""
    line = next(part for part in text.splitlines() if part.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def section(text: str, heading: str) -> str:
    return text.split(f"### {heading}")[1].split("\n##")[0]


@pytest.fixture(scope="module")
def whole(writers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of six methods x three seeds."""
    folder = tmp_path_factory.mktemp("whole")
    study, out = writers[0](folder / "study", rounds=12), folder / "out"
    assert report([study], out, title="A study", command="protofl compare `x`") == out / "index.html"
    return out


def test_whole_report(whole: Path) -> None:
    text = markdown(whole / "index.html")
    assert "left out" not in text
    made = files(whole)
    for name in ("figures/curves.png", "figures/terms.png", "figures/split.png", "figures/prototypes.png"):
        assert made[name].startswith(b"\x89PNG") and f"]({name})" in text
        assert b"Software" not in made[name] and b"tIME" not in made[name]
    for name in made:
        if name.endswith(".csv"):
            assert len(pd.read_csv(whole / name, dtype=str)) > 0 and f"({name})" in text
    assert "    protofl compare `x`" in text
    assert "±: sd over 3 seeds, n-1" in text
    assert "Chance level: 10.00 (1 of 10 classes)" in text
    assert "**Differs for** FedNH" in text and "90,056" in text
    assert text.count("| yes |") == 18
    global_models = section(text, "Accuracy of the global model (GM)")
    assert "best (picked on test)" in global_models and "PM" not in global_models
    top = cells(global_models, "FedCSPC")
    assert top[1].startswith("**") and top[2].startswith("**") and not top[3].startswith("**")
    assert "network | exemplar | fused" in section(text, "Other readings of the global model")
    # the numbers of the page are those of the file by run
    by_run = pd.read_csv(whole / "data" / "runs.csv")
    mine = by_run[(by_run.label == "FedProx") & (by_run.metric == "gm") & (by_run.rule == "last")]["value"]
    assert cells(global_models, "FedProx")[1] == f"{100 * mine.mean():.2f} ± {100 * mine.std(ddof=1):.2f}"


def test_same_bytes_twice(whole: Path) -> None:
    again = whole.with_name("again")
    report(runs([whole.with_name("study")]), again, title="A study", command="protofl compare `x`")
    assert files(again) == files(whole)


def test_every_form_agrees_with_the_records(whole: Path) -> None:
    """Tables, the data of figures and the page, against numbers made from the raw rows without the report's code."""
    runs_of: dict[str, list[list[dict[str, Any]]]] = {}
    for log in sorted((whole.parent / "study").glob("*/rounds.jsonl")):
        name = json.loads(log.with_name("protocol.json").read_text())["name"]
        runs_of.setdefault(name, []).append([json.loads(line) for line in log.read_text().splitlines()])
    page, (gm,) = (
        (whole / "index.html").read_text(),
        [pd.read_csv(whole / "tables" / "accuracy.csv").set_index("method")],
    )
    drawn = {n: pd.read_csv(whole / "figures" / f"{n}.csv").set_index("label") for n in ("curves", "loss", "budget")}
    assert len(runs_of) == 6 and all(len(each) == 3 for each in runs_of.values())
    for name, each in runs_of.items():
        played = [[r for r in rows if r["round"] >= 0] for rows in each]
        ends = {
            "last round (headline)": [rows[-1]["gm"] for rows in played],
            "mean of last 5 evaluated rounds": [sum(r["gm"] for r in rows[-5:]) / 5 for rows in played],
            "best (picked on test)": [max(r["gm"] for r in rows) for rows in played],
        }
        for head, values in ends.items():
            shown = f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"
            assert gm.loc[name, head] == shown and shown in page
        for t in range(12):
            for figure, field in (("curves", "gm"), ("loss", "loss")):
                mine = drawn[figure].loc[name]
                point = mine[(mine["round"] == t) & (mine["metric"] == field)].iloc[0]
                values = [rows[t][field] for rows in played]
                assert (point["mean"], point["low"], point["high"]) == pytest.approx(
                    (statistics.mean(values), min(values), max(values)), rel=1e-12
                )
            spent = [
                sum(r[f"bytes_{way}"] for r in rows if r["round"] <= t for way in ("down", "up", "once")) / 1e6
                for rows in each
            ]
            point = drawn["budget"].loc[name]
            point = point[(point["round"] == t) & (point["metric"] == "gm")].iloc[0]
            assert point["mb"] == pytest.approx(statistics.mean(spent), rel=1e-12)


def test_mixed_states(write: Write, line: Any, tmp_path: Path, sketched: None) -> None:
    write("fedavg", 0, [0.3] * 6)
    write("fedprox", 0, [0] * 6, rows=[line(0, 0.3, [0]), line(1, None, [0], diverged=True)], status="diverged")
    write("moon", 0, [0] * 6, rows=[line(0, 0.3, [0])], status="running", tail='{"round"')
    write("fednh", 0, [0] * 6, rows=[], status="failed", summary={"error": "out of memory"})
    broken = write("fedproc", 0, [0.3] * 6)
    (broken / "protocol.json").write_text("{")
    text = markdown(report(broken.parent, tmp_path / "out", title="t"))
    table = section(text, "Accuracy of the global model (GM)")
    assert cells(table, "FedProx")[1:] == [
        "diverged",
        "diverged",
        "diverged",
        "-",
        "0",
        "diverged at round 1",
    ]
    assert cells(table, "MOON")[-1] == "unfinished (1 of 6 rounds)"
    assert cells(table, "FedNH")[1:4] == ["-", "-", "-"]
    assert "**" not in "".join(cells(table, "FedAvg"))
    assert "protocol.json is not whole JSON" in text and "failed: out of memory" in text
    assert "5 run folders, 3 left out of the numbers" in text
    assert "*Figure" not in text


def test_nothing_readable(write: Write, tmp_path: Path) -> None:
    folder = write()
    (folder / "protocol.json").unlink()
    assert "No run could be read" in markdown(report(folder, tmp_path / "out", title="t"))


def test_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs"):
        report(tmp_path, tmp_path / "out", title="t")
    with pytest.raises(UserError, match="no runs"):
        report([], tmp_path / "out", title="t")


def test_one_round_one_seed(write: Write, tmp_path: Path) -> None:
    text = markdown(report(write("fedavg", 0, (0.5,)), tmp_path / "out", title="t"))
    shown = cells(section(text, "Accuracy of the global model (GM)"), "FedAvg")
    assert shown == ["FedAvg", "50.00", "50.00", "50.00", "0", "1", "finished"]
    assert "One seed, hence no ±" in text and "Fewer than five evaluated rounds: FedAvg (1)" in text


def test_odd_names(write: Write, tmp_path: Path) -> None:
    write("_odd", 0, (0.2, 0.3), name="a<b>|c`d`\n$e$ [x](y) _z_", options={"k|": "<v>"})
    names = {
        "data": {"classes": ["<a|b>", "$c", "_d"], "fingerprint": "f"},
        "partition": {"counts": [[1, 0, 2]]},
    }
    folder = write("_odd", 0, (0.2, 0.3), protocol={"dataset": "x|y\n# z"}, document=names)
    text = markdown(report(folder.parent, tmp_path / "out", title="# t|\n<script>"))
    assert text.startswith("# \\# t\\| &lt;script&gt;\n")
    assert "<script>" not in text and "<b>" not in text and "left out" not in text
    lines = [part for part in text.splitlines() if part.startswith("| a&lt;b&gt;")]
    assert lines and all("a&lt;b&gt;\\|c\\`d\\` \\$e\\$ \\[x\\](y) \\_z\\_" in part for part in lines)


def test_escape() -> None:
    assert escape("a|b\r\n`c` <d> & \x00e") == "a\\|b \\`c\\` &lt;d&gt; &amp; e"


def test_several_settings_have_their_own_pictures(write: Write, tmp_path: Path, sketched: None) -> None:
    for beta in (0.1, 0.5):
        folder = write("fedavg", 0, protocol={"beta": beta})
    text = markdown(report(folder.parent, tmp_path / "out", title="t"))
    assert "## Setting 1: beta=0.1" in text and "## Setting 2: beta=0.5" in text
    assert {f"figures/{n}-{i}.png" for n in ("curves", "split") for i in (1, 2)} <= set(files(tmp_path / "out"))


def test_personal_only(write: Write, line: Any, tmp_path: Path, sketched: None) -> None:
    pm = {"pm_v": 0.8, "pm_l": 0.9, "pm_uniform": 0.4, "pm_v_std": 0.1, "pm_v_worst10": 0.5}
    rows = [line(0, None, [0, 1], gm_scores={}, pm_clients=9, pm_skipped=1, **pm)]
    folder = write("fedproto", 0, (None,), rows=rows)
    write("fedavg", 0, (0.5,), rows=[line(0, 0.5, [0, 1])])
    text = markdown(report(folder.parent, tmp_path / "out", title="t"))
    assert cells(section(text, "Accuracy of the global model (GM)"), "FedProto")[1:4] == ["not defined"] * 3
    personal = section(text, "Accuracy of the personalised models (PM)")
    shown = cells(personal, "FedProto")
    assert shown[1:] == ["80.00", "90.00", "40.00", "10.00", "50.00", "all", "9 (1 skipped)", "1", "finished"]
    assert "FedAvg" not in personal and "not defined" in text


def test_where_data_lay_is_not_told(write: Write, tmp_path: Path, sketched: None) -> None:
    page = report(write(document={"data": {"source": "/data/of/somebody/x.npz"}}), tmp_path / "out", title="t")
    assert "source x.npz" in markdown(page) and "somebody" not in page.read_text() + markdown(page)


def test_unlike_partners_are_named(write: Write, tmp_path: Path, line: Any, sketched: None) -> None:
    write("fedavg", 0, (0.5,), rows=[line(0, 0.5, [0, 1])])
    folder = write("fedprox", 0, (0.5,), rows=[line(0, 0.5, [0, 2])])
    text = markdown(report(folder.parent, tmp_path / "out", title="t"))
    assert "**not the same for all methods of a seed: drawn clients**" in text


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 12, 31, 100])
def test_tsne_with_few_points(n: int) -> None:
    points = np.random.RandomState(0).normal(size=(n, 8))
    plane, how = geometry.embed(points)
    assert plane.shape == (n, 2) and np.isfinite(plane).all()
    assert how == ("PCA" if n < 6 else "t-SNE")


def test_tsne_of_equal_points() -> None:
    plane, how = geometry.embed(np.ones((20, 4)))
    assert how == "PCA" and (plane == 0).all()
    assert geometry.embed(np.arange(10.0)[:, None])[1] == "PCA"


def test_prototypes_not_finite(write: Write, prototypes: Callable[..., None], tmp_path: Path, sketched: None) -> None:
    prototypes(write("fedproc", 0), 1)
    bad = write("fednh", 0)
    (bad / "prototypes").mkdir()
    np.savez(bad / "prototypes" / "round-00001.npz", values=np.array([[np.nan, 0], [1, 2]]), has=[True, True])
    text = markdown(report(bad.parent, tmp_path / "out", title="t"))
    assert "FedNH: prototypes not finite or too large, picture left out" in text
    assert "](figures/prototypes.png)" in text


def test_absent_classes_are_not_drawn(write: Write, tmp_path: Path) -> None:
    folder = write("fedproc", 0)
    (folder / "prototypes").mkdir()
    values = np.array([[1.0, 2.0], [np.nan, np.nan], [3.0, 5.0]])
    np.savez(folder / "prototypes" / "round-00001.npz", values=values, has=[True, False, True])
    tidy, notes = geometry.prototypes(groups.settings(runs([folder])))
    assert tidy["class_id"].tolist() == [0, 2] and not notes


def test_labels_do_not_overlap() -> None:
    placed = spread([0.5, 0.5, 0.52, 0.9, 1.0, 0.0], 0.1, 0.0, 1.0)
    order = np.sort(placed)
    assert (np.diff(order) >= 0.1 - 1e-12).all() and order[0] >= 0 and order[-1] <= 1
    assert spread([0.2, 0.8], 0.1, 0.0, 1.0) == [0.2, 0.8]


def test_colours_are_fixed() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert colour("fednh") == "#0072b2"
    assert colour("mine") == colour("mine")


def test_a_picture_that_fails_does_not_end_the_report(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protofl.report import figures

    def fail(*given: Any) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(figures, "draw_split", fail)
    text = markdown(report(write(), tmp_path / "out", title="t"))
    assert "*Figure split left out: RuntimeError: no fonts*" in text


def test_no_torch_and_no_matplotlib_on_import() -> None:
    code = "import sys, protofl.report; bad = {'torch', 'matplotlib', 'sklearn'} & set(sys.modules);assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_formats_of_figures(write: Write, tmp_path: Path) -> None:
    """What is not written is not linked, in neither form of the report; a page without SVG shows the PNG."""
    page = report(write("fedavg", 0), tmp_path / "out", title="t", formats=("pdf",))
    kinds = {path.suffix for path in (tmp_path / "out" / "figures").iterdir()}
    assert kinds == {".png", ".pdf", ".csv"}
    for text in (markdown(page), page.read_text()):
        assert "figures/curves.pdf" in text and "figures/curves.svg" not in text
    assert "data:image/png;base64" in page.read_text() and "data:image/svg" not in page.read_text()


def test_few_colours_are_enough(tmp_path: Path) -> None:
    """A PNG of 256 colours shows what matplotlib drew."""
    from PIL import Image

    from protofl.report import figures

    with figures.one_style():
        figure, (ax,) = figures.blank(3, 2)
        ax.plot([0, 1, 3], [2, 1, 2.5], color="#d55e00", label="a line")
        ax.legend()
        plain, small = tmp_path / "plain.png", tmp_path / "small" / "x.png"
        figures.save(figure, small)
        figure.savefig(plain, bbox_inches=figure.get_tightbbox().padded(0.12))
    a, b = (np.asarray(Image.open(path).convert("RGB")).astype(int) for path in (plain, small))
    assert a.shape == b.shape and np.abs(a - b).mean() < 0.5 and np.abs(a - b).max() < 40
    assert (b[0, 0] == 255).all() and small.stat().st_size < 0.6 * plain.stat().st_size


@pytest.mark.slow
def test_without_a_display(write: Write, tmp_path: Path) -> None:
    folder = write("fedavg", 0)
    env = {**os.environ, "MPLBACKEND": "TkAgg", "HOME": str(tmp_path / "nowhere"), "DISPLAY": "localhost:64.0"}
    code = (
        "import sys; from pathlib import Path; from protofl.report import report;"
        "page = report(sys.argv[1], Path(sys.argv[2]), title='t');"
        "assert 'left out' not in page.read_text();"
        "assert not {'torch', 'matplotlib.pyplot', 'tkinter'} & set(sys.modules)"
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code, str(folder), str(tmp_path / "out")]
    subprocess.run(command, check=True, env=env)
    assert (tmp_path / "out" / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_of_its_own_is_told(write: Write, tmp_path: Path, line: Any, sketched: None) -> None:
    """A method that plays fewer rounds with other clients is whole, and no unlike partner."""
    write("fedavg", 0, (0.5, 0.6), rows=[line(0, 0.5, [0, 1]), line(1, 0.6, [1, 2])])
    rows = [line(0, None, [0, 1, 2], gm_scores={}, pm_v=0.5, pm_clients=3, pm_skipped=0)]
    own = {"adapted": {"rounds": 1, "participation": 1.0, "pm_clients": "all"}}
    folder = write("solo", 0, (None, None), rows=rows, document=own)
    text = markdown(report(folder.parent, tmp_path / "out", title="t"))
    assert "* **Of its own**: solo: rounds = 1, participation = 1, pm\\_clients = all" in text
    assert "not the same for all" not in text and "(2 clients per round)" in text
    personal = cells(section(text, "Accuracy of the personalised models (PM)"), "solo")
    assert personal[1] == "50.00" and personal[6:8] == ["all", "3"] and personal[-1] == "finished"


@pytest.mark.parametrize("high", [50.0, 5000.0])
def test_log_axes_have_plain_labels(high: float) -> None:
    """Text is never read as mathematics in these figures, so that no label may be written as such."""
    from protofl.report import figures

    rows = [("FedAvg", "fedavg", 0, "loss", t, 1, v, v, v, "finished") for t, v in enumerate((1.0, high))]
    columns = ["label", "method", "variant", "metric", "round", "n", "mean", "low", "high", "fate"]
    with figures.one_style():
        figure = figures.draw_loss(pd.DataFrame(rows, columns=columns))
        figure.draw_without_rendering()
        axis = figure.axes[0].yaxis
        labels = [t.get_text() for t in [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)]]
    assert axis.get_scale() == "log" and "10" in labels and not [text for text in labels if "$" in text]
