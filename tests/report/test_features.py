"""Features of stored models: reading, choices, and the numbers in the pictures, by hand and from synthetic files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl.report import Run, features, groups, markdown, pictures, runs
from protofl.report.content import Report
from protofl.report.read import read

Write = Callable[..., Path]


def write_features(
    folder: Path,
    t: int,
    *,
    test: Sequence[str] = ("global", "client-1", "client-4"),
    stages: Sequence[str] = ("global",),
    clients: Sequence[int] = (1, 4),
    tests: int = 120,
    samples: int = 80,
    classes: int = 10,
    d: int = 16,
    encoded: int | None = None,
    noise: float = 1.0,
    **change: Any,
) -> Path:
    """One features/round-NNNNN.npz as the runtime writes it: classes are balls around fixed centres.

    test: models with test features; stages: models with training features besides the client's own; encoded: width of
    the encoder's output, where it differs from z; change: arrays to put in by name (None: to leave out).
    """
    rs = np.random.RandomState(t)
    centres = 4 * np.random.RandomState(7).normal(size=(classes, d))
    made: dict[str, Any] = {"test_index": np.arange(tests), "test_labels": np.arange(tests) % classes}

    def put(part: str, model: str, labels: Any, spread: float) -> None:
        points = centres[labels] + rs.normal(0, 4 * spread, (len(labels), d))
        distances = np.linalg.norm(points[:, None] - centres, axis=2)
        made[f"{part}:{model}"] = points.astype(np.float32)
        made[f"{part}_predicted:{model}"] = distances.argmin(1)
        if encoded:
            made[f"{part}_encoded:{model}"] = np.tile(points, 2)[:, :encoded].astype(np.float32)

    for name in test:
        put("test", name, made["test_labels"], noise * (2 if name.startswith("client") else 1))
    for i in clients:
        labels = rs.randint(0, classes, samples)
        made[f"train_labels:{i}"] = labels
        made[f"train_index:{i}"] = np.arange(samples) + 1000 * i
        for name in (f"client-{i}", *stages):
            put("train", f"{i}:{name}", labels, noise * (1.5 if name == "averaged" else 1))
    made |= change
    (folder / "features").mkdir(exist_ok=True)
    path = folder / "features" / f"round-{t:05d}.npz"
    np.savez(path, **{name: array for name, array in made.items() if array is not None})
    return path


def section(out: Path, *folders: Path) -> str:
    """The section of the report in Markdown, its figures stored below `out`."""
    out.mkdir()
    made = Report(runs(list(folders)), out)
    return markdown.write([block for s in made.settings for block in pictures.prototypes(made, s)])


def setting(*folders: Path) -> groups.Setting:
    return groups.settings(runs(list(folders)))[0]


def shown(*folders: Path) -> tuple[groups.Setting, list[features.Shown]]:
    s = setting(*folders)
    return s, features.shown(s)[0]


def solo(write: Write, line: Any) -> Path:
    """One round of clients that send nothing, beside methods of two rounds."""
    rows = [line(0, None, [1, 4], gm_scores={}, pm_v=0.5, bytes_down=0, bytes_up=0)]
    return write("solo", 0, (None, None), name="SOLO", rows=rows, document={"adapted": {"rounds": 1}})


# ---- files ------------------------------------------------------------------------------------------------


def test_read(write: Write) -> None:
    folder = write("fedcspc")
    write_features(folder, 1, stages=("averaged", "global"), encoded=20)
    write_features(folder, 0)
    (first, last), problems = features.read(read(folder))
    assert not problems and (first.round, last.round) == (0, 1)
    assert list(last.test.stages) == ["global", "client-1", "client-4"]
    assert list(last.train) == [1, 4] and list(last.train[4].stages) == ["client-4", "averaged", "global"]
    stage = last.train[1].stages["averaged"]
    assert stage.z.shape == (80, 16) and stage.z.dtype == np.float64
    assert stage.encoded is not None and stage.encoded.shape == (80, 20)
    assert stage.predicted is not None and stage.predicted.shape == (80,)
    assert stage.of_width(20) is stage.encoded and stage.of_width(16) is stage.z and stage.of_width(3) is None
    assert first.test.stages["global"].encoded is None


def test_no_features(write: Write) -> None:
    assert features.read(read(write())) == ([], [])


@pytest.mark.parametrize(
    "change",
    [
        {"test_labels": None},
        {"test_index": np.arange(3)},
        {"test_labels": np.zeros(120)},
        {"test_labels": np.full(120, -1)},
        {"test:global": np.zeros((7, 16), np.float32)},
        {"test:global": np.zeros(120, np.float32)},
        {"test:global": np.full((120, 16), np.nan, np.float32)},
        {"test:global": np.full((120, 16), 1e30, np.float32)},
        {"test:global": np.zeros((120, 9), np.float32), "train:1:global": np.zeros((80, 8), np.float32)},
        {"test_encoded:global": np.zeros((120, 3), np.int64)},
        {"test_predicted:global": np.zeros((120, 2), np.int64)},
        {"test_predicted:global": np.array([{}] * 120, dtype=object)},
        {"train:1:global": np.zeros((81, 16), np.float32)},
        {"train_labels:4": np.array(["a"] * 80)},
    ],
)
def test_foreign_files_are_passed_over(write: Write, change: dict[str, Any]) -> None:
    folder = write("fedproc")
    write_features(folder, 0)
    write_features(folder, 1, **change)
    found, problems = features.read(read(folder))
    assert [one.round for one in found] == [0] and problems == ["features/round-00001.npz cannot be read"]


@pytest.mark.parametrize("content", [b"", b"PK rubbish", b"\x93NUMPY", "cut", "npy", "folder"])
def test_damaged_files_are_passed_over(write: Write, content: bytes | str) -> None:
    folder = write("fedproc")
    path = write_features(folder, 1)
    if content == "cut":
        path.write_bytes(path.read_bytes()[:3000])
    elif content == "npy":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif content == "folder":
        path.unlink()
        path.mkdir()
    else:
        assert isinstance(content, bytes)
        path.write_bytes(content)
    assert features.read(read(folder)) == ([], ["features/round-00001.npz cannot be read"])


def test_unknown_arrays_are_ignored(write: Write) -> None:
    folder = write("fedproc")
    write_features(folder, 1, extra=np.zeros(3), **{"train:9:global": np.zeros((2, 2)), "test-x": np.zeros(1)})
    (one,), problems = features.read(read(folder))
    assert not problems and list(one.train) == [1, 4]


def test_next_seed_where_the_first_cannot_be_read(write: Write) -> None:
    folders = [write("fedproc", 0), write("fedproc", 1)]
    write_features(folders[0], 1).write_bytes(b"PK")
    write_features(folders[1], 1)
    found, notes = features.shown(setting(*folders))
    assert [x.run.seed for x in found] == [1]
    assert notes == ["FedProc, seed 0: features/round-00001.npz cannot be read"]


# ---- test features of several methods ---------------------------------------------------------------------


def test_clients_alone_come_first(write: Write, line: Any) -> None:
    folders = [write("fedavg"), write("fedproc"), solo(write, line)]
    for folder in folders[:2]:
        write_features(folder, 1)
    write_features(folders[2], 0, test=("client-4", "client-1"), stages=())
    tidy, notes = features.methods(*shown(*folders))
    assert not notes
    panels = tidy[["label", "model", "round"]].drop_duplicates().values.tolist()
    assert panels == [
        ["SOLO", "client-1", 0],
        ["SOLO", "client-4", 0],
        ["FedAvg", "global", 1],
        ["FedProc", "global", 1],
    ]
    assert len(tidy) == 4 * 120 and set(tidy["projection"]) == {"t-SNE"}


def test_clients_after_training_where_none_is_alone(write: Write, line: Any) -> None:
    """FedProto has no global model, but its clients exchange prototypes: they are not alone."""
    folders = [
        write("fedproto", 0, (None, None), rows=[line(t, None, [1], gm_scores={}, pm_v=0.5) for t in (0, 1)]),
        write("fedavg"),
    ]
    write_features(folders[0], 0, test=("client-1",), stages=())
    write_features(folders[1], 1)
    s, found = shown(*folders)
    assert [x.alone for x in found] == [False, False]
    tidy, _ = features.methods(s, found)
    panels = tidy[["label", "model"]].drop_duplicates().values.tolist()
    assert panels == [["FedAvg", "client-1"], ["FedAvg", "client-4"], ["FedProto", "client-1"], ["FedAvg", "global"]]


def test_right_is_recomputed(write: Write) -> None:
    folder = write("fedproc")
    path = write_features(folder, 1, noise=3.0)
    tidy, _ = features.methods(*shown(folder))
    with np.load(path) as raw:
        for name in ("global", "client-1"):
            wanted = (raw[f"test_predicted:{name}"] == raw["test_labels"]).mean()
            assert tidy[tidy["model"] == name]["right"].astype(float).mean() == pytest.approx(wanted)


def test_predictions_may_be_absent(write: Write, tmp_path: Path) -> None:
    folder = write("fedproc")
    write_features(folder, 1, test=("global",), **{"test_predicted:global": None})
    tidy, _ = features.methods(*shown(folder))
    assert tidy["right"].isna().all()
    assert "](figures/features.png)" in section(tmp_path / "out", folder)
    assert "% right" not in (tmp_path / "out" / "figures" / "features.svg").read_text()


def test_points_are_thinned_alike(write: Write) -> None:
    folders = [write("fedavg"), write("fedproc")]
    for folder in folders:
        write_features(folder, 1, test=("global",), tests=700, clients=())
    tidy, _ = features.methods(*shown(*folders))
    assert tidy.groupby("label").size().tolist() == [500, 500]
    first, second = (mine["class_id"].tolist() for _, mine in tidy.groupby("label"))
    assert first == second


def test_other_images_and_no_room(write: Write) -> None:
    folders = [write(f"m{i:02d}") for i in range(12)]
    for i, folder in enumerate(folders):
        index = {"test_index": np.arange(30) + 1} if i == 3 else {}
        write_features(folder, 1, test=("global",), tests=30, clients=(), **index)
    tidy, notes = features.methods(*shown(*folders))
    assert tidy["label"].nunique() == features.PANELS
    assert notes == ["m03: other test images, features left out", "m11: no room for the features of global"]


@pytest.mark.parametrize("tests", [0, 1, 2, 5])
def test_few_images(write: Write, tests: int) -> None:
    folder = write("fedproc")
    write_features(folder, 1, test=("global",), tests=tests, clients=())
    tidy, notes = features.methods(*shown(folder))
    assert len(tidy) == (tests if tests > 1 else 0)
    assert notes == ([] if tests > 1 else [f"FedProc: {tests} test image(s), too few for a picture"])


# ---- one class of one client ------------------------------------------------------------------------------


def prototypes_of(folder: Path, t: int, values: Any, labels: Any, ids: Any) -> None:
    (folder / "prototypes").mkdir(exist_ok=True)
    path = folder / "prototypes" / f"round-{t:05d}.npz"
    np.savez(path, client_values=np.array(values, np.float32), client_labels=labels, client_ids=ids)


def test_one_class_by_hand(write: Write) -> None:
    """Client 4 has two prototypes of class 0 at (0, 0) and (4, 0); its features there lie at 0, 1, 4 and 5.

    Mean (2.5, 0): distances 2.5, 1.5, 1.5, 2.5; to the nearest prototype: 0, 1, 0, 1. Client 1 has two of class 2, but
    fewer samples; client 4 has most samples of class 1, but one prototype.
    """
    folder = write("fedcspc")
    z = np.array([[0, 0], [1, 0], [4, 0], [5, 0], [9, 9], [9, 8], [9, 7], [9, 6], [9, 5]], np.float32)
    write_features(
        folder, 1, d=2, samples=9,
        **{
            "train_labels:4": np.array([0, 0, 0, 0, 1, 1, 1, 1, 1]),
            "train:4:client-4": z,
            "train_labels:1": np.array([2, 2, 2, 3, 3, 3, 3, 3, 3]),
        },
    )  # fmt: skip
    values = [[0, 0], [4, 0], [9, 7], [1, 1], [2, 2], [7, 7]]
    prototypes_of(folder, 1, values, [0, 0, 1, 2, 2, 0], [4, 4, 4, 1, 1, 3])
    tidy = features.one_class(*shown(folder))
    assert tidy["kind"].tolist() == ["feature"] * 4 + ["mean"] + ["prototype"] * 2
    assert set(tidy["client"]) == {4} and set(tidy["class_id"]) == {0} and set(tidy["round"]) == {1}
    points = tidy[tidy["kind"] == "feature"]
    assert points["to_mean"].tolist() == [2.5, 1.5, 1.5, 2.5]
    assert points["to_nearest"].tolist() == [0, 1, 0, 1]


def test_prototypes_are_matched_by_width(write: Write) -> None:
    folder = write("fedcspc")
    path = write_features(folder, 1, encoded=20)
    prototypes_of(folder, 1, np.ones((2, 20)), [3, 3], [1, 1])
    tidy = features.one_class(*shown(folder))
    with np.load(path) as raw:
        mine = raw["train_encoded:1:client-1"][raw["train_labels:1"] == 3].astype(float)
    wanted = np.linalg.norm(mine - mine.mean(0), axis=1)
    np.testing.assert_allclose(tidy.loc[tidy["kind"] == "feature", "to_mean"].astype(float), wanted, rtol=1e-6)
    prototypes_of(folder, 1, np.ones((2, 5)), [3, 3], [1, 1])
    assert features.one_class(*shown(folder)).empty


def test_no_class_with_several_prototypes(write: Write, prototypes: Callable[..., None]) -> None:
    folder = write("fedproc")
    write_features(folder, 1)
    prototypes_of(folder, 1, np.ones((3, 16)), [3, 3, 4], [1, 4, 1])
    assert features.one_class(*shown(folder)).empty
    prototypes_of(folder, 0, np.ones((2, 16)), [3, 3], [1, 1])
    assert features.one_class(*shown(folder)).empty, "prototypes and features of different rounds"


# ---- before and after the server's step -------------------------------------------------------------------


def predictions(labels: Sequence[int], told: Sequence[int], client: int, stage: str) -> dict[str, Any]:
    return {f"train_labels:{client}": np.array(labels), f"train_predicted:{client}:{stage}": np.array(told)}


def test_most_confused_pair_by_hand(write: Write) -> None:
    """Of both clients: 2 and 5 confused three times (2 for 5 twice, 5 for 2 once), 0 and 1 twice; 9 is no one's class."""
    folder = write("fedcspc")
    labels = [2, 2, 5, 0, 0, 3, 3, 3, 3, 1]
    first = predictions(labels, [5, 5, 5, 1, 1, 9, 9, 9, 9, 1], 1, "averaged")
    second = predictions(labels, [2, 2, 2, 0, 0, 3, 3, 3, 3, 1], 4, "averaged")
    write_features(folder, 0, stages=("averaged", "global"), samples=10, **first, **second)
    write_features(folder, 1, stages=("averaged", "global"), samples=10)
    tidy, notes = features.confusable(*shown(folder))
    assert not notes and set(tidy["class_id"]) == {2, 5}
    panels = tidy[["round", "model"]].drop_duplicates().values.tolist()
    assert panels == [[0, "averaged"], [0, "global"], [1, "averaged"], [1, "global"]]
    before = tidy[(tidy["round"] == 0) & (tidy["model"] == "averaged")]
    assert before["client"].tolist() == [1, 1, 1, 4, 4, 4]
    assert before["right"].tolist() == [False, False, True, True, True, False]


