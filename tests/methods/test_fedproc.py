"""FedProc: the test vectors, every option, what is equal by construction, traps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, Identity, batch, federation, view
from protofl.methods.fedavg import FedAvg
from protofl.methods.fedproc import FedProc
from protofl.methods.moon import MOON
from ragged import CLASSES, SIZES, Shift, Tiny, by_hand, digits, gap, identical, ragged, state, table
from torch import Tensor

from protofl import rng
from protofl.errors import UserError
from protofl.handles import RunServer
from protofl.nets import build
from protofl.options import fields, option
from protofl.protocol import Protocol
from protofl.registry import Spec
from protofl.tree import Rows, Tree

engines = pytest.mark.parametrize("engine", ENGINES)

C = [[3.0, 0, 4], [0, 2, 0], [-1, -1, 0.5]]
ALL = [True, True, True]
HEAD = [[0.5, -0.5, 0], [0, 0.5, 0.5], [1, 0, 0]]


# ---- vectors of one batch, through the engines


def answer(
    method: FedProc, z: Any, y: Any, engine: str, *, proto: Rows | None = None, own: Rows | None = None,
    t: int = 1, head: Any = HEAD, z_normalize: bool = False,
) -> dict[str, float]:  # fmt: skip
    """The loss terms of one step of one client whose features are z, in round t of 4."""
    x = torch.tensor(z, dtype=torch.float64)
    initial = Tree({"head.weight": torch.tensor(head, dtype=torch.float64)})
    fed = federation(method, Identity(3, 3, z_normalize), x, torch.tensor(y), [range(len(y))], engine=engine,
                     initial=initial, local_epochs=1, rounds=4)  # fmt: skip
    fed.shared = fed.shared | Tree(proto=proto or table(C, ALL))
    if own is not None:
        fed.memory.put(0, Tree(own=Tree(proto=own)))
    return fed.play(t).terms


@engines
@pytest.mark.parametrize(
    ("options", "values", "has", "wanted"),
    [
        ({}, C, ALL, 0.808023),
        ({"gpc_denominator": "literal_double"}, C, ALL, 1.176644),
        ({"gpc_temperature": 0.5}, C, ALL, 0.678041),
        ({"gpc_temperature": 0.1}, C, ALL, 0.414375),
        ({}, [C[0], [0, 0, 0], C[2]], ALL, 0.581247),  # kept as a zero row
        ({}, C, [True, False, True], 0.268470),  # masked
        ({}, [C[0], [0, 0, 0], C[2]], [True, False, True], 0.268470),
    ],
)
def test_pull(engine: str, options: dict[str, Any], values: Any, has: list[bool], wanted: float) -> None:
    terms = answer(FedProc(**options), [[1, 2, 2]], [0], engine, proto=table(values, has))
    assert terms["gpc"] == pytest.approx(wanted, abs=5e-7)


@engines
@pytest.mark.parametrize(("z_normalize", "ce", "loss"), [(False, 2.871539, 1.323902), (True, 1.599326, 1.005849)])
def test_loss(engine: str, z_normalize: bool, ce: float, loss: float) -> None:
    terms = answer(FedProc(), [[1, 2, 2]], [0], engine, z_normalize=z_normalize)
    assert terms["alpha"] == 0.75
    assert [terms["ce"], terms["loss"]] == pytest.approx([ce, loss], abs=5e-7)


ROWS, LABELS = [[1, 2, 2], [0, 1, 0], [0, 0, 0], [-1, 0, 1]], [0, 1, 0, 2]


@engines
@pytest.mark.parametrize(("has", "wanted"), [([True, False, True], 0.239418), (ALL, 0.493459), ([False] * 3, 0.0)])
@pytest.mark.parametrize("z_normalize", [False, True])
def test_batch_with_a_zero_row(engine: str, has: list[bool], wanted: float, z_normalize: bool) -> None:
    terms = answer(FedProc(), ROWS, LABELS, engine, proto=table(C, has), z_normalize=z_normalize)
    assert terms["gpc"] == pytest.approx(wanted, abs=5e-7)


OWN = table([[0, 0, 1], [0, 1, 0], [7, 7, 7]], [True, True, False])


@engines
@pytest.mark.parametrize(
    ("source", "wanted"), [("global", 0.808023), ("local", 0.693147), ("global_pos_local_neg", 0.660369)]
)
def test_own_means(engine: str, source: str, wanted: float) -> None:
    method = FedProc(loss_prototype_source=source)
    assert answer(method, [[1, 2, 2]], [0], engine, own=OWN)["gpc"] == pytest.approx(wanted, abs=5e-7)
    # a client without any uses the global ones
    assert answer(method, [[1, 2, 2]], [0], engine)["gpc"] == pytest.approx(0.808023, abs=5e-7)
    # whose mask counts: the positive's, the client's own or the server's
    out = answer(method, [[1, 2, 2]], [0], engine, own=OWN, proto=table(C, [False, True, True]))["gpc"]
    assert (out == 0) == (source != "local")
    missing = Rows(OWN.values, torch.tensor([False, True, False]))
    out = answer(method, [[1, 2, 2]], [0], engine, own=missing)["gpc"]
    assert (out == 0) == (source == "local")


def pulled(z: Tensor, y: Any, proto: Rows, method: FedProc | None = None) -> Tensor:
    """L_gpc of a batch."""
    b = batch(z, y)
    return b.mean(*(method or FedProc()).pull(z, b.y, proto, proto))


@pytest.mark.parametrize("lifted", [False, True], ids=["plain", "vmap"])
def test_gradients(lifted: bool) -> None:
    def gradient(z: Any, y: Any, proto: Rows, method: FedProc | None = None) -> list[list[float]]:
        one = torch.func.grad(lambda v: pulled(v, y, proto, method))
        z = torch.tensor(z, dtype=torch.float64)
        out = torch.func.vmap(one)(torch.stack([z + 1, z]))[1] if lifted else one(z)
        return out.tolist()  # type: ignore[no-any-return]

    found = gradient([[1, 2, 2]], [0], table(C, ALL))[0]
    assert found == pytest.approx([-0.120304, 0.150598, -0.090446], abs=5e-7)
    assert sum(a * b for a, b in zip(found, (1, 2, 2))) == pytest.approx(0, abs=1e-12)
    # no gradient through a row without direction, and none of the others is touched by it
    for method in (FedProc(), FedProc(gpc_denominator="literal_double", gpc_temperature=0.1)):
        for dead in (0.0, 1e-7, 1e-200):
            rows = gradient([[1, 2, 2], [dead, 0, 0]], [0, 0], table(C, ALL), method)
            alone = gradient([[1, 2, 2]], [0], table(C, ALL), method)[0]
            assert rows[1] == [0, 0, 0] and rows[0] == pytest.approx([v / 2 for v in alone])
    # masked rows may hold anything finite
    for row in ([0, 0, 0], [1e30, 0, 0], [1e-300, 0, 0]):
        masked = gradient([[1, 2, 2]], [0], table([C[0], row, C[2]], [True, False, True]))
        assert masked == [pytest.approx(gradient([[1, 2, 2]], [0], table(C, [True, False, True]))[0])]
    assert gradient([[1, 2, 2]], [0], table(C, [False, True, True])) == [[0, 0, 0]]


@pytest.mark.parametrize(("classes", "floor"), [(10, 0.796614), (100, 2.667103)])
def test_raw_cosine_bounds_the_loss(classes: int, floor: float) -> None:
    # the best case: the positive at cosine 1, all others at -1
    proto = torch.full((classes, 2), -1.0).double()
    proto[0] = 1
    found = pulled(torch.ones(1, 2).double(), [0], Rows(proto, torch.ones(classes, dtype=torch.bool)))
    assert float(found) == pytest.approx(floor, abs=5e-7)


# ---- aggregation of prototypes


def two_clients(method: FedProc, engine: str, **kw: Any) -> Harnessed:
    """p_10 = (1, 0) of 3, p_11 = (0, 1) of 1; p_20 = (.6, .8) of 1, no class 1; nobody has class 2."""
    x = torch.tensor([[1, 0], [0.5, 0.5], [1.5, -0.5], [0, 1], [0.6, 0.8]], dtype=torch.float64)
    return federation(
        method,
        Identity(3, 2),
        x,
        torch.tensor([0, 0, 0, 1, 0]),
        [[0, 1, 2, 3], [4]],
        engine=engine,
        rounds=4,
        **kw,
    )


@engines
@pytest.mark.parametrize(
    ("options", "zero", "one"),
    [
        ({}, [0.8, 0.4], [0, 1]),
        ({"proto_weighting": "count"}, [0.9, 0.2], [0, 1]),
        ({"empty_class": "zero_fill"}, [0.8, 0.4], [0, 0.5]),
        ({"empty_class": "carry_received"}, [0.8, 0.4], [-0.5, 0.5]),
        ({"empty_class": "zero_fill", "proto_weighting": "count"}, [0.9, 0.2], [0, 1]),
        ({"empty_class": "carry_received", "proto_weighting": "count"}, [0.9, 0.2], [0, 1]),
    ],
)
def test_adopt(engine: str, options: dict[str, Any], zero: list[float], one: list[float]) -> None:
    fed = two_clients(FedProc(**options), engine)
    fed.shared = fed.shared | Tree(proto=table([[0, 0], [-1, 0], [0, 0]], [False, True, False]))
    fed.play(1)
    found = fed.shared.proto
    assert found.has.tolist() == [True, True, False]
    assert found.values[:2].tolist() == [pytest.approx(zero), pytest.approx(one)]
    assert [u.n.tolist() for u in fed.last.uploads] == [[3, 1, 0], [1, 0, 0]]
    assert all(u.n.dtype == torch.int64 for u in fed.last.uploads)


@engines
def test_carry_received_skips_an_invalid_row(engine: str) -> None:
    carry, skip = (two_clients(FedProc(empty_class=e), engine) for e in ("carry_received", "skip"))
    for fed in (carry, skip):
        fed.introduce()
    assert identical(carry.shared.proto, skip.shared.proto)


@engines
def test_skip_and_zero_fill_have_one_direction(engine: str) -> None:
    skip, fill = (ragged(FedProc(empty_class=e), engine=engine).run() for e in ("skip", "zero_fill"))
    assert gap(skip.shared.net, fill.shared.net) < 1e-12
    assert gap(skip.shared.proto, fill.shared.proto) > 1e-3
    carry = ragged(FedProc(empty_class="carry_received"), engine=engine).run()
    assert gap(skip.shared.net, carry.shared.net) > 1e-6
    counted = [ragged(FedProc(empty_class=e, proto_weighting="count"), engine=engine).run()
               for e in ("skip", "zero_fill", "carry_received")]  # fmt: skip
    assert identical(counted[0].shared, counted[1].shared) and identical(counted[0].shared, counted[2].shared)
    assert gap(skip.shared.net, counted[0].shared.net) > 1e-6


@engines
def test_uniform_is_count_for_equal_counts(engine: str) -> None:
    x = torch.tensor([[1, 2], [3, 1], [0, 1], [2, 2]], dtype=torch.float64)
    made = [
        federation(
            FedProc(proto_weighting=w),
            Identity(2, 2),
            x,
            torch.tensor([0, 1, 0, 1]),
            [[0, 1], [2, 3]],
            engine=engine,
        ).run()
        for w in ("uniform", "count")
    ]
    assert gap(made[0].shared, made[1].shared) < 1e-12


@engines
@pytest.mark.parametrize(
    ("absent", "values", "has"),
    [
        # class 0: held in both exchanges; 1: in the first alone; 2: never
        ("keep_mask", [[0.6, 0.8], [0, 1], [0, 0]], [True, True, False]),
        ("keep_zero", [[0.6, 0.8], [0, 1], [0, 0]], [True, True, True]),
        ("drop", [[0.6, 0.8], [0, 1], [0, 0]], [True, False, False]),
    ],
)
@pytest.mark.parametrize("empty", ["skip", "zero_fill", "carry_received"])
@pytest.mark.parametrize("weighting", ["uniform", "count"])
def test_absent_class(engine: str, absent: str, values: Any, has: list[bool], empty: str, weighting: str) -> None:
    method = FedProc(absent_class=absent, empty_class=empty, proto_weighting=weighting)
    fed = two_clients(method, engine, draws=[[0, 1], [1]])
    assert not fed.shared.proto.has.any()
    fed.introduce()
    assert fed.shared.proto.has.tolist() == [True, True, absent == "keep_zero"]
    fed.play(1)
    assert fed.shared.proto.has.tolist() == has
    halved = empty == "zero_fill" and weighting == "uniform"
    wanted = [values[0], [0, 0.5] if halved else values[1], values[2]]
    assert fed.shared.proto.values.tolist() == [pytest.approx(row) for row in wanted]
    fed.draws = [[0, 1]] * 3
    fed.play(2)  # whoever comes back is valid again
    assert fed.shared.proto.has.tolist() == [True, True, absent == "keep_zero"]


def test_rows_that_are_not_there_are_not_read() -> None:
    fed = two_clients(FedProc(), "loop")
    uploads = [
        Tree(proto=table([[2, 2], [7, 7], [8, 8]], [True, False, False]), n=torch.tensor([1, 0, 0])),
        Tree(proto=table([[5, 5], [4, 4], [9, 9]], [False, True, False]), n=torch.tensor([0, 1, 0])),
    ]
    for empty, one in (("skip", 2), ("carry_received", 2), ("zero_fill", 1)):
        server = RunServer(fed.task, [0, 1], 0)
        shared, _ = FedProc(empty_class=empty).adopt(server, fed.shared, fed.private, uploads)
        assert shared.proto.values.tolist() == [[one, one], [2 * one, 2 * one], [0, 0]]


@engines
def test_absent_class_has_no_effect_where_every_class_is_held(engine: str) -> None:
    results = [ragged(FedProc(absent_class=a), engine=engine).run().shared for a in ("keep_mask", "keep_zero", "drop")]
    assert identical(results[0], results[1]) and identical(results[0], results[2])
    draws = [[0, 2], [0, 1], [3, 4]]  # class 4 in the first exchange alone
    results = [ragged(FedProc(absent_class=a), engine=engine, draws=draws).run().shared.net
               for a in ("keep_mask", "drop")]  # fmt: skip
    assert gap(*results) > 1e-6


@engines
def test_a_mean_of_nothing_is_not_valid(engine: str) -> None:
    # class 0 cancels out: present on the wire, without direction at the server
    x = torch.tensor([[1, 0], [-1, 0], [0, 1]], dtype=torch.float64)
    for absent in ("keep_mask", "keep_zero"):
        fed = federation(
            FedProc(absent_class=absent),
            Identity(3, 2),
            x,
            torch.tensor([0, 0, 1]),
            [[0, 1, 2], [2]],
            engine=engine,
            draws=[[0], [1]],
            rounds=2,
        )
        fed.introduce()
        assert fed.last.bytes["up"] == 2 * 2 * 4 + 3 * 8
        assert fed.shared.proto.has.tolist() == [False, True, absent == "keep_zero"]
        fed.play(1)  # seen, so that it does not become a zero row
        assert fed.shared.proto.has.tolist() == [False, True, absent == "keep_zero"]


@engines
def test_all_latest(engine: str) -> None:
    full = [ragged(FedProc(proto_participants=p), engine=engine).run() for p in ("sampled", "all_latest")]
    assert identical(full[0].shared, full[1].shared)
    fed = two_clients(FedProc(proto_participants="all_latest"), engine, draws=[[0, 1], [1], [0]])
    fed.introduce()
    fed.play(1)
    assert fed.shared.proto.values[:2].tolist() == [pytest.approx([0.8, 0.4]), pytest.approx([0, 1])]
    assert "latest" not in fed.shared and sorted(fed.private.latest) == ["0", "1"]
    sampled = two_clients(FedProc(), engine, draws=[[0, 1], [1], [0]])
    sampled.introduce()
    sampled.play(1)
    assert sampled.shared.proto.values[0].tolist() == pytest.approx([0.6, 0.8])
    # a stale filled row is what the client knew when it was there: C_1 = (-1, 0) at that time
    stale = two_clients(FedProc(proto_participants="all_latest", empty_class="carry_received"), engine,
                        draws=[[1], [1], [0]])  # fmt: skip
    stale.shared = stale.shared | Tree(proto=table([[0, 0], [-1, 0], [0, 0]], [False, True, False]))
    stale.play(1)
    stale.play(2)
    assert stale.shared.proto.values[1].tolist() == pytest.approx([-0.5, 0.5])


def test_order_of_clients_is_by_number() -> None:
    fed = ragged(FedProc(proto_participants="all_latest"), rounds=1)
    big = [Tree(proto=Rows(torch.full((CLASSES, 3), v).double(), torch.ones(CLASSES, dtype=torch.bool)),
                n=torch.ones(CLASSES, dtype=torch.int64)) for v in (1e16, -1e16, 1.0)]  # fmt: skip
    for ids in ([2, 10, 11], [10, 11, 100]):
        server = RunServer(fed.task, [0, 1, 2], 0)
        server.ids = ids
        shared, _ = fed.method.adopt(server, fed.shared, fed.private, big)
        assert float(shared.proto.values[0, 0]) == 1 / 3


# ---- alpha

SCHEDULES = [
    ({}, [1, 0.75, 0.5, 0.25]),
    ({"schedule_t0": 1}, [0.75, 0.5, 0.25, 0]),
    ({"alpha_schedule": "linear_100"}, [1, 0.99, 0.98, 0.97]),
    ({"alpha_schedule": "linear_100", "round0_loss": "ce_only"}, [0, 0.99, 0.98, 0.97]),
    ({"alpha_schedule": "linear_T_minus_1"}, [1, 2 / 3, 1 / 3, 0]),
    ({"alpha_schedule": "linear_T_minus_1", "schedule_t0": 1}, [2 / 3, 1 / 3, 0, 0]),
    ({"alpha_schedule": "reverse"}, [0, 0.25, 0.5, 0.75]),
    ({"alpha_schedule": "const_0.5"}, [0.5] * 4),
    ({"alpha_schedule": "ce_only"}, [0] * 4),
    ({"alpha_schedule": "gpc_only", "eval_head": "prototype"}, [1] * 4),
    ({"alpha_schedule": "gpc_only", "eval_head": "prototype", "proto_init": "zeros_masked"}, [0, 1, 1, 1]),
    ({"proto_init": "zeros_masked"}, [0, 0.75, 0.5, 0.25]),
    ({"round0_loss": "ce_only"}, [0, 0.75, 0.5, 0.25]),
    ({"alpha_granularity": "epoch"}, [15 / 16, 11 / 16, 7 / 16, 3 / 16]),  # means over the two epochs
    ({"alpha_granularity": "step"}, [29 / 32, 21 / 32, 13 / 32, 5 / 32]),  # over the four steps
]


@engines
@pytest.mark.parametrize(("options", "wanted"), SCHEDULES, ids=lambda o: "-".join(map(str, o)) or "default")
def test_alpha_of_a_round(engine: str, options: dict[str, Any], wanted: list[float]) -> None:
    # two clients of two batches, E = 2, T = 4: tau = 4 steps
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fed = federation(FedProc(**options), Identity(2, 2), x, torch.tensor([0, 1, 1, 0]), [[0, 1], [2, 3]],
                     engine=engine, rounds=4, local_epochs=2, batch_size=1).run()  # fmt: skip
    assert [t["alpha"] for t in fed.terms if t] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("granularity", "at", "wanted"),
    [("epoch", {"epoch": 2.0}, [[1, 0.875], [0.75, 0.625], [0.5, 0.375], [0.25, 0.125]]),
     ("step", {"step": 4.0}, [[1, 0.9375, 0.875, 0.8125], None, None, [0.25, 0.1875, 0.125, 0.0625]])],
)  # fmt: skip
def test_alpha_within_a_round(granularity: str, at: dict[str, float], wanted: list[Any]) -> None:
    (name, parts), method = next(iter(at.items())), FedProc(alpha_granularity=granularity)
    total = torch.tensor(parts).double()
    for t, row in enumerate(wanted):
        for k, value in enumerate(row or ()):
            b = batch([[0.0]], [0], **{name: torch.tensor(float(k)).double()})
            assert float(method.alpha(b, view(round=t, epochs=total, steps=total))) == value


def test_one_round_of_linear_T_minus_1() -> None:
    for granularity in ("round", "epoch"):
        method = FedProc(alpha_schedule="linear_T_minus_1", alpha_granularity=granularity)
        assert float(method.alpha(batch([[0.0]], [0], epoch=torch.tensor(0.0)), view(rounds=1))) == 1


def test_linear_100_is_linear_T_at_100() -> None:
    for t, t0 in itertools.product((0, 1, 57, 99), (0, 1)):
        a, b = (FedProc(alpha_schedule=s, schedule_t0=t0) for s in ("linear_T", "linear_100"))
        one = batch([[0.0]], [0])
        assert a.alpha(one, view(round=t, rounds=100)) == b.alpha(one, view(round=t, rounds=100))
    assert FedProc(alpha_schedule="linear_100").alpha(one, view(round=150, rounds=200)) == 0


def test_gpc_only_needs_the_prototype_head() -> None:
    with pytest.raises(UserError, match="eval_head=prototype"):
        FedProc(alpha_schedule="gpc_only")
    FedProc(alpha_schedule="gpc_only", eval_head="prototype")


# ---- against a plain script


@engines
@pytest.mark.parametrize("z_normalize", [False, True])
@pytest.mark.parametrize("source", ["global", "local"])
def test_by_hand(engine: str, z_normalize: bool, source: str) -> None:
    fed = ragged(FedProc(loss_prototype_source=source), Tiny(z_normalize=z_normalize), engine=engine,
                 participation=0.5, rounds=3).run()  # fmt: skip
    net, parts, x, y = fed.task.net, fed.task.parts, fed.task.x, fed.task.y
    means: dict[int, dict[int, Tensor]] = {}
    proto: dict[int, Tensor] = {}

    def survey(w: Tree, t: int, i: int) -> None:
        z = net.embed(w, x[parts[i]]).detach()
        means[i] = {c: z[y[parts[i]] == c].mean(0) for c in y[parts[i]].unique().tolist()}
        arrived[i] = means[i]

    def adopt(t: int) -> None:
        for c in range(CLASSES):
            held = [m[c] for _, m in sorted(arrived.items()) if c in m]
            if held:
                proto[c] = torch.stack(held).mean(0)
        arrived.clear()

    def loss(w: Tree, x: Tensor, y: Tensor, received: Tree, t: int, i: int) -> Tensor:
        z = net.embed(w, x)
        known = (means.get(i) if source == "local" else None) or proto
        ids = sorted(known)
        sims = F.cosine_similarity(z[:, None], torch.stack([known[c] for c in ids])[None], dim=-1)
        rows = [k for k, c in enumerate(y.tolist()) if c in known]
        gpc = F.cross_entropy(sims[rows], torch.tensor([ids.index(int(y[k])) for k in rows])) if rows else 0.0
        alpha = 1 - t / 3
        return alpha * gpc + (1 - alpha) * F.cross_entropy(net(w, x), y)

    arrived: dict[int, dict[int, Tensor]] = {}
    for i in fed.taking_part(0):
        survey(fed.task.initial, -1, i)
    adopt(-1)
    assert gap(by_hand(fed, loss, survey, adopt), fed.shared.net) < 1e-12
    assert fed.shared.proto.has.tolist() == [c in proto for c in range(CLASSES)]
    assert all(gap(fed.shared.proto.values[c], row) < 1e-12 for c, row in proto.items())


@engines
def test_digits(engine: str) -> None:
    wanted = [(10.1046227038, 2.3113150074), (10.1206231993, 2.3128166775)][: 1 if engine == "loop" else 2]
    assert digits(FedProc(), len(wanted), engine) == [pytest.approx(pair, abs=1e-9) for pair in wanted]


# ---- before round 0


@engines
def test_first_clients_bring_means_of_the_initial_model(engine: str) -> None:
    fed = ragged(FedProc(), engine=engine, participation=0.5, augment=Shift())
    fed.introduce()
    assert fed.last.ids == fed.taking_part(0)
    total, n = torch.zeros(CLASSES, 3).double(), torch.zeros(CLASSES).double()
    for i in fed.last.ids:
        rows = fed.task.parts[i]
        moved = torch.from_numpy(rng.private("fedproc", "survey", 0, -1, i).random_sample((len(rows), 1)))
        z = fed.task.net.embed(fed.task.initial, fed.task.x[rows] + moved)
        hot = F.one_hot(fed.task.y[rows], CLASSES).double()
        total += hot.T @ z / hot.sum(0).clamp_min(1)[:, None]
        n += (hot.sum(0) > 0).double()
    assert gap(fed.shared.proto, Rows(total / n.clamp_min(1)[:, None], n > 0)) < 1e-12
    assert identical(fed.shared.net, fed.task.initial)


@engines
def test_surveys_leave_training_alone(engine: str) -> None:
    # CE alone: whatever the survey draws, the model is FedAvg's
    kw = {
        "engine": engine,
        "augment": Shift(),
        "drop_last": True,
        "participation": 0.5,
        "grad_clip_norm": 0.7,
    }
    plain = ragged(FedAvg(), **kw).run().shared.net
    for options in (
        {},
        {"proto_drop_last": True},
        {"proto_bn_mode": "train_frozen_stats"},
        {"proto_transform": "test"},
    ):
        assert identical(ragged(FedProc(alpha_schedule="ce_only", **options), **kw).run().shared.net, plain)


@engines
def test_ce_only_is_fedavg_unless_the_survey_moves_buffers(engine: str) -> None:
    kw = {"engine": engine, "rounds": 2}
    plain = ragged(FedAvg(), Tiny(norm=True), **kw).run().shared.net
    for mode, same in (("eval", True), ("train_frozen_stats", True), ("train", False)):
        fed = ragged(FedProc(alpha_schedule="ce_only", proto_bn_mode=mode), Tiny(norm=True), **kw).run()
        assert identical(fed.shared.net, plain) is same
    # the train-mode pass of every round counts: 2 rounds of 2 epochs and a survey, 4 batches each
    assert int(fed.shared.net["encoder.num_batches_tracked"]) == 2 * (2 + 1) * 4


@engines
def test_round_0_without_prototypes_is_cross_entropy(engine: str) -> None:
    masked = [ragged(FedProc(proto_init="zeros_masked", round0_loss=r), engine=engine).run()
              for r in ("as_scheduled", "ce_only")]  # fmt: skip
    assert identical(masked[0].shared, masked[1].shared)
    assert masked[0].rounds[0].t == 0  # no exchange before round 0
    first = ragged(FedProc(proto_init="zeros_masked"), engine=engine, rounds=1).run()
    assert identical(first.shared.net, ragged(FedAvg(), engine=engine, rounds=1).run().shared.net)
    for options in ({"alpha_schedule": "ce_only"}, {"alpha_schedule": "reverse"}):
        pair = [ragged(FedProc(round0_loss=r, **options), engine=engine).run() for r in ("as_scheduled", "ce_only")]
        assert identical(pair[0].shared, pair[1].shared)
    pair = [ragged(FedProc(round0_loss=r), engine=engine, rounds=1).run() for r in ("as_scheduled", "ce_only")]
    assert gap(pair[0].shared.net, pair[1].shared.net) > 1e-6


@engines
def test_weight_decay_acts_on_the_classifier_in_round_0(engine: str) -> None:
    # alpha = 1: its gradient is exactly 0, yet it shrinks by 1 - 0.1 * 0.01 a step
    fed = ragged(FedProc(), engine=engine, rounds=1, momentum=0.0, draws=[[0]]).run()
    for name in ("head.weight", "head.bias"):
        assert gap(fed.shared.net[name], fed.task.initial[name] * (1 - 1e-3) ** (2 * 3)) < 1e-14


@engines
def test_auxiliary_classifier_is_trained_as_in_fedavg(engine: str) -> None:
    net = build("mlp", classes=3, shape=(2, 3, 1), projection_dim=4, aux_classifier=True)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 1, 2, 3, generator=g, dtype=torch.float64), torch.arange(9) % 3
    made = [federation(m, net, x, y, [range(4), range(4, 9)], engine=engine, momentum=0.9, batch_size=2).run()
            for m in (FedAvg(), FedProc(alpha_schedule="ce_only"), MOON(second_term="none"))]  # fmt: skip
    assert gap(made[0].shared.net, made[1].shared.net) < 1e-14 > gap(made[0].shared.net, made[2].shared.net)
    # its cross-entropy has weight 1 whatever alpha says
    aux = [
        federation(
            FedProc(alpha_schedule=a, eval_head="prototype"),
            net,
            x,
            y,
            [range(9)],
            engine=engine,
            local_epochs=1,
        )
        .run()
        .shared.net["aux.bias"]
        for a in ("ce_only", "gpc_only")
    ]
    assert gap(aux[0], aux[1]) < 1e-14 and gap(aux[0], made[0].task.initial["aux.bias"]) > 1e-6


@engines
def test_random_unit(engine: str) -> None:
    fed = ragged(FedProc(proto_init="random_unit"), engine=engine, seed=2)
    rows = torch.from_numpy(rng.private("fedproc", "init", 2, -1, -1).standard_normal((CLASSES, 3)))
    assert gap(fed.shared.proto.values, rows / rows.norm(dim=1, keepdim=True)) < 1e-15
    assert bool(fed.shared.proto.has.all()) and fed.introduce() is None
    assert gap(fed.run().shared.net, ragged(FedProc(), engine=engine, seed=2).run().shared.net) > 1e-6


@pytest.mark.parametrize(
    ("net", "width"),
    [(Tiny(), 3), (Tiny(projected=None), 4)],
    ids=["projection", "no projection"],
)
def test_prototypes_live_where_z_lives(net: Tiny, width: int) -> None:
    assert ragged(FedProc(), net).shared.proto.values.shape == (CLASSES, width)
    made = build("mlp", classes=10, shape=(8, 8, 1), projection_dim=32, classifier_input="r")
    x = torch.zeros(2, 1, 8, 8)
    fed = federation(FedProc(), made, x, torch.tensor([0, 1]), [[0], [1]], local_epochs=1, precision="fp32").run()
    assert fed.shared.proto.values.shape == (10, 32)  # z, also where the output layer reads r
    assert fed.shared.proto.values.dtype == torch.float32


# ---- options of the survey


@engines
def test_proto_bn_mode(engine: str) -> None:
    kw = {"engine": engine, "rounds": 2}
    bare = [ragged(FedProc(proto_bn_mode=m), **kw).run() for m in ("eval", "train_frozen_stats", "train")]
    assert gap(state(bare[0]), state(bare[1])) < 1e-12 and gap(state(bare[0]), state(bare[2])) < 1e-12
    made = {m: ragged(FedProc(proto_bn_mode=m), Tiny(norm=True), **kw) for m in ("eval", "train_frozen_stats", "train")}
    for fed in made.values():
        fed.introduce()
        assert identical(fed.shared.net, fed.task.initial)  # the exchange before round 0 uploads no model
    protos = [fed.shared.proto for fed in made.values()]
    assert gap(protos[0], protos[1]) > 1e-6
    assert gap(protos[1], protos[2]) < 1e-12  # both read batch statistics
    made["eval"].play(0)
    made["train"].play(0)
    counts = [int(made[m].shared.net["encoder.num_batches_tracked"]) for m in ("eval", "train")]
    assert counts == [2 * 4, 3 * 4]


@engines
def test_proto_transform(engine: str) -> None:
    moved, still = (ragged(FedProc(proto_transform=p), engine=engine, augment=Shift()).run() for p in ("train", "test"))
    assert gap(moved.shared.proto, still.shared.proto) > 1e-6
    same = [ragged(FedProc(proto_transform=p), engine=engine).run() for p in ("train", "test")]
    assert identical(state(same[0]), state(same[1]))  # nothing is random


@engines
def test_proto_drop_last(engine: str) -> None:
    fed = ragged(FedProc(proto_drop_last=True), engine=engine)
    fed.introduce()
    read = [int(u.n.sum()) for u in fed.last.uploads]
    assert read == [n // 8 * 8 if n >= 8 else n for n in SIZES]  # a client's only batch is read
    whole = ragged(FedProc(), engine=engine)
    whole.introduce()
    assert [int(u.n.sum()) for u in whole.last.uploads] == list(SIZES)
    assert gap(fed.shared.proto, whole.shared.proto) > 1e-6


@engines
def test_the_exchange_before_round_0_counts_as_own_means(engine: str) -> None:
    for source in ("local", "global_pos_local_neg"):
        fed = ragged(FedProc(loss_prototype_source=source), engine=engine, draws=[[0, 1], [0, 2]], rounds=2)
        fed.introduce()
        assert identical(fed.own(0).proto, fed.last.uploads[0].proto) and not fed.own(2)
        fed.play(0)
        fed.play(1)
        assert identical(fed.own(2).proto, fed.last.uploads[1].proto)
        assert identical(fed.own(1).proto, fed.rounds[1].uploads[1].proto)
    base = ragged(FedProc(), engine=engine, draws=[[0, 1], [0, 2]], rounds=2).run()
    assert not base.own(0)
    assert gap(base.shared.net, fed.shared.net) > 1e-6


@engines
def test_remaining_options_move_the_result(engine: str) -> None:
    base = ragged(FedProc(), engine=engine).run().shared.net
    for o in (
        {"gpc_denominator": "literal_double"},
        {"gpc_temperature": 0.5},
        {"alpha_schedule": "linear_100"},
        {"alpha_schedule": "linear_T_minus_1"},
        {"alpha_schedule": "const_0.5"},
        {"alpha_schedule": "reverse"},
        {"alpha_granularity": "epoch"},
        {"alpha_granularity": "step"},
        {"schedule_t0": 1},
    ):
        assert gap(ragged(FedProc(**o), engine=engine).run().shared.net, base) > 1e-6, o


# ---- evaluation


@engines
@pytest.mark.parametrize("head", ["classifier", "prototype"])
def test_heads(engine: str, head: str) -> None:
    fed = ragged(FedProc(eval_head=head), engine=engine, draws=[[0, 1], [3, 4], [0, 6]]).run()
    x = fed.task.x[:9]
    for model in (fed.global_model(), *fed.personal().values(), *fed.refreshed().values()):
        scores = fed.scores(model, x)
        assert list(scores) == [head, *{"classifier", "prototype"} - {head}] and model.loss == "classifier"
        assert torch.equal(scores["classifier"], fed.task.net(model.tree.net, x))
        near = F.cosine_similarity(
            fed.task.net.embed(model.tree.net, x)[:, None], model.tree.proto.values[None], dim=-1
        )
        has = fed.shared.proto.has
        assert gap(scores["prototype"][:, has], near[:, has]) < 1e-12
        assert has.tolist() == [True] * 4 + [False] and bool((scores["prototype"][:, ~has] == -math.inf).all())
        assert identical(model.tree.proto, fed.shared.proto)  # C^{t+1}
    assert identical(fed.personal()[fed.last.ids[0]].tree.net, fed.last.uploads[0].net)


def test_eval_head_changes_nothing_but_the_headline() -> None:
    a, b = (ragged(FedProc(eval_head=h)).run() for h in ("classifier", "prototype"))
    assert identical(state(a), state(b))


@pytest.mark.parametrize("head", ["classifier", "prototype"])
def test_no_valid_class(head: str) -> None:
    fed = ragged(FedProc(eval_head=head, proto_init="zeros_masked"))
    scores = fed.scores(fed.global_model(), fed.task.x[:3])
    assert next(iter(scores)) == head and scores["prototype"] is None and scores["classifier"] is not None


def test_prototypes_for_the_record() -> None:
    fed = ragged(FedProc()).run()
    assert identical(fed.method.prototypes(fed.shared, fed.private), fed.shared.proto)
    rows, ids = fed.method.client_prototypes(fed.last.uploads[1])
    assert rows.shape == (1, 3) and ids.tolist() == [0]


# ---- presets, fields, bytes, engines


def test_presets() -> None:
    assert Spec("fedproc", (("preset", "paper"),)).build(Protocol()) == FedProc()
    code = (("preset", "official_code"),)
    right = Protocol(z_normalize=True, client_lr=0.1, drop_last=True)
    assert Spec("fedproc", code).build(right) == FedProc(
        preset="official_code", proto_weighting="count", alpha_schedule="linear_100", round0_loss="ce_only",
        absent_class="keep_zero", proto_bn_mode="train", proto_transform="train", proto_drop_last=True,
    )  # fmt: skip
    kept = Spec("fedproc", (*code, ("proto_weighting", "uniform"))).build(right)
    assert (kept.proto_weighting, kept.absent_class) == ("uniform", "keep_zero")
    for wrong in ({"z_normalize": False}, {"client_lr": 0.01}, {"drop_last": False}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Spec("fedproc", code).build(right.replace(**wrong))


def test_fields() -> None:
    assert set(FedProc.open_fields) <= set(fields(Protocol)) - set(fields(FedProc))
    for name, field in fields(FedProc).items():
        assert option(field).why and option(field).source and field.default in option(field).readings, name


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_of_simple_cnn(engine: str) -> None:
    net = build("simple_cnn", classes=10, shape=(32, 32, 3))
    y = torch.tensor([*range(10), 3, 3, 7])
    x = torch.rand(13, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    fed = federation(FedProc(), net, x, y, [range(10), range(10, 13)], engine=engine, local_epochs=1, precision="fp32")
    weights, row = 370_504, 256 * 4
    fed.run()
    first, round_0 = fed.bytes
    # before round 0: P down, K_i Q + K int up
    assert first == {"down": 2 * weights, "up": (10 + 2) * row + 2 * 10 * 8, "once": 0}
    # P + K_t Q down (at most 380 744), P + K_i Q + K int up (at most 380 824)
    assert round_0["down"] == 2 * 380_744
    assert round_0["up"] == 380_824 + (weights + 2 * row + 80)


@engines
def test_only_present_rows_travel(engine: str) -> None:
    fed = ragged(FedProc(), engine=engine, draws=[[1], [0, 1]], rounds=2).run()
    weights = sum(v.numel() for v in fed.shared.net.values()) * 4
    assert fed.bytes[0] == {"down": weights, "up": 1 * 3 * 4 + CLASSES * 8, "once": 0}
    assert fed.bytes[1] == {"down": weights + 12, "up": weights + 12 + 40, "once": 0}
    assert fed.bytes[2]["up"] == 2 * weights + (4 + 1) * 12 + 2 * 40
    assert fed.bytes[2]["down"] == 2 * (weights + 12)


def test_engines_agree() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        (
            {"alpha_granularity": "step", "proto_bn_mode": "train", "proto_drop_last": True},
            {"augment": Shift()},
        ),
        ({"alpha_granularity": "epoch", "proto_bn_mode": "train_frozen_stats"}, {"drop_last": True}),
        (
            {"loss_prototype_source": "local", "absent_class": "drop"},
            {"augment": Shift(), "participation": 0.4},
        ),
        (
            {"loss_prototype_source": "global_pos_local_neg", "empty_class": "carry_received"},
            {"participation": 0.4},
        ),
        ({"proto_participants": "all_latest", "gpc_denominator": "literal_double"}, {"participation": 0.4}),
        (
            {"absent_class": "keep_zero", "proto_init": "zeros_masked"},
            {"participation": 0.3, "bn_buffers": "local"},
        ),
    ]
    for options, kw in cases:
        a, b = (ragged(FedProc(**options), Tiny(norm=True, z_normalize=True), engine=e, **kw).run() for e in ENGINES)
        assert gap(state(a), state(b)) < 1e-12, options
        assert a.bytes == b.bytes and a.terms[-1] == pytest.approx(b.terms[-1])
