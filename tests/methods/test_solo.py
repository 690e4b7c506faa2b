"""SOLO: the test vectors, both budgets, every option, what is equal by construction, traps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, federation, quadratic
from protofl.methods.fedavg import FedAvg
from protofl.methods.solo import SOLO
from ragged import SIZES, Shift, Tiny, data, gap, identical, ragged, state
from toy import everything, toy
from toy import gap as toy_gap

from protofl import protocol as protocols
from protofl import registry, rng, run
from protofl.cells import Cell
from protofl.errors import UserError
from protofl.evaluate import Scored, personal_row
from protofl.handles import RunClient
from protofl.nets import build
from protofl.options import fields
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.report import read
from protofl.tree import Tree, tensors

engines = pytest.mark.parametrize("engine", ENGINES)

NH = Protocol(rounds=200, participation=0.1, local_epochs=5, client_lr=0.01, lr_decay_per_round=0.99, clients=100)
MATCH = {"budget": "match_participation"}
GLOBAL = {**MATCH, "lr_clock": "global_round"}


def models(fed: Harnessed) -> list[Tree]:
    """w_i of every client with data, as it would be evaluated."""
    return [model.tree for model in fed.personal().values()]


# ---- vectors 1 and 2: blocks and their rates


@pytest.mark.parametrize(("ratio", "blocks"), [(0.1, 20), (0.3, 60), (0.29, 58), (1.0, 200), (0.001, 1)])
def test_blocks(ratio: float, blocks: int) -> None:
    assert SOLO(**MATCH).adapt(NH.replace(participation=ratio)).rounds == blocks
    assert int(200 * 0.29) == 57  # what the epsilon is for


def test_rates() -> None:
    assert NH.learning_rate(199) == pytest.approx(0.0013533300, abs=5e-11)
    local, far = (SOLO(**o).adapt(NH) for o in (MATCH, GLOBAL))
    assert (local.learning_rate(0), far.learning_rate(0)) == (0.01, 0.01)
    assert local.learning_rate(19) == pytest.approx(0.0082616862, abs=5e-11)
    assert far.learning_rate(1) == pytest.approx(0.0090438208, abs=5e-11)
    assert far.learning_rate(19) == pytest.approx(0.0014814499, abs=5e-11)
    odd = SOLO(**GLOBAL).adapt(NH.replace(participation=0.29))
    for b, t in ((0, 0), (1, 3), (57, 196)):
        assert odd.learning_rate(b) == NH.learning_rate(t)
    shifted = SOLO(**GLOBAL).adapt(NH.replace(lr_decay_offset=1))
    assert shifted.learning_rate(19) == NH.learning_rate(191)


@engines
@pytest.mark.parametrize("options", [MATCH, GLOBAL], ids=str)
def test_rates_of_the_steps(engine: str, options: dict[str, str]) -> None:
    # h = a = 1, one step per block: 1 - w shrinks by (1 - eta_b)
    def rates(b: int) -> float:
        return float(0.1 * 0.5 ** (b if options == MATCH else b * 7 // 3))

    fed = quadratic(SOLO(**options), rows=((1, 1), (1, 1)), n=(4, 9), engine=engine, rounds=7, participation=0.5,
                    local_epochs=1, lr_decay_per_round=0.5)  # fmt: skip
    left = 1.0
    for b in range(3):
        fed.play(b)
        assert RunClient(fed.task, 0, b).lr == pytest.approx(rates(b))
        left *= 1 - rates(b)
        assert [float(m.w) for m in models(fed)] == pytest.approx([1 - left] * 2)
    assert fed.protocol.rounds == 3


# ---- the budgets


@engines
def test_one_optimiser_for_all_epochs_and_one_per_block(engine: str) -> None:
    # two steps of 0.1 with momentum 0.9: 0.28 in one run, 0.19 in two blocks
    kw = {"rows": ((1, 1),), "n": (4,), "engine": engine, "rounds": 2, "local_epochs": 1, "momentum": 0.9}
    for options, reset, wanted in (
        ({}, "per_round", 0.28),
        ({}, "never", 0.28),
        (MATCH, "per_round", 0.19),
        (MATCH, "never", 0.28),
    ):
        fed = quadratic(SOLO(**options), optimizer_reset=reset, **kw).run()
        assert [float(m.w) for m in models(fed)] == pytest.approx([wanted])


def test_epochs() -> None:
    for epochs, wanted in (("T*E", 1000), (300, 300), (1, 1)):
        made = SOLO(epochs=epochs).adapt(NH)
        assert (made.rounds, made.local_epochs, made.learning_rate(0)) == (1, wanted, 0.01)
    alone = SOLO(**MATCH, epochs=300).adapt(NH)
    assert (alone.rounds, alone.local_epochs) == (20, 5)


def test_everybody_is_trained_and_evaluated() -> None:
    table = NH.replace(metrics=("gm",), pm_protocol="refresh", client_sampling="moon_compat")
    for options in ({}, MATCH, GLOBAL):
        made = SOLO(**options).adapt(table)
        changed = {n for n, v in vars(made).items() if v != vars(table).get(n)} - {"table_rounds"}
        assert changed == {
            "rounds", "participation", "client_sampling", "pm_clients", "pm_protocol", "metrics",
            *({"local_epochs"} if not options else ()),
        }  # fmt: skip
        assert (made.participation, made.client_sampling) == (1.0, "independent")
        assert (made.pm_clients, made.pm_protocol) == ("all", "as_trained")
        assert made.metrics == ("gm", "pm_v", "pm_l")  # PM uniform comes with them
        registry.check(SOLO(**options), table, made, Tiny())


def by_hand(fed: Harnessed, rates: list[float], epochs: int) -> list[Tree]:
    """w_i after all blocks, with torch's own optimiser."""
    p, net, out = fed.protocol, fed.task.net, []
    for i, part in enumerate(fed.task.parts):
        q = Tree({k: v.clone().requires_grad_() for k, v in fed.task.initial.items()})
        for b, lr in enumerate(rates):
            stream = rng.train(p.seed, b, i)
            sgd = torch.optim.SGD(list(q.values()), lr=lr, momentum=p.momentum, weight_decay=p.weight_decay)
            for _ in range(epochs):
                for rows in part[torch.from_numpy(stream.permutation(len(part)))].split(p.batch_size):
                    sgd.zero_grad()
                    F.cross_entropy(net(q, fed.task.x[rows]), fed.task.y[rows]).backward()
                    torch.nn.utils.clip_grad_norm_(list(q.values()), p.grad_clip_norm)
                    sgd.step()
        out.append(q.map(torch.Tensor.detach))
    return out


