"""The geometry of prototypes: numbers by hand and from the files, choices of rounds, classes and clients, pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl.report import geometry, groups, markdown, measures, pictures, runs, space
from protofl.report.content import Report
from protofl.report.read import Prototypes, read
from protofl.report.superclasses import SUPERCLASSES, by_superclass

Write = Callable[..., Path]


def of(
    round: int = 0, values: Any = (), own: Any = (), labels: Any = (), ids: Any = None, has: Any = None
) -> Prototypes:
    """Prototypes in the plane."""
    values, own = np.array(values, float).reshape(-1, 2), np.array(own, float).reshape(-1, 2)
    has = np.ones(len(values), bool) if has is None else np.array(has)
    ids = np.arange(len(own)) if ids is None else np.array(ids)
    return Prototypes(round, values, has, own, np.array(labels, int), ids)


def store(folder: Path, t: int, **arrays: Any) -> None:
    (folder / "prototypes").mkdir(exist_ok=True)
    np.savez(folder / "prototypes" / f"round-{t:05d}.npz", **arrays)


def settings(*folders: Path) -> list[groups.Setting]:
    return groups.settings(runs(list(folders)))


def section(out: Path, *folders: Path) -> str:
    """The section of the report in Markdown, its figures stored below `out`."""
    out.mkdir()
    made = Report(runs(list(folders)), out)
    return markdown.write([block for s in made.settings for block in pictures.prototypes(made, s)])


# ---- numbers by hand --------------------------------------------------------------------------------------


def test_nearest() -> None:
    """Of (0, 0), (3, 4), (3, 5) the last two are 1 apart; without (3, 5) it is 5."""
    values = [[0, 0], [3, 4], [3, 5]]
    assert measures.nearest(of(values=values)) == 1
    assert measures.nearest(of(values=values, has=[True, True, False])) == 5
    assert measures.nearest(of(values=values, has=[True, False, False])) is None
    assert measures.nearest(of()) is None


def test_within() -> None:
    """Class 0: -1 and 1, squares 1, 1; class 1: 0, 0, 6, squares 4, 4, 16; class 2: one alone, left out. 26 / 5."""
    own = [[-1, 0], [1, 0], [0, 0], [0, 0], [6, 0], [99, 0]]
    assert measures.within(of(own=own, labels=[0, 0, 1, 1, 1, 2])) == pytest.approx(26 / 5)
    assert measures.within(of(own=own, labels=range(6))) is None
    assert measures.within(of()) is None
    assert measures.within(of(own=[[1, 1], [1, 1]], labels=[0, 0])) == 0, "equal points do have a scatter"


def test_between() -> None:
    """Means of the classes (1, 0), (4, 0), (7, 0), their mean (4, 0): (9 + 0 + 9) / 3; sizes of classes do not count."""
    own = [[0, 0], [2, 0], [4, 0], [7, 1], [7, -1]]
    assert measures.between(of(own=own, labels=[0, 0, 1, 5, 5])) == pytest.approx(6)
    assert measures.between(of(own=own, labels=[3] * 5)) is None
    assert measures.between(of()) is None


def test_agreement() -> None:
    """Class 0: clients at 0, 90 and 0 degrees: cosines 0, 1, 0, mean 1 / 3; class 1: 180 degrees: -1; class 2: one alone.

    Client 0 has two prototypes of class 0, whose mean (1, 0) counts.
    """
    own = [[1, 3], [1, -3], [0, 2], [5, 0], [1, 1], [-2, -2], [7, 7]]
    labels, ids = [0, 0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 0, 1, 0]
    assert measures.agreement(of(own=own, labels=labels, ids=ids)) == pytest.approx((1 / 3 - 1) / 2)
    assert measures.agreement(of(own=own[:2], labels=[0, 0], ids=[4, 4])) is None, "one client"
    assert measures.agreement(of(own=own[:2], labels=[0, 0], ids=[-1, -1])) is None, "clients without a number"
    assert measures.agreement(of(own=[[0, 0], [1, 0]], labels=[0, 0])) is None, "no direction"
    assert measures.agreement(of()) is None


def test_drift() -> None:
    """Class 0 moves by 5, class 1 by 1, class 2 appears: 3 in 2 rounds."""
    before = of(4, [[0, 0], [1, 1], [0, 0]], has=[True, True, False])
    after = of(6, [[3, 4], [1, 2], [9, 9]])
    assert measures.drift(before, after) == 1.5
    assert measures.drift(before, of(6, [[0, 0], [0, 0], [1, 1]], has=[False, False, True])) is None
    assert measures.drift(of(4), of(6)) is None
    assert measures.drift(before, before) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_no_number_from_what_is_not_finite(bad: float) -> None:
    stored = of(1, [[bad, 0], [1, 2]], [[bad, 0], [1, 2]], [0, 0])
    assert all(measure(stored) is None for measure in measures.ROUND.values())
    assert measures.drift(of(0, [[0, 0], [1, 2]]), stored) is None


def test_numbers_from_the_files(study: Path) -> None:
    """Recomputed pair by pair with plain Python."""
    folder = next(p for p in sorted(study.iterdir()) if (p / "prototypes").exists())
    with np.load(next((folder / "prototypes").iterdir())) as raw:
        values, own = raw["values"].tolist(), raw["client_values"].tolist()
        labels, ids = raw["client_labels"].tolist(), raw["client_ids"].tolist()
    stored, _ = read(folder).prototypes()
    assert stored is not None
    assert measures.nearest(stored) == pytest.approx(min(math.dist(a, b) for a, b in itertools.combinations(values, 2)))

    def mean(rows: list[list[float]]) -> list[float]:
        return [sum(column) / len(rows) for column in zip(*rows)]

    means = {c: mean([v for v, k in zip(own, labels) if k == c]) for c in set(labels)}
    squares = [math.dist(v, means[c]) ** 2 for v, c in zip(own, labels) if labels.count(c) > 1]
    assert measures.within(stored) == pytest.approx(sum(squares) / len(squares))
    centre = mean(list(means.values()))
    assert measures.between(stored) == pytest.approx(
        sum(math.dist(m, centre) ** 2 for m in means.values()) / len(means)
    )
    by_class = []
    for c in sorted(means):
        mine = [mean([v for v, k, i in zip(own, labels, ids) if (k, i) == (c, one)]) for one in
                sorted({i for k, i in zip(labels, ids) if k == c})]  # fmt: skip
        pairs = [
            sum(x * y for x, y in zip(a, b)) / (math.hypot(*a) * math.hypot(*b))
            for a, b in itertools.combinations(mine, 2)
        ]
        by_class += [sum(pairs) / len(pairs)] if pairs else []
    assert measures.agreement(stored) == pytest.approx(sum(by_class) / len(by_class))


# ---- numbers over rounds ----------------------------------------------------------------------------------


def test_mean_and_range_over_seeds(write: Write) -> None:
    """Nearest distances 1 and 3 of two seeds in round 0; round 1 is stored by one seed alone."""
    folders = [write("fedproc", seed) for seed in (0, 1)]
    for folder, d in zip(folders, (1.0, 3.0)):
        store(folder, 0, values=[[0, 0], [d, 0]], has=[True, True])
    store(folders[0], 1, values=[[0, 0], [2, 0]], has=[True, True])
    tidy = measures.over_rounds(settings(*folders))
    assert tidy["metric"].tolist() == ["nearest"] and tidy["round"].tolist() == [0]
    assert tidy[["n", "mean", "low", "high"]].values.tolist() == [[2, 2, 1, 3]]
    store(folders[1], 1, values=[[0, 0], [7, 0]], has=[True, True])
    tidy = measures.over_rounds(settings(*folders)).set_index(["metric", "round"])
    assert tidy.loc[("nearest", 1), "mean"] == pytest.approx(4.5)
    assert tidy.loc[("drift", 1), ["low", "high"]].tolist() == [0.5, 2]
    assert ("drift", 0) not in tidy.index


def test_drift_counts_the_rounds_between(write: Write) -> None:
    folder = write("fedproc", 0, (0.1, 0.2, 0.3, 0.4, 0.5))
    store(folder, 0, values=[[0, 0]], has=[True])
    store(folder, 4, values=[[8, 0]], has=[True])
    tidy = measures.over_rounds(settings(folder))
    assert tidy[["metric", "round", "mean"]].values.tolist() == [["drift", 4, 2]]


def test_files_without_a_row_do_not_count(write: Write, line: Any) -> None:
    """Killed after the prototypes of round 2 were written, before its row; the other seed only came to round 0."""
    first = write("fedproc", 0, (0.1,) * 3, rows=[line(t, 0.1, [0]) for t in (0, 1)], status="running")
    second = write("fedproc", 1, (0.1,) * 3, rows=[line(0, 0.1, [0])], status="running")
    for folder in (first, second):
        for t in range(3):
            store(folder, t, values=[[0, 0], [1 + t, 0]], has=[True, True])
    tidy = measures.over_rounds(settings(first, second))
    assert tidy["round"].tolist() == [0] and set(tidy["fate"]) == {"unfinished"}


def test_nothing_stored(write: Write) -> None:
    made = settings(write())
    assert measures.over_rounds(made).empty and list(measures.over_rounds(made)) == measures.CURVES
    assert geometry.similarity(made).empty
    assert geometry.representations(made)[0].empty
    assert geometry.prototypes(made)[0].empty


# ---- planes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "some", "wanted"),
    [
        (3, [0, 1, 2, 3, 4], [0, 2, 4]),
        (3, [0, 1, 2, 3], [0, 1, 3]),
        (3, [0, 1], [0, 1]),
        (3, [7], [7]),
        (2, [0, 1, 2], [0, 2]),
        (1, [0, 1, 2], [2]),
        (1, [], []),
    ],
)
def test_first_middle_last(n: int, some: list[int], wanted: list[int]) -> None:
    assert geometry.spaced(some, n) == wanted


@pytest.mark.parametrize(("methods", "rounds"), [(4, [0, 2, 4]), (5, [0, 4]), (7, [4])])
def test_fewer_rounds_where_there_are_many_methods(write: Write, methods: int, rounds: list[int]) -> None:
    folders = [write(f"m{i}", 0, (0.1,) * 5) for i in range(methods)]
    for folder in folders:
        for t in range(5):
            store(folder, t, values=[[0, 0], [1 + t, 0], [0, 1]], has=[True] * 3)
    tidy, notes = geometry.prototypes(settings(*folders))
    assert not notes and all(mine["round"].unique().tolist() == rounds for _, mine in tidy.groupby("label"))


def test_damaged_rounds_are_passed_over(write: Write, tmp_path: Path) -> None:
    folder = write("fedproc", 0, (0.1,) * 3)
    store(folder, 0, values=[[0, 0], [1, 0]], has=[True, True])
    store(folder, 1, values=np.zeros((2, 3)), has=[True])
    (folder / "prototypes" / "round-00002.npz").write_bytes(b"PK rubbish")
    with open(folder / "prototypes" / "round-00003.npz", "wb") as file:
        np.save(file, np.zeros(3))
    (folder / "prototypes" / "round-00004.npz").mkdir()
    text = section(tmp_path / "out", folder)
    for t in (1, 2, 3, 4):
        assert text.count(f"*FedProc, seed 0: prototypes/round-0000{t}.npz cannot be read.*") == 1
    assert "](figures/prototypes.png)" in text and "left out:" not in text


def test_next_seed_where_the_first_cannot_be_read(write: Write) -> None:
    folders = [write("fedproc", seed) for seed in (0, 1)]
    (folders[0] / "prototypes").mkdir()
    (folders[0] / "prototypes" / "round-00000.npz").write_bytes(b"")
    store(folders[1], 0, values=[[0, 0], [1, 0]], has=[True, True])
    tidy, notes = geometry.prototypes(settings(*folders))
    assert set(tidy["seed"]) == {1} and notes == ["FedProc, seed 0: prototypes/round-00000.npz cannot be read"]


def test_thinning_is_told_once(write: Write) -> None:
    folder = write("fedproc", 0)
    own = np.random.RandomState(0).normal(size=(600, 2))
    for t in (0, 1):
        store(folder, t, client_values=own, client_labels=np.arange(600) % 10, client_ids=np.arange(600) % 7)
    tidy, notes = geometry.prototypes(settings(folder))
    assert tidy.groupby("round").size().tolist() == [500, 500]
    assert notes == ["FedProc: 500 of the client prototypes drawn, chosen at random"]


def test_principal() -> None:
    """Points on a cross: half-axes 2 and 1, variances 8 and 2 of 10."""
    plane, shares = geometry.principal(np.array([[2.0, 0, 5], [-2, 0, 5], [0, 1, 5], [0, -1, 5]]))
    assert shares == pytest.approx([0.8, 0.2])
    assert np.abs(plane) == pytest.approx(np.array([[2, 0], [2, 0], [0, 1], [0, 1]]))
    assert plane[np.abs(plane).argmax(0), [0, 1]].min() > 0
    plane, shares = geometry.principal(np.ones((4, 1)))
    assert not plane.any() and not shares.any()


# ---- cosines ----------------------------------------------------------------------------------------------


def test_similarity_by_hand(write: Write) -> None:
    """(2, 0), (1, 1), (-3, 0); class 3 has no prototype, class 4 one of length zero."""
    folder = write("fedproc", 0)
    values = [[2, 0], [1, 1], [-3, 0], [np.nan, np.nan], [0, 0]]
    store(folder, 0, values=np.eye(5, 2), has=[True] * 5)
    store(folder, 1, values=values, has=[True, True, True, False, True])
    tidy = geometry.similarity(settings(folder))
    assert set(tidy["round"]) == {1}
    table = {(c, e): v for c, e, v in zip(tidy["class_id"], tidy["other_id"], tidy["cosine"])}
    h = round(math.sqrt(0.5), 6)
    assert table == {(0, 0): 1, (1, 1): 1, (2, 2): 1, (0, 1): h, (0, 2): -1, (1, 2): -h}


def test_superclasses() -> None:
    names = [name for members in SUPERCLASSES.values() for name in members]
    assert len(SUPERCLASSES) == 20 and len(set(names)) == 100
    assert all(len(members) == 5 for members in SUPERCLASSES.values())
    order = by_superclass(sorted(names))
    assert list(order) == list(SUPERCLASSES)
    assert [sorted(names)[c] for c in order["trees"]] == list(SUPERCLASSES["trees"])
    assert sorted(c for members in order.values() for c in members) == list(range(100))
    assert by_superclass([n.replace("_", " ").title() for n in names]) == by_superclass(names)
    assert by_superclass(names[:99]) == by_superclass([*names[:99], "cat"]) == by_superclass([]) == {}


def test_cifar100_in_the_order_of_its_superclasses(write: Write, tmp_path: Path) -> None:
    """Each class's prototype is that of its superclass: the matrix has blocks of five."""
    names = sorted(name for members in SUPERCLASSES.values() for name in members)
    folder = write("fedproc", 0, document={"data": {"classes": names}})
    of_class = {name: i for i, members in enumerate(SUPERCLASSES.values()) for name in members}
    store(folder, 1, values=np.eye(20)[[of_class[name] for name in names]], has=[True] * 100)
    tidy = geometry.similarity(settings(folder))
    with_one = tidy[tidy["cosine"] == 1]
    assert len(with_one) == 20 * 15 and len(tidy) == 5050
    figure = space.draw_similarity(tidy, names)
    image = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_allclose(image, np.kron(np.eye(20), np.ones((5, 5))), atol=1e-6)
    assert "grouped by superclass" in section(tmp_path / "out", folder)


