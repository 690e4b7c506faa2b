"""Stored features: which samples and clients, of which models, and that storing them changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import PLAIN
from protofl.methods.fedavg import FedAvg
from test_run import cell, played, rows

from protofl import features, registry, run, verify
from protofl.engine.base import MethodError
from protofl.evaluate import TestSet
from protofl.federation import Federation, Round
from protofl.handles import RunTask
from protofl.method import Client, Method, Model, Program, Server, Train, Tree
from protofl.protocol import Protocol
from protofl.run import prepare, reopened, replay
from protofl.trials import CLASSES, TrialNet, images, transform

Arrays = dict[str, np.ndarray]

METHODS = [*registry.names(), "moon+cspc"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    run.set_up_process()


def stored(folder: Path) -> dict[int, Arrays]:
    """The files of a run's folder by round."""
    out = {}
    for path in sorted((folder / "features").iterdir()):
        with np.load(path, allow_pickle=False) as arrays:
            out[int(path.stem.removeprefix("round-"))] = dict(arrays)
    return out


def ran(asked: Any, results: Path) -> tuple[Path, dict[int, Arrays]]:
    played(asked, results)
    folder = results / prepare(asked).folder
    return folder, stored(folder)


def small(method: Method, sizes: tuple[int, ...] = (3, 40, 6), net: Any = None, **fields: Any) -> Any:
    """One round of a small federation of images -> it, the round, the test set (the last 20 images), the arrays."""
    x, y, _ = images()
    ends = np.cumsum((0, *sizes))
    parts = [torch.arange(a, b).flip(0) for a, b in zip(ends, ends[1:])]
    given = {**PLAIN, "clients": len(sizes), "local_epochs": 1, "batch_size": 8, "augment": ("hflip", "rotate15")}
    protocol = method.adapt(Protocol(**{**given, **fields}))
    pipeline = transform("hflip", "rotate15")
    fed = Federation(method, RunTask(net or TrialNet(), x, y, parts, protocol, pipeline=pipeline))
    made, test = fed.play(0), TestSet(x[-20:], y[-20:], pipeline, CLASSES)
    return fed, made, test, features.collect(fed, made, test)


def embedded(fed: Federation, w: Tree, raw: torch.Tensor) -> np.ndarray:
    """z of stored images, by a direct pass."""
    with torch.no_grad():
        return fed.task.net.bound("eval").embed(w, transform().test(raw)).float().numpy()  # type: ignore[no-any-return]


# ---- which samples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "most", "chosen"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], 4, [0, 2, 4, 6]),  # two of four: the first and the third
        ([0, 0, 0, 0, 1, 1, 1, 1], 6, [0, 1, 2, 4, 5, 6]),  # three of four: floor(0, 4/3, 8/3) = 0, 1, 2
        ([1, 0, 1, 0, 1, 0, 1, 0], 4, [0, 1, 4, 5]),  # the same in another order
        ([0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2], 7, [0, 1, 3, 5, 7, 9, 11]),  # class 0 has one: 1, 3, 3
        ([0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2], 8, [0, 1, 3, 5, 7, 8, 10, 11]),  # 1, 3, 4: floor(0, 1.5, 3, 4.5)
        ([3, 3, 3, 0], 3, [0, 1, 3]),  # classes 1 and 2 have none: 1 of class 0, 2 of class 3
        ([0, 1, 2], 2, [1, 2]),  # fewer than classes: the last are served
        ([0, 1, 2], 5, [0, 1, 2]),
        ([2], 1, [0]),
        ([0, 1], 0, []),
    ],
)
def test_samples_by_hand(labels: list[int], most: int, chosen: list[int]) -> None:
    assert features.stratified(np.array(labels), most).tolist() == chosen


def test_samples_are_as_even_as_can_be() -> None:
    rs = np.random.RandomState(0)
    for _ in range(200):
        labels = rs.choice(6, rs.randint(1, 60), p=rs.dirichlet(np.ones(6)))
        most = rs.randint(1, 70)
        at = features.stratified(labels, most)
        assert len(np.unique(at)) == len(at) == min(most, len(labels)) and (np.diff(at) > 0).all()
        there, taken = (np.bincount(v, minlength=6) for v in (labels, labels[at]))
        level = taken.max()
        assert all(n == m or n >= level - 1 for n, m in zip(taken, there))  # less only where there is no more