@engines
@pytest.mark.parametrize(
    ("options", "clock", "epochs"),
    [
        ({}, [0], 10),
        ({"epochs": 7}, [0], 7),
        (MATCH, [0, 1, 2], 2),
        (GLOBAL, [0, 1, 3], 2),
    ],
    ids=str,
)
def test_by_hand(engine: str, options: dict[str, Any], clock: list[int], epochs: int) -> None:
    fed = ragged(SOLO(**options), engine=engine, rounds=5, participation=0.6, grad_clip_norm=0.6,
                 lr_decay_per_round=0.7).run()  # fmt: skip
    wanted = by_hand(fed, [0.1 * 0.7**t for t in clock], epochs)
    assert len(models(fed)) == 7 and gap(models(fed), wanted) < 1e-12


@engines
def test_the_first_block_is_fedavg_s_first_round(engine: str) -> None:
    kw = {"engine": engine, "augment": Shift(), "grad_clip_norm": 0.7, "drop_last": True, "rounds": 1}
    alone = ragged(SOLO(**MATCH), Tiny(norm=True), **kw).run()
    together = ragged(FedAvg(), Tiny(norm=True), **kw).run()
    assert identical(models(alone), [u.net for u in together.last.uploads])
    assert alone.terms == together.terms


# ---- nothing is shared


@engines
def test_nothing_is_sent(engine: str) -> None:
    fed = ragged(SOLO(**MATCH), engine=engine, rounds=4).run()
    assert fed.bytes == [{"down": 0, "up": 0, "once": 0}] * 4
    assert not fed.shared and not fed.private and not any(fed.last.uploads)
    assert fed.global_model() is None and fed.conclude() is None