def test_before_and_after_are_the_networks_own_words(write: Write) -> None:
    """A method's scores may be others than its network's: they cannot be set beside the network before the step."""
    folder = write("fedcspc")
    labels = [2, 2, 5, 5]
    told = predictions(labels, [5, 2, 5, 5], 1, "averaged") | predictions(labels, labels, 1, "global")
    told |= {"train_network_predicted:1:global": np.array([5, 5, 5, 5])}
    told |= {"test_network_predicted:global": np.zeros(120, np.int64)}
    write_features(folder, 0, stages=("averaged", "global"), clients=(1,), samples=4, **told)
    setting, found = shown(folder)
    tidy, _ = features.confusable(setting, found)
    assert tidy[tidy["model"] == "averaged"]["right"].tolist() == [False, True, True, True]
    assert tidy[tidy["model"] == "global"]["right"].tolist() == [False, False, True, True]
    tests, _ = features.methods(setting, found)
    own = found[0].last.test
    shares = tests[tests["model"] == "global"]["right"].mean(), (own.stages["global"].predicted == own.labels).mean()
    assert shares[0] == shares[1]


def test_ties_go_to_the_lower_classes(write: Write) -> None:
    folder = write("fedcspc")
    told = predictions([7, 8, 0, 4, 1], [8, 8, 4, 4, 1], 1, "averaged")
    write_features(folder, 0, stages=("averaged", "global"), clients=(1,), samples=5, **told)
    tidy, _ = features.confusable(*shown(folder))
    assert set(tidy["class_id"]) == {0, 4} and tidy["round"].unique().tolist() == [0]
    assert set(tidy["projection"]) == {"PCA"}, "two points of each panel"