# ---- clients side by side ---------------------------------------------------------------------------------


def test_most_common_classes_and_clients(write: Write) -> None:
    """Classes 3 (three clients), 1 (two), 0 (two) before 2 (two, a higher number) and 4 (one)."""
    folder = write("fednh", 0)
    pairs = [(0, 3), (1, 3), (2, 3), (0, 1), (1, 1), (0, 0), (5, 0), (1, 2), (2, 2), (7, 4), (0, 3)]
    own = np.random.RandomState(0).normal(size=(len(pairs), 4))
    store(folder, 0, client_values=own[:2], client_labels=[4, 4], client_ids=[0, 1])
    store(folder, 1, client_values=own, client_labels=[c for _, c in pairs], client_ids=[i for i, _ in pairs])
    tidy, notes = geometry.representations(settings(folder))
    assert not notes
    assert list(zip(tidy["client"], tidy["class_id"])) == [(0, 0), (0, 1), (0, 3), (1, 1), (1, 3), (2, 3), (5, 0)]
    stored, _ = read(folder).prototypes()
    assert stored is not None
    np.testing.assert_allclose(geometry.client_means(stored)[0, 3], (own[0] + own[-1]) / 2)


def test_most_clients_are_ten(write: Write) -> None:
    folder = write("fednh", 0)
    ids = np.repeat(np.arange(14), 3)
    labels = np.tile(np.arange(3), 14)
    keep = ~((ids == 0) & (labels > 0))
    own = np.random.RandomState(0).normal(size=(42, 4))
    store(folder, 1, client_values=own[keep], client_labels=labels[keep], client_ids=ids[keep])
    tidy, _ = geometry.representations(settings(folder))
    assert sorted(set(tidy["client"])) == list(range(1, 11)), "client 0 has one of the classes alone"