@engines
def test_others_do_not_matter(engine: str) -> None:
    x, y, parts = data()
    other = x.clone()
    other[parts[0]] += 1.0
    kw = {"rounds": 2, "batch_size": 8, "momentum": 0.9, "engine": engine}
    a, b = (models(federation(SOLO(**MATCH), Tiny(), v, y, parts, **kw).run()) for v in (x, other))
    assert gap(a[1:], b[1:]) < 1e-12 and gap(a[0], b[0]) > 1e-3


@engines
def test_all_clients_with_data_are_evaluated_after_every_block(engine: str) -> None:
    fed = quadratic(SOLO(**MATCH), rows=((1, 1), (2, 3), (1, 5)), n=(10, 30, 0), engine=engine, rounds=3)
    for b in range(3):
        fed.play(b)
        assert sorted(fed.personal()) == [0, 1] == fed.last.ids
    assert len(models(fed)) == 2


@engines
def test_a_skipped_client_counts_with_its_initial_weights(engine: str) -> None:
    """drop_last and n_i < B: trained on its one batch, or (skip) evaluated as it began."""
    for options in (MATCH, {}, {**MATCH, "common_init": False}):
        kept, skipped = (
            ragged(SOLO(**options), engine=engine, rounds=2, drop_last=True, short_client=s).run()
            for s in ("keep_batch", "skip")
        )
        assert skipped.last.ids == [0, 2, 3, 4, 5, 6] and sorted(skipped.personal()) == list(range(7))
        began = skipped.method.enrol(RunClient(skipped.task, 1, 0)).net
        assert identical(models(skipped)[1], began) and gap(models(kept)[1], began) > 1e-3
        assert gap(models(kept)[2:], models(skipped)[2:]) < 1e-12


# ---- options


@engines
def test_common_init(engine: str) -> None:
    same, own = (ragged(SOLO(**MATCH, common_init=c), Tiny(norm=True), engine=engine, seed=3) for c in (True, False))
    for fed in (same, own):
        starts = [fed.method.enrol(RunClient(fed.task, i, 0)).net for i in range(7)]
        equal = [identical(a, b) for a, b in itertools.combinations(starts, 2)]
        assert all(equal) if fed is same else not any(equal)
        assert identical(starts[0], fed.task.initial) == (fed is same)
    for t in (0, 2):  # whenever it is asked
        drawn = Tiny(norm=True).init(rng.private("solo", "init", 3, -1, 4))
        began = own.method.enrol(RunClient(own.task, 4, t)).net
        assert gap(drawn, began) == 0
        assert all(v.dtype in (torch.float64, torch.int64) for v in tensors(began))
    assert gap(models(same.run()), models(own.run())) > 1e-3


def test_own_init_of_a_net_is_the_recipe_of_w_0() -> None:
    net = build("mlp", classes=5, shape=(8, 8, 1), projection_dim=32)
    x = torch.zeros(6, 1, 8, 8, dtype=torch.float64)
    fed = federation(SOLO(common_init=False), net, x, torch.arange(6) % 5, [range(6)], model="mlp", init="torch")
    began = fed.method.enrol(RunClient(fed.task, 0, 0)).net
    assert gap(began, net.init(rng.private("solo", "init", 0, -1, 0))) == 0


@engines
def test_every_option_moves_the_result(engine: str) -> None:
    options: list[dict[str, Any]] = [{}, {"epochs": 3}, MATCH, GLOBAL, {"common_init": False}]
    results = [
        models(ragged(SOLO(**o), engine=engine, rounds=4, participation=0.5, lr_decay_per_round=0.8).run())
        for o in options
    ]
    for i, one in enumerate(results):
        assert all(gap(one, other) > 1e-6 for other in results[:i])