def test_nothing_confused(write: Write) -> None:
    folder = write("fedcspc")
    write_features(folder, 0, stages=("averaged", "global"), noise=0.01)
    tidy, notes = features.confusable(*shown(folder))
    assert tidy.empty
    assert notes == ["FedCSPC: no two classes of the pictured clients were confused, picture left out"]


def test_methods_without_a_stage_before(write: Write) -> None:
    folder = write("fedavg")
    write_features(folder, 0)
    tidy, notes = features.confusable(*shown(folder))
    assert tidy.empty and not notes


# ---- in the report ----------------------------------------------------------------------------------------


def full(write: Write, line: Any) -> list[Path]:
    """Methods of all kinds in one setting."""
    folders = [
        write("fedavg"),
        write("fedproc", status="unfinished"),
        write("fedcspc"),
        solo(write, line),
        write("fednh", rows=[line(0, 0.3, [1]), {"round": 1, "diverged": True}], status="diverged"),
    ]
    for folder in (folders[0], folders[1], folders[4]):
        write_features(folder, 0, noise=2, tests=40, samples=40)
    for t in (0, 1):
        write_features(folders[2], t, stages=("averaged", "global"), encoded=20, noise=1.6, tests=40, samples=60)
    labels, ids = [3, 3, 3, 4], [1, 1, 1, 1]
    prototypes_of(folders[2], 1, np.random.RandomState(0).normal(0, 4, (4, 20)), labels, ids)
    write_features(folders[3], 0, test=("client-1", "client-4"), stages=(), noise=1.5, tests=40, samples=40)
    return folders


