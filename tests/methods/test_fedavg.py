"""FedAvg: the test vectors, what is equal by construction, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ENGINES, Harnessed, Quadratic, federation, quadratic
from protofl.methods.fedavg import FedAvg
from ragged import Shift, Tiny, digits, gap, identical, path, ragged, state
from torch import Tensor

from protofl.handles import RunServer
from protofl.nets import build
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.tree import Tree, nbytes

engines = pytest.mark.parametrize("engine", ENGINES)


VECTORS = [
    (0.0, 0.0, [0.1, 0.19, 0.271], [0.6, 1.08, 1.464], 1.16575, 0.8675),
    (0.9, 0.0, [0.1, 0.28, 0.514], [0.6, 1.62, 2.814], 2.239, 1.664),
    (0.9, 0.1, [0.1, 0.279, 0.50941], [0.6, 1.614, 2.78766], 2.2180975, 1.648535),
]


@engines
@pytest.mark.parametrize(("rho", "decay", "first", "second", "by_size", "uniform"), VECTORS)
def test_quadratic(
    engine: str,
    rho: float,
    decay: float,
    first: list[float],
    second: list[float],
    by_size: float,
    uniform: float,
) -> None:
    def fed(**kw: Any) -> Harnessed:
        return quadratic(FedAvg(), engine=engine, momentum=rho, weight_decay=decay, **kw)

    assert path(fed) == [pytest.approx(first, abs=1e-12), pytest.approx(second, abs=1e-12)]
    for weighting, wanted in (("data_size", by_size), ("uniform", uniform)):
        assert float(fed(model_weighting=weighting).run().shared.net.w) == pytest.approx(wanted, abs=1e-12)


@engines
def test_server_lr_damps(engine: str) -> None:
    assert float(quadratic(FedAvg(), engine=engine, server_lr=0.5).run().shared.net.w) == pytest.approx(0.582875)


@engines
def test_short_client(engine: str) -> None:
    def fed(n: tuple[int, int], **kw: Any) -> Harnessed:
        return quadratic(FedAvg(), engine=engine, n=n, batch_size=20, drop_last=True, **kw)

    skipped = fed((30, 10), short_client="skip").run()
    assert float(skipped.shared.net.w) == pytest.approx(0.271)
    assert skipped.last.ids == [0]
    kept = fed((30, 10)).run()  # client 2 trains on its one short batch
    assert float(kept.shared.net.w) == pytest.approx(0.75 * 0.271 + 0.25 * 1.464)
    nobody = fed((15, 10), short_client="skip").run()
    assert float(nobody.shared.net.w) == 0 and nobody.last.bytes == {"down": 0, "up": 0, "once": 0}


def merged(fed: Harnessed, models: list[Tree], ids: list[int]) -> Tree:
    """What the server makes of these models of these clients."""
    uploads = [Tree(net=m) for m in models]
    shared, private = fed.method.aggregate(RunServer(fed.task, ids, 0), fed.shared, fed.private, uploads)
    assert not private
    return shared.net  # type: ignore[no-any-return]


@pytest.mark.parametrize(("weighting", "wanted"), [("data_size", 4.0), ("uniform", 3.0)])
def test_buffers(weighting: str, wanted: float) -> None:
    fed = quadratic(FedAvg(), model_weighting=weighting)
    models = [Tree({"bn.running_mean": torch.tensor([m]), "bn.num_batches_tracked": torch.tensor(c)})
              for m, c in ((1.0, 3), (5.0, 9))]  # fmt: skip
    out = merged(fed, models, [0, 1])
    assert float(out["bn.running_mean"]) == pytest.approx(wanted)
    assert out["bn.num_batches_tracked"].dtype == torch.int64 and int(out["bn.num_batches_tracked"]) == 9


class Slope(Quadratic):
    """f = w . x: the gradient is the row."""

    def init(self, stream: Any) -> Tree:
        return Tree(w=torch.zeros(2))

    def loss(self, w: Tree, batch: Any) -> Tensor:
        return batch.mean(batch.x @ w["w"])  # type: ignore[no-any-return]


@engines
@pytest.mark.parametrize(
    ("g", "wanted"), [((6, 8), (5.9999994, 7.9999992)), ((9, 12), (5.9999996, 7.99999947)), ((3, 4), (3, 4))]
)
def test_clip(engine: str, g: tuple[int, int], wanted: tuple[float, float]) -> None:
    x = torch.tensor([g], dtype=torch.float64)
    fed = federation(FedAvg(), Slope(), x, torch.tensor([0]), [[0]], engine=engine, grad_clip_norm=10.0,
                     local_epochs=1, client_lr=1.0).run()  # fmt: skip
    assert (-fed.shared.net.w).tolist() == pytest.approx(wanted, abs=5e-9)


# ---- equal by construction, and what an option changes


@engines
def test_equal_by_construction(engine: str) -> None:
    def fed(**kw: Any) -> Harnessed:
        return ragged(FedAvg(), engine=engine, participation=0.5, **kw).run()

    base = fed()
    for same in ({"bn_buffers": "local"}, {"short_client": "skip"}, {"lr_decay_offset": 1}):
        assert identical(state(fed(**same)), state(base)), same
    for same in ({"optimizer_reset": "never"}, {"optimizer_reset": "per_round"}):
        assert identical(fed(**same, momentum=0.0).shared, fed(momentum=0.0).shared), same
    halves = {"n": (20, 20), "engine": engine}
    weighted = [quadratic(FedAvg(), model_weighting=w, **halves).run() for w in ("data_size", "uniform")]
    assert identical(weighted[0].shared, weighted[1].shared)


@engines
def test_momentum_lives_for_one_round_unless_never(engine: str) -> None:
    # w^0 = 0, h = a = 1, one step of 0.1 a round: 0.1, then 0.19 with a fresh buffer, 0.28 with the old one.
    for reset, wanted in (("per_round", 0.19), ("never", 0.28)):
        fed = quadratic(
            FedAvg(),
            rows=((1, 1),),
            n=(4,),
            engine=engine,
            momentum=0.9,
            local_epochs=1,
            rounds=2,
            optimizer_reset=reset,
        ).run()
        assert float(fed.shared.net.w) == pytest.approx(wanted)


@engines
def test_decay_begins_at_the_offset(engine: str) -> None:
    for offset, wanted in ((0, 0.1), (1, 0.09)):
        fed = quadratic(
            FedAvg(),
            rows=((1, 1),),
            n=(4,),
            engine=engine,
            local_epochs=1,
            lr_decay_per_round=0.9,
            lr_decay_offset=offset,
        ).run()
        assert float(fed.shared.net.w) == pytest.approx(wanted)


@engines
def test_buffers_of_a_normalised_net(engine: str) -> None:
    average = ragged(FedAvg(), Tiny(norm=True), engine=engine).run()
    net = average.shared.net
    assert int(net["encoder.num_batches_tracked"]) == 3 * 2 * 4  # the longest client: 4 batches, 2 epochs, 3 rounds
    share = average.last.uploads[0].net["encoder.running_mean"]
    assert not torch.equal(net["encoder.running_mean"], share)
    local = ragged(FedAvg(), Tiny(norm=True), engine=engine, bn_buffers="local").run()
    assert local.global_model() is None
    assert int(local.shared.net["encoder.num_batches_tracked"]) == 0
    own = local.personal()[1].tree
    assert int(own["encoder.num_batches_tracked"]) == 3 * 2 * 1
    floats = sum(v.numel() for k, v in net.items() if not k.startswith("encoder.r") and "num" not in k)
    assert local.last.bytes == {"down": 7 * 4 * floats, "up": 7 * 4 * floats, "once": 0}
    assert average.last.bytes == {
        "down": 7 * (4 * (floats + 8) + 8),
        "up": 7 * (4 * (floats + 8) + 8),
        "once": 0,
    }


@engines
def test_personal_model_is_the_client_s_own(engine: str) -> None:
    fed = quadratic(FedAvg(), engine=engine).run()
    assert [float(m.tree.w) for m in fed.personal().values()] == pytest.approx([0.271, 1.464])
    # refresh: three more steps from the final 1.16575: w - a shrinks by (1 - 0.1 h)^3
    again = [1 + 0.16575 * 0.729, 3 - (3 - 1.16575) * 0.512]
    assert [float(m.tree.w) for m in fed.refreshed().values()] == pytest.approx(again)
    assert float(fed.global_model().tree.w) == pytest.approx(1.16575)


# ---- traps


@engines
def test_nothing_aliases(engine: str) -> None:
    fed = ragged(FedAvg(), Tiny(norm=True), engine=engine)
    fed.play(0)
    before = {k: v.clone() for k, v in fed.shared.net.items()}
    received = fed.shared.net
    fed.play(1)
    assert identical(received, Tree(before))
    places = [v.data_ptr() for tree in (received, fed.shared.net, *[u.net for u in fed.last.uploads])
              for v in tree.values()]  # fmt: skip
    assert len(set(places)) == len(places)


def test_weights_follow_the_client_not_its_position() -> None:
    fed = quadratic(FedAvg(), rows=((1, 1), (1, 1), (2, 3)), n=(60, 10, 30), draws=[[2, 1]]).run()
    assert float(fed.shared.net.w) == pytest.approx(1.16575)


def test_every_open_choice_is_a_protocol_field() -> None:
    assert set(FedAvg.open_fields) <= set(fields(Protocol)) and not fields(FedAvg)


# ---- bytes and end to end


@pytest.mark.parametrize(
    ("name", "classes", "shape", "wanted"),
    [("simple_cnn", 10, (32, 32, 3), 370_504), ("cnn_fednh", 10, (32, 32, 3), 3_191_808),
     ("cnn_fednh", 100, (32, 32, 3), 3_260_928), ("mlp", 10, (8, 8, 1), 4 * 23_146)],
)  # fmt: skip
def test_bytes(name: str, classes: int, shape: tuple[int, int, int], wanted: int) -> None:
    net = build(name, classes=classes, shape=shape, projection_dim=32 if name == "mlp" else 256)
    x = torch.zeros(4, shape[2], *shape[:2])
    fed = federation(FedAvg(), net, x, torch.arange(4), [[0, 1], [2], [3]], local_epochs=1, precision="fp32",
                     draws=[[0, 2]]).run()  # fmt: skip
    assert fed.last.bytes == {"down": 2 * wanted, "up": 2 * wanted, "once": 0}
    assert nbytes(fed.shared) == wanted


@engines
def test_digits(engine: str) -> None:
    wanted = [(10.1623072048, 2.3014681322), (10.2710452553, 2.2883990951)][: 1 if engine == "loop" else 2]
    assert digits(FedAvg(), len(wanted), engine) == [pytest.approx(pair, abs=1e-9) for pair in wanted]


def test_engines_agree() -> None:
    for kw in ({}, {"augment": Shift(), "grad_clip_norm": 0.5, "participation": 0.5, "drop_last": True}):
        a, b = (ragged(FedAvg(), engine=e, **kw).run() for e in ENGINES)
        assert gap(state(a), state(b)) < 1e-12 and a.bytes == b.bytes