@engines
def test_equal_by_construction(engine: str) -> None:
    def fed(options: dict[str, Any], **kw: Any) -> list[Any]:
        return state(ragged(SOLO(**options), Tiny(norm=True), engine=engine, **{"rounds": 4, **kw}).run())

    half, decay = {"participation": 0.5}, {"lr_decay_per_round": 0.8}
    assert identical(fed(MATCH, **half), fed(GLOBAL, **half))  # without decay
    assert identical(fed(MATCH, **decay), fed(GLOBAL, **decay))  # at ratio 1
    one = {**half, **decay, "rounds": 2}
    assert identical(fed({}, **one), fed({"lr_clock": "global_round"}, **one))  # in one go
    base = fed(MATCH, **half, **decay)
    for same in ({"pm_protocol": "refresh"}, {"pm_clients": "all"}, {"client_sampling": "moon_compat"},
                 {"server_lr": 0.5}, {"model_weighting": "uniform"}, {"bn_buffers": "local"}):  # fmt: skip
        assert identical(fed(MATCH, **half, **decay, **same), base), same
    # what only reports read
    for std in ({"std_over": "parties"}, {"std_ddof": 0}):
        assert identical(fed({**MATCH, **std}, **half, **decay), base)
    # the number of epochs belongs to the other budget
    assert identical(fed({**MATCH, "epochs": 9}, **half, **decay), base)


def test_refresh_evaluates_what_was_trained() -> None:
    a, b = (ragged(SOLO(**MATCH), rounds=2, pm_protocol=p).run() for p in ("as_trained", "refresh"))
    assert b.protocol.pm_protocol == "as_trained" and identical(models(a), models(b))