def test_all_methods_seeds_and_rounds_share_the_test_samples(tmp_path: Path) -> None:
    seen = []
    for method, seed in (("fedavg", 0), ("fedavg", 3), ("fednh", 0), ("solo", 1), ("fedproto", 0)):
        _, found = ran(cell(method, seeds=seed, features=20, local_epochs=1), tmp_path)
        assert sorted(found) == ([0] if method == "solo" else [0, 2])
        seen += [(a["test_index"].tolist(), a["test_labels"].tolist()) for a in found.values()]
    index, labels = seen[0]
    assert all(s == (index, labels) for s in seen) and np.bincount(labels).tolist() == [2] * 10
    data = prepare(cell("fedavg")).data
    assert labels == data.y_test[index].tolist() and index[:3] == [0, 17, 35]
    per_class = np.bincount(data.y_test)
    assert index == sorted(
        int(np.flatnonzero(data.y_test == c)[j * per_class[c] // 2]) for c in range(10) for j in (0, 1)
    )


# ---- what is stored --------------------------------------------------------------------------------------------------


def test_arrays_of_a_run_equal_a_direct_pass(tmp_path: Path) -> None:
    asked = cell("fedavg", features=30, rounds=4, prototype_rounds=2, clients=5)
    folder, found = ran(asked, tmp_path)
    assert sorted(found) == [0, 3]
    last, ready = found[3], prepare(asked)
    first, second = sorted(range(5), key=lambda i: -int(ready.split.sizes[i]))[:2]
    names = {"global": 1, f"client-{first}": 1, f"client-{second}": 1}
    kinds = ("", "_encoded", "_predicted")
    assert set(last) == {
        "test_index", "test_labels", *(f"test{k}:{n}" for k in kinds for n in names),
        *(f"train_{what}:{i}" for what in ("index", "labels") for i in (first, second)),
        *(f"train{k}:{i}:{n}" for k in kinds for i in (first, second) for n in ("global", f"client-{i}")),
    }  # fmt: skip
    assert {v.dtype.name for v in last.values()} == {"float32", "int64"}
    assert last["test:global"].shape == (30, 32) and last["test_encoded:global"].shape == (30, 64)
    opened, done = reopened(folder, None)
    assert done == 4
    fed, net = opened.federation, ready.net.bound("eval")
    w, data = fed.global_model().tree, ready.data  # type: ignore[union-attr]
    pipeline = run.pipeline(ready.protocol, data)
    for index, labels, kind, x, y in (
        ("test_index", "test_labels", "test{}:global", data.x_test, data.y_test),
        (f"train_index:{first}", f"train_labels:{first}", f"train{{}}:{first}:global", data.x_train, data.y_train),
    ):
        at = last[index]
        assert (last[labels] == y[at]).all() and len(at) == 30 and (np.diff(at) > 0).all()
        with torch.no_grad():
            batch = pipeline.test(torch.from_numpy(np.array(x[at])))
            r, z, scores = net.encode(w, batch), net.embed(w, batch), net(w, batch)
        assert np.array_equal(last[kind.format("")], z.numpy())
        assert np.array_equal(last[kind.format("_encoded")], r.numpy())
        assert np.array_equal(last[kind.format("_predicted")], scores.argmax(1).numpy())
    assert set(last[f"train_index:{first}"]) <= set(ready.split.indices[first])


def test_client_models_are_those_that_the_round_trained() -> None:
    fed, made, test, found = small(registry.Spec("fedavg").build(Protocol()), features=12)
    raw, trained = images()[0], dict(zip(made.ids, made.uploads))
    assert [k for k in found if k.startswith("test:")] == ["test:global", "test:client-1", "test:client-2"]
    for i, n in ((1, 12), (2, 6)):
        at = found[f"train_index:{i}"]
        assert len(at) == n and set(at) <= set(fed.task.parts[i].tolist()) and (np.diff(at) > 0).all()
        for name, w in (("global", fed.shared.net), (f"client-{i}", trained[i].net)):
            assert np.array_equal(found[f"train:{i}:{name}"], embedded(fed, w, raw[at]))
    assert np.array_equal(found["test:client-1"], embedded(fed, trained[1].net, test.x[found["test_index"]]))
    assert found["test:client-1"].dtype == np.float32  # in float64 too
    assert not np.array_equal(found["test:client-1"], found["test:global"])
    assert "train:1:client-2" not in found and "train_index:0" not in found


def test_many_samples_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    method = registry.Spec("fedavg").build(Protocol())
    whole = small(method, features=40)[-1]
    monkeypatch.setattr(features, "READ", 7)
    parts = small(method, features=40)[-1]
    assert whole.keys() == parts.keys() and whole["train:1:global"].shape == (40, 7)
    assert all(np.allclose(whole[k], parts[k], atol=1e-6) for k in whole)


@pytest.mark.parametrize(
    ("net", "encoded"),
    [(TrialNet(), True), (TrialNet(projection=None), False), (TrialNet(projection=None, z_normalize=True), True)],
)
def test_r_is_stored_where_it_is_not_z(net: Any, encoded: bool) -> None:
    found = small(registry.Spec("fedavg").build(Protocol()), net=net)[-1]
    assert ("test_encoded:global" in found) == encoded
    if net.options.z_normalize:
        assert np.allclose(np.linalg.norm(found["test:global"], axis=1), 1)


def test_an_output_layer_that_reads_r(tmp_path: Path) -> None:
    _, found = ran(cell("fedavg", rounds=1, classifier_input="r", features=10), tmp_path)
    assert found[0]["test:global"].shape == (10, 64) and "test_encoded:global" not in found[0]


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, tmp_path: Path) -> None:
    """A global model where the run has one, client models of the two largest clients that took part, and none else."""
    quick = {"moon+cspc.calib_epochs": 1} if "+" in method else {}
    asked = cell(method, clients=6, participation=0.5, rounds=2, local_epochs=1, features=10, pm_protocol="refresh",
                 pm_clients="all", **quick)  # fmt: skip
    folder, found = ran(asked, tmp_path)
    sizes, recorded = prepare(asked).split.sizes, {r["round"]: r for r in rows(folder)}
    assert sorted(found) == [t for t in recorded if t >= 0]
    for t, arrays in found.items():
        pictured = sorted(recorded[t]["clients"], key=lambda i: (-sizes[i], i))[:2]
        names = {k.partition(":")[2] for k in arrays if k.startswith("test:")}
        served = {"global"} if recorded[t]["gm"] is not None else set()
        served |= {"averaged"} if "cspc" in method else set()
        assert names == served | {f"client-{i}" for i in pictured}
        assert {k for k in arrays if k.startswith("train_index")} == {f"train_index:{i}" for i in pictured}
        assert {k for k in arrays if k.startswith("train:")} == {
            f"train:{i}:{n}" for i in pictured for n in (*served, f"client-{i}")
        }
        assert all(np.isfinite(v).all() for v in arrays.values())


def test_clients_that_trained_alone(tmp_path: Path) -> None:
    """SOLO's client models are what its clients keep, and there is no other."""
    asked = cell("solo", features=25, rounds=2)
    folder, found = ran(asked, tmp_path)
    fed, (arrays,) = reopened(folder, None)[0].federation, found.values()
    first, second = sorted(range(10), key=lambda i: (-fed.task.sizes[i], i))[:2]
    assert [k for k in arrays if k.startswith("test:")] == [f"test:client-{i}" for i in sorted((first, second))]
    data = prepare(asked).data
    pipeline = run.pipeline(prepare(asked).protocol, data)
    x = pipeline.test(torch.from_numpy(np.array(data.x_test[arrays["test_index"]])))
    w = fed.memory.get(first).own.net  # type: ignore[union-attr]
    with torch.no_grad():
        assert np.array_equal(arrays[f"test:client-{first}"], fed.task.net.bound("eval").embed(w, x).numpy())


def test_the_largest_clients_that_took_part(tmp_path: Path) -> None:
    asked = cell("fedavg", participation=0.3, rounds=5, local_epochs=1, features=5)
    folder, found = ran(asked, tmp_path)
    sizes = prepare(asked).split.sizes
    told = {r["round"]: r["clients"] for r in rows(folder)}
    assert len({tuple(c) for c in told.values()}) > 1
    for t, arrays in found.items():
        want = sorted(told[t], key=lambda i: (-sizes[i], i))[:2]
        assert sorted(int(k.split(":")[1]) for k in arrays if k.startswith("train_index")) == sorted(want)


def test_ties_go_to_the_lower_id_and_one_sample_is_enough() -> None:
    method = registry.Spec("fedavg").build(Protocol())
    found = small(method, sizes=(9, 12, 9, 9))[-1]
    assert [k for k in found if k.startswith("train_index")] == ["train_index:1", "train_index:0"]
    found = small(method, sizes=(1, 8))[-1]
    assert found["train_index:0"].tolist() == [0] and found["train:0:client-0"].shape == (1, 7)
    found = small(method, sizes=(1,))[-1]
    assert [k for k in found if k.startswith("train:")] == ["train:0:global", "train:0:client-0"]
    _, found = small(method, sizes=(3, 0, 4))[2:]
    assert {k for k in found if k.startswith("train_index")} == {"train_index:0", "train_index:2"}


def test_a_private_encoder_and_a_network_without_its_projection(tmp_path: Path) -> None:
    _, found = ran(cell("fedper", rounds=1, features=5, **{"fedper.head_layers": "last_block"}), tmp_path)
    assert found[0]["test:client-4"].shape == (5, 32) and "test_predicted:client-4" in found[0]
    asked = cell("fednh", rounds=1, features=5, **{"fednh.embed_layer": "encoder"})
    _, found = ran(asked, tmp_path)
    assert found[0]["test:global"].shape == (5, 64) and "test_encoded:global" not in found[0]
    assert "test_predicted:global" in found[0] and "test_network_predicted:global" not in found[0]  # no output layer


def test_local_buffers_leave_no_global_model() -> None:
    found = small(registry.Spec("fedavg").build(Protocol()), bn_buffers="local")[-1]
    assert [k for k in found if k.startswith("test:")] == ["test:client-1", "test:client-2"]


# ---- methods of strangers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Impersonal(Method):
    """No personal models; the global one in a tree of its own."""

    def start(self, task: Any) -> tuple[Tree, Tree]:
        return Tree(body=task.initial), Tree()

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        w = yield Train(shared.body, self.loss)
        return Tree(body=w), Tree()

    def loss(self, net: Any, w: Tree, batch: Any, view: Any) -> Any:
        return net.loss(w, batch)

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        return Tree(body=server.mean([u.body for u in uploads])), Tree()


@dataclass(frozen=True)
class Whole(Impersonal):
    def global_model(self, shared: Tree, private: Tree) -> Model:
        return Model(Tree(net=shared.body), self.undefined)

    def undefined(self, net: Any, tree: Tree, x: Any) -> dict[str, Any]:
        return {"mine": None, "network": net(tree.net, x)}


@dataclass(frozen=True)
class Strange(Impersonal):
    def global_model(self, shared: Tree, private: Tree) -> Model:
        return Model(Tree(theirs=shared.body["head.weight"]), lambda net, tree, x: torch.zeros(len(x), CLASSES))


@dataclass(frozen=True)
class Staged(FedAvg):
    """Stages whose names or tensors are given."""

    name: str = "before"
    tensor: str = "head.bias"

    def stages(self, shared: Tree, private: Tree) -> dict[str, Tree]:
        return {self.name: Tree({self.tensor: torch.ones(CLASSES, dtype=torch.float64)})}


@dataclass(frozen=True)
class Careless(FedAvg):
    """Its hook writes into the state."""

    def stages(self, shared: Tree, private: Tree) -> dict[str, Tree]:
        shared.net["head.bias"] += 1
        return {}


def test_what_is_not_there_is_left_out() -> None:
    assert small(Impersonal())[-1] == {}
    assert small(Strange())[-1] == {}  # not built on the network
    fed, _, test, found = small(Whole(), features=12)
    assert [k for k in found if k.startswith("t") and "global" in k] == [
        "test:global", "test_encoded:global", "test_network_predicted:global",
        *(f"train{k}:{i}:global" for i in (1, 2) for k in ("", "_encoded", "_network_predicted")),
    ]  # fmt: skip
    assert np.array_equal(found["test:global"], embedded(fed, fed.shared.body, test.x[found["test_index"]]))
    assert small(Whole(), features=0)[-1] == {}


def test_stages_are_networks_with_other_tensors() -> None:
    fed, _, test, found = small(Staged(), features=12)
    raw = test.x[found["test_index"]]
    w = fed.shared.net | {"head.bias": torch.ones(CLASSES, dtype=torch.float64)}
    with torch.no_grad():
        want = fed.task.net.bound("eval")(w, transform().test(raw)).argmax(1)
    assert np.array_equal(found["test_predicted:before"], want.numpy())
    assert np.array_equal(found["test:before"], found["test:global"])
    assert {"train:1:before", "train:2:before"} <= found.keys()
    for wrong in (Staged(name="global"), Staged(name="client-1"), Staged(name="a:b"), Staged(tensor="tail.bias")):
        with pytest.raises(MethodError, match=r"Staged\.stages raised ValueError: stage .* needs a name of its own"):
            small(wrong)


def test_the_contract_asks_for_stages() -> None:
    found = {
        v.check.name: v for v in (c.judge(verify.Subject(Careless())) for c in verify.CHECKS if c.name == "evaluation")
    }
    assert found["evaluation"].kept is False and "stages changed shared/net/head.bias" in found["evaluation"].line


# ---- before and after the calibration --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedcspc", "moon+cspc"])
def test_averaged_is_the_network_before_the_calibration(method: str) -> None:
    built = registry.Spec(method, (("calib_epochs", "3"),)).build(Protocol())
    fed, made, test, found = small(built, sizes=(12, 40, 20), features=20)
    n = [fed.task.sizes[i] for i in made.ids]
    mean = Tree({k: sum(u.net[k] * (m / sum(n)) for u, m in zip(made.uploads, n))
                 for k in made.uploads[0].net if "num_batches" not in k})  # fmt: skip
    raw = test.x[found["test_index"]]
    averaged = fed.shared.net | mean.only(r"projection\.|head\.")
    assert np.allclose(found["test:averaged"], embedded(fed, averaged, raw), atol=1e-6)
    with torch.no_grad():
        want = fed.task.net.bound("eval")(averaged, transform().test(raw)).argmax(1)
    assert np.array_equal(found["test_predicted:averaged"], want.numpy())
    assert np.array_equal(found["test_encoded:averaged"], found["test_encoded:global"])  # the encoder is not calibrated
    assert not np.allclose(found["test:averaged"], found["test:global"], atol=1e-4)
    assert not np.allclose(found["train:1:averaged"], found["train:1:global"], atol=1e-4)
    with torch.no_grad():
        model = fed.global_model()
        said = model.scores(fed.task.net.bound("eval"), model.tree, transform().test(raw))
    assert np.array_equal(found["test_predicted:global"], said["fused"].argmax(1).numpy())
    assert np.array_equal(found["test_network_predicted:global"], said["network"].argmax(1).numpy())


def test_without_calibration_averaged_is_global() -> None:
    built = registry.Spec("fedcspc", (("calib_epochs", "0"),)).build(Protocol())
    found = small(built, sizes=(12, 40, 20))[-1]
    for kind in ("test{}:{}", "train{}:1:{}", "train{}:2:{}"):
        assert np.array_equal(found[kind.format("", "averaged")], found[kind.format("", "global")])
        said = found[kind.format("_network_predicted", "global")]
        assert np.array_equal(found[kind.format("_predicted", "averaged")], said)
    plain = small(registry.Spec("fedcspc", (("n_repeat", "0"),)).build(Protocol()), sizes=(12, 40, 20))[-1]
    assert "test:global" in plain and "test:averaged" not in plain  # FedAvg has no such stage


def test_previous_calibrated_starts_elsewhere_and_averaged_stays_the_average() -> None:
    given = (("calib_epochs", "2"), ("calib_init", "previous_calibrated"))
    fed, _, test, _ = small(registry.Spec("fedcspc", given).build(Protocol()), sizes=(12, 40, 20), rounds=2)
    before = fed.private.head
    made = fed.play(1)
    found = features.collect(fed, made, test)
    n = [fed.task.sizes[i] for i in made.ids]
    mean = sum(u.net["head.bias"] * (m / sum(n)) for u, m in zip(made.uploads, n))
    assert torch.allclose(fed.private.averaged["head.bias"], mean, atol=1e-12)
    assert not torch.allclose(before["head.bias"], mean) and not torch.equal(fed.private.head["head.bias"], mean)
    assert not np.array_equal(found["test:averaged"], found["test:global"])


# ---- what may not change ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedcspc", "fedper", "fedbabu", "solo"])
def test_storing_features_changes_no_number_and_no_digest(method: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "participation": 0.5,
        "rounds": 4,
        "local_epochs": 1,
    }
    off, on = cell(method, features=0, **given), cell(method, features=300, **given)
    assert prepare(off).digest == prepare(on).digest == prepare(cell(method, **given)).digest
    assert played(off, tmp_path / "off") == played(on, tmp_path / "on")
    folders = [tmp_path / d / prepare(on).folder for d in ("off", "on")]
    assert not (folders[0] / "features").exists() and stored(folders[1])
    states = [sorted(p.name for p in (f / "state").glob("round-*")) for f in folders]
    assert states[0] == states[1]  # names carry the content's check sum
    assert '"features": 300' in (folders[1] / "protocol.json").read_text()


@pytest.mark.parametrize("method", ["fedcspc", "ditto"])
def test_stopped_and_resumed_gives_the_same_files(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cell(method, participation=0.5, rounds=5, local_epochs=1, features=30)
    straight, _ = ran(asked, tmp_path / "straight")
    save = run.Run._save_features

    def stop(self: run.Run, t: int, made: Round) -> None:
        save(self, t, made)
        if t == 4:
            raise KeyboardInterrupt  # the round's row and state are not there yet

    monkeypatch.setattr(run.Run, "_save_features", stop)
    with pytest.raises(KeyboardInterrupt):
        played(asked, tmp_path / "stopped")
    monkeypatch.setattr(run.Run, "_save_features", save)
    resumed, found = ran(asked, tmp_path / "stopped")
    assert sorted(found) == [0, 4]
    for path in sorted((straight / "features").iterdir()):
        assert path.read_bytes() == (resumed / "features" / path.name).read_bytes()
    assert sorted(os.listdir(straight / "features")) == sorted(os.listdir(resumed / "features"))


def test_processes_and_replay_leave_them_as_they_are(tmp_path: Path) -> None:
    asked = cell("fedcspc", rounds=2, local_epochs=1, features=30)
    folder, _ = ran(asked, tmp_path / "one")
    ready = prepare(asked)
    run.play(ready, tmp_path / "two", lambda event: None, processes=2)
    content = {p.name: p.read_bytes() for p in (folder / "features").iterdir()}
    assert content == {p.name: p.read_bytes() for p in (tmp_path / "two" / ready.folder / "features").iterdir()}
    told = replay(folder, None)
    assert told["stored"] == told["again"]
    assert content == {p.name: p.read_bytes() for p in (folder / "features").iterdir()}


def test_time_of_storing_is_in_no_entry_of_seconds(tmp_path: Path) -> None:
    asked = cell("fedavg", rounds=1, features=30)
    run.play(prepare(asked), tmp_path, lambda event: None)
    (row,) = run.records.read_rows(tmp_path / prepare(asked).folder / "rounds.jsonl")
    assert set(row["seconds"]) == {"train", "prototype", "aggregate", "evaluate"}