def test_too_few_clients(write: Write) -> None:
    folder = write("fednh", 0)
    store(folder, 1, client_values=[[0, 1], [1, 0]], client_labels=[0, 1], client_ids=[0, 0])
    tidy, notes = geometry.representations(settings(folder))
    assert tidy.empty and notes == ["FedNH: 2 client representation(s) of the chosen classes, too few"]


# ---- in the report ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_of_a_mixed_folder(write: Write, prototypes: Any, line: Any, tmp_path: Path) -> None:
    """Finished with two seeds, running, diverged, one round, clients alone, none; the same bytes twice."""
    folders = [write("fedproc", seed, (0.1,) * 4) for seed in (0, 1)]
    running = write("fednh", 0, (0.1,) * 4, rows=[line(t, 0.1, [0]) for t in (0, 1)], status="running")
    rows = [line(0, 0.1, [0]), {"round": 1, "diverged": True}]
    diverged = write("moon", 0, (0.1,) * 4, rows=rows, status="diverged")
    for folder, rounds in ((folders[0], (0, 1, 3)), (folders[1], (0, 3)), (running, (0, 1)), (diverged, (0,))):
        for t in rounds:
            prototypes(folder, t)
    alone = write("fedproto", 0, (0.1,) * 4)
    store(alone, 3, client_values=np.eye(4), client_labels=[0, 1, 0, 1], client_ids=[0, 0, 1, 1])
    everything = [*folders, running, diverged, alone, write("fedavg", 0, (0.1,) * 4)]
    text = section(tmp_path / "a", *everything)
    assert section(tmp_path / "b", *everything) == text
    assert "left out:" not in text
    for name in ("prototypes", "measures", "similarity", "representations"):
        assert f"](figures/{name}.png)" in text
    for path in sorted((tmp_path / "a" / "figures").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / "figures" / path.name).read_bytes(), path.name