@engines
def test_buffers_are_the_client_s_own(engine: str) -> None:
    fed = ragged(SOLO(**MATCH), Tiny(norm=True), engine=engine, rounds=3).run()
    counters = [int(m["encoder.num_batches_tracked"]) for m in models(fed)]
    assert counters == [3 * 2 * -(-n // 8) for n in SIZES]


# ---- vector 3, as the records have it


def test_top_1_of_four_parties() -> None:
    parties = {i: Scored({"network": np.array([[right, 100 - right], [0, 0]])}, None)
               for i, right in enumerate((75, 84, 50, 61))}  # fmt: skip
    row = personal_row(parties, np.full((4, 2), 5), np.array([100, 0]))
    assert row["pm_uniform"] == pytest.approx(0.675) and row["pm_uniform_std"] == pytest.approx(0.130096, abs=5e-7)
    assert row["pm_each"]["uniform"] == [0.75, 0.84, 0.5, 0.61]


# ---- settings and records


def test_presets() -> None:
    for name in protocols.preset_names():
        given = protocols.preset(name)
        given.pop("seeds")
        table = Protocol(**protocols.coerce(given))
        method = Spec("solo", (), name).build(table)
        assert isinstance(method, SOLO)
        family, made = name.split(".")[0], method.adapt(table)
        if family == "fednh":
            assert method == SOLO(budget="match_participation")
            assert (made.rounds, made.local_epochs) == (60 if "r03" in name else 20, 5)
        elif family in ("moon", "fedproc"):
            assert method == SOLO(epochs=300, std_over="parties", std_ddof=0)
            assert (made.rounds, made.local_epochs) == (1, 300)
        else:
            assert method == SOLO() and (made.rounds, made.local_epochs) == (1, table.rounds * table.local_epochs)
    own = Spec("solo", (("epochs", "12"), ("std_over", "seeds")), "moon.cifar10").build(Protocol())
    assert own == SOLO(epochs=12, std_ddof=0)
    assert set(SOLO.open_fields) <= set(fields(Protocol)) - set(fields(SOLO))


@pytest.mark.parametrize(("name", "given"), [("epochs", 0), ("epochs", "E*T"), ("budget", "rounds"), ("std_ddof", 2)])
def test_refused(name: str, given: Any) -> None:
    with pytest.raises(UserError, match=f"solo {name}"):
        Spec("solo", ((name, given),)).build(Protocol())


def cell(seed: int = 0, **options: Any) -> Cell:
    given = protocols.preset("digits.quick")
    given.pop("seeds")
    table = {**given, "rounds": 5, "participation": 0.4, "local_epochs": 1, "seed": seed, "metrics": ("gm",)}
    return Cell(Spec("solo", tuple(options.items()), "digits.quick"), Protocol(**protocols.coerce(table)))


def test_a_run_and_its_record(tmp_path: Path) -> None:
    ready = run.prepare(cell(**GLOBAL, std_over="parties"))
    assert run.play(ready, tmp_path, lambda event: None)["status"] == "finished"
    found = read.read(tmp_path / ready.folder)
    assert (found.status, found.total, found.adapted["table_rounds"]) == ("finished", 2, 5)
    assert found.adapted["rounds"] == 2 and found.protocol["rounds"] == 5
    assert [r["lr"] for r in found.rounds] == [ready.cell.protocol.learning_rate(t) for t in (0, 2)]
    last = found.rounds[-1]
    assert last["gm"] is None and last["clients"] == last["pm_each"]["client"] == list(range(10))
    assert last["pm_uniform"] == pytest.approx(np.mean(last["pm_each"]["uniform"]))
    assert (last["bytes_down"], last["bytes_up"], last["bytes_once"]) == (0, 0, 0)
    assert run.replay(tmp_path / ready.folder, None)["again"]["pm_each"] == last["pm_each"]
    assert len({run.prepare(cell(**o)).digest for o in ({}, MATCH, GLOBAL, {"common_init": False})}) == 4


def test_stopped_and_resumed(tmp_path: Path) -> None:
    asked = cell(**MATCH, common_init=False)

    def stop(event: Any) -> None:
        if event["kind"] == "round":
            raise KeyboardInterrupt

    ready = run.prepare(asked)
    run.play(ready, tmp_path / "straight", lambda event: None)
    with pytest.raises(KeyboardInterrupt):
        run.play(run.prepare(asked), tmp_path / "stopped", stop)
    run.play(run.prepare(asked), tmp_path / "stopped", lambda event: None)
    a, b = (read.read(tmp_path / n / ready.folder).rounds for n in ("straight", "stopped"))
    assert [r["pm_each"] for r in a] == [r["pm_each"] for r in b] and len(a) == 2


# ---- cost, engines


@engines
def test_bill(engine: str) -> None:
    for options in ({}, MATCH):
        fed = ragged(SOLO(**options), Tiny(norm=True), engine=engine, rounds=2, draws=[[4]] * 2).run()
        bill = fed.method.bill()
        floats = sum(v.numel() * (1 if v.is_floating_point() else 2) for v in fed.task.initial.values())
        known = {"P": floats, "E": fed.protocol.local_epochs, "n": SIZES[4]}
        down, up, _, forward, kept = (eval(e, {}, known) for e in bill[:5])
        assert fed.last.bytes == {"down": down, "up": up, "once": 0} and forward == 0
        assert fed.last.state_bytes == 4 * kept
    images = toy(SOLO(), engine=engine, rounds=2).run()
    known = {"E": images.protocol.local_epochs, "n": sum(images.task.sizes)}
    assert images.last.samples == {"trained": eval(bill.trained, {}, known), "forward": 0}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({**MATCH, "common_init": False}, {"augment": Shift(), "drop_last": True, "optimizer_reset": "never"}),
    (GLOBAL, {"grad_clip_norm": 0.5, "lr_decay_per_round": 0.9, "bn_buffers": "local"}),
]


@pytest.mark.parametrize(("options", "kw"), CASES, ids=str)
def test_engines_agree(options: dict[str, Any], kw: dict[str, Any]) -> None:
    a, b = (ragged(SOLO(**options), Tiny(norm=True), engine=e, participation=0.5, rounds=4, **kw).run()
            for e in ENGINES)  # fmt: skip
    assert gap(state(a), state(b)) < 1e-12 and gap(models(a), models(b)) < 1e-12
    assert a.bytes == b.bytes and a.terms[-1] == pytest.approx(b.terms[-1])


def test_engines_agree_on_images() -> None:
    a, b = (toy(SOLO(**GLOBAL), engine=e, rounds=3).run() for e in ENGINES)
    assert toy_gap(everything(a), everything(b)) < 1e-10