def test_report_with_features(write: Write, line: Any, tmp_path: Path) -> None:
    folders = full(write, line)
    (folders[0] / "features" / "round-00001.npz").write_bytes(b"PK rubbish")
    text = section(tmp_path / "a", *folders)
    for name in ("features", "one_class", "confusable"):
        assert f"](figures/{name}.png)" in text
        assert (tmp_path / "a" / "figures" / f"{name}.csv").exists()
    assert "left out:" not in text
    assert "*FedAvg, seed 0: features/round-00001.npz cannot be read.*" in text
    assert section(tmp_path / "b", *folders) == text, "the same bytes twice"
    for path in sorted((tmp_path / "a" / "figures").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / "figures" / path.name).read_bytes(), path.name


def test_names_of_the_record_are_escaped(write: Write, tmp_path: Path) -> None:
    folder = write("fedcspc", name="{0} *x* <b>")
    write_features(folder, 0, stages=("$a_b$", "global"), noise=1.6)
    text = section(tmp_path / "a", folder)
    assert "](figures/confusable.png)" in text and "left out:" not in text
    assert "<b>" not in text and "\\*x\\*" in text


def test_alone_needs_a_record_of_bytes(write: Write, line: Any) -> None:
    """Not recorded is not zero."""
    rows = [{k: v for k, v in line(0, None, [1], pm_v=0.5).items() if not k.startswith("bytes")}]
    folder = write("solo", 0, (None,), rows=rows)
    write_features(folder, 0, test=("client-1",), stages=())
    run: Run = read(folder)
    assert run.rounds and not shown(folder)[1][0].alone
