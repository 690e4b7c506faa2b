"""Methods of the literature written as a stranger would: files that know the contract and nothing else."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ENGINES, Harnessed, Identity, ToyNet, federation
from protofl.methods.fedavg import FedAvg
from ragged import Shift, Tiny, gap, identical, ragged, state
from rich.console import Console
from torch import Tensor

from protofl import cli, registry, verify
from protofl.handles import RunClient, RunServer
from protofl.protocol import Protocol
from protofl.records import read_json, read_rows
from protofl.tree import Rows, Tree, nbytes
from protofl.trials import SIZES, Trial, awkward

HERE = Path(__file__).parent
FOLDER = HERE / "strangers"
FILES = sorted(FOLDER.glob("*.py"))
engines = pytest.mark.parametrize("engine", ENGINES)

FedNTD, FedDecorr, CCVR = (registry.load(str(FOLDER / f"{name}.py")) for name in ("fedntd", "feddecorr", "ccvr"))


# ---- as a stranger writes them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_method_is_a_short_file(file: Path) -> None:
    """At most 40 lines of class, and nothing of protofl but the contract and other methods."""
    text = file.read_text()
    tree = ast.parse(text)
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef))
    said = {line for n in ast.walk(cls) if isinstance(n, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(n)
            for line in range(n.body[0].lineno, (n.body[0].end_lineno or 0) + 1)}  # fmt: skip
    lines = text.splitlines()
    assert sum(bool(lines[i - 1].strip()) and i not in said for i in range(cls.lineno + 1, cls.end_lineno + 1)) <= 40
    known = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module.startswith("protofl")}
    assert all(name == "protofl.method" or name.startswith("protofl.methods.") for name in known)
    assert not [a for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names if "protofl" in a.name]


@functools.cache
def subject(file: Path) -> verify.Subject:
    return verify.Subject(registry.Spec(str(file)).build(Protocol()))


@pytest.mark.parametrize("check", verify.CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_keeps_the_contract(file: Path, check: verify.Check) -> None:
    _, kept, line = check.judge(subject(file))
    assert kept or line == "it has no prototypes", line


def test_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "out", Console(width=200))
    monkeypatch.chdir(tmp_path)

    def protofl(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["protofl", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, capsys.readouterr()
        return capsys.readouterr().out

    files = ",".join(map(str, FILES))
    said = protofl("bench", "--methods", f"fedavg,{files}", "--rounds", "2", "--local-epochs", "1", "--seeds", "0",
                   "--workers", "1", "--no-report", "--set", "fedntd.preset=cspc_code", "--set", "ccvr.per_class=20")  # fmt: skip
    assert all(name in said for name in ("FedAvg", "FedNTD", "FedDecorr", "CCVR"))
    made = {read_json(p)["name"]: p.parent for p in tmp_path.glob("results/*/*/protocol.json")}
    assert len(made) == 4 and read_json(made["FedNTD"] / "protocol.json")["method"]["options"]["tau"] == 3
    rows = {name: read_rows(folder / "rounds.jsonl") for name, folder in made.items()}
    assert rows["CCVR"][-1]["final"]["bytes_up"] > 0 and "final" not in rows["FedAvg"][-1]
    ccvr, fedavg = ([row["loss"] for row in rows[name]] for name in ("CCVR", "FedAvg"))
    assert ccvr[0] == fedavg[0] and ccvr[1] != fedavg[1]
    assert "tau" in protofl("methods", str(FOLDER / "fedntd.py"))


def test_the_readme_shows_a_whole_method() -> None:
    """The code block in README's section on methods is that file, to the letter."""
    section = (HERE.parent / "README.md").read_text().split("\n## Methods\n")[1].split("\n## ")[0]
    (block,) = (part.split("```")[0] for part in section.split("```python\n")[1:])
    assert block == (FOLDER / "fedntd.py").read_text()
    assert "protofl verify ./fedntd.py" in section


# ---- FedNTD ----------------------------------------------------------------------------------------------------------


class Told(ToyNet):
    """A row is the scores of the model in training (plus a shift that it may learn), then those of a frozen one."""

    name, classes = "told", 3

    def __call__(self, w: Tree, x: Tensor) -> Tensor:
        told = x.reshape(len(x), 2, -1)
        return told[:, 0] + w["head.shift"] if self.mode == "train" else told[:, 1]


def step(method: FedAvg, rows: list[list[float]], y: list[int], engine: str) -> tuple[dict[str, float], list[float]]:
    """One step of one client (rate 1) on these rows -> loss terms, minus the shift: the gradient in the scores."""
    x = torch.tensor(rows, dtype=torch.float64)
    initial = Tree({"head.shift": torch.zeros(x.shape[1] // 2, dtype=torch.float64)})
    fed = federation(method, Told(), x, torch.tensor(y), [range(len(x))], engine=engine, initial=initial, local_epochs=1,
                     client_lr=1.0).run()  # fmt: skip
    return fed.last.terms, (-fed.shared.net["head.shift"]).tolist()


ROW = [2.0, 1, 0, 1, 1, -1]


@engines
@pytest.mark.parametrize(
    ("tau", "kl", "term", "local", "received"),
    [(1.0, 0.0671307545, 0.0671307545, (0.7310585786, 0.2689414214), (0.8807970780, 0.1192029220)),
     (3.0, 0.0128542774, 0.1156884968, (0.5825702065, 0.4174297935), (0.6607563688, 0.3392436312))],
)  # fmt: skip
def test_not_true_distillation(
    engine: str, tau: float, kl: float, term: float, local: tuple[float, float], received: tuple[float, float]
) -> None:
    method = FedNTD(tau=tau)
    terms, grad = step(method, [ROW], [0], engine)
    assert terms["ntd"] == pytest.approx(kl, abs=1e-10)
    assert terms["loss"] - terms["ce"] == pytest.approx(term, abs=1e-10)
    said = method.opinion(torch.tensor([ROW[:3], ROW[3:]], dtype=torch.float64), torch.tensor([0, 0])).exp()
    assert said[:, 0].tolist() == [0, 0] and said[:, 1:].tolist() == [pytest.approx(local), pytest.approx(received)]
    ce = torch.tensor(ROW[:3], dtype=torch.float64).softmax(0) - torch.tensor([1.0, 0, 0])
    ntd = tau * (torch.tensor([0.0, *local]) - torch.tensor([0.0, *received]))  # beta tau^2 (1/tau) (p - q)
    assert grad == pytest.approx((ce + ntd).tolist(), abs=1e-7)


@engines
def test_the_true_class_is_out_of_it_and_rows_are_averaged(engine: str) -> None:
    alike = [9.0, 1, 0, -5, 1, 0]  # the same opinion of the wrong classes
    terms, _ = step(FedNTD(), [ROW, alike], [0, 0], engine)
    assert terms["ntd"] == pytest.approx(0.0671307545 / 2, abs=1e-10)
    assert step(FedNTD(beta=0.5), [ROW], [0], engine)[0]["loss"] == pytest.approx(
        step(FedNTD(beta=0.0), [ROW], [0], engine)[0]["loss"] + 0.0671307545 / 2, abs=1e-10
    )


@engines
def test_two_classes_have_one_wrong_one(engine: str) -> None:
    terms, grad = step(FedNTD(), [[2.0, 1, -3, 4]], [0], engine)
    plain, wanted = step(FedAvg(), [[2.0, 1, -3, 4]], [0], engine)
    assert terms["ntd"] == 0 and grad == wanted and terms["loss"] == plain["loss"]


@engines
@pytest.mark.parametrize(
    "method", [FedNTD(beta=0.0), FedDecorr(beta=0.0), FedDecorr(beta=0.0, scale="paper")], ids=repr
)
def test_without_weight_it_is_fedavg(engine: str, method: FedAvg) -> None:
    kw: dict[str, Any] = {"engine": engine, "augment": Shift(), "grad_clip_norm": 0.5}
    a, b = (ragged(m, Tiny(norm=True), **kw).run() for m in (method, FedAvg()))
    assert gap(state(a), state(b)) < 1e-12 and a.bytes == b.bytes
    if engine == "loop":
        assert identical(state(a), state(b))


@engines
def test_the_received_model_is_asked_in_eval_mode(engine: str) -> None:
    """With batch statistics its opinion would equal the client's own at the first step."""
    fed = ragged(FedNTD(), Tiny(norm=True), engine=engine, rounds=1, local_epochs=1, batch_size=64).run()
    assert fed.last.terms["ntd"] > 1e-6
    plain = ragged(FedNTD(), Tiny(), engine=engine, rounds=1, local_epochs=1, batch_size=64).run()
    assert plain.last.terms["ntd"] == pytest.approx(0, abs=1e-12)  # one step: w is still w^t


@pytest.mark.parametrize(
    "method", [FedNTD(), FedNTD(tau=3.0, beta=2.0), FedDecorr(), FedDecorr(scale="paper")], ids=repr
)
def test_engines_agree(method: FedAvg) -> None:
    for kw in ({}, {"augment": Shift(), "participation": 0.5, "drop_last": True}):
        a, b = (ragged(method, Tiny(norm=True), engine=e, **kw).run() for e in ENGINES)
        assert gap(state(a), state(b)) < 1e-10 and a.bytes == b.bytes
        assert a.terms[-1] == pytest.approx(b.terms[-1])


def test_the_preset_of_fedntd() -> None:
    assert FedNTD.presets["cspc_code"] == {"tau": 3.0} and FedNTD().tau == FedNTD().beta == 1
    assert registry.Spec(str(FOLDER / "fedntd.py"), (("preset", "cspc_code"),)).build(Protocol()).tau == 3


# ---- FedDecorr -------------------------------------------------------------------------------------------------------

FEATURES = [[1.0, 2], [2, 4], [3, 7]]


def decorr(method: FedAvg, rows: list[list[float]], engine: str, **kw: Any) -> Harnessed:
    """Clients of one epoch, whose features are the inputs."""
    x = torch.tensor(rows, dtype=torch.float64)
    parts = kw.pop("parts", [range(len(x))])
    return federation(method, Identity(2, x.shape[1]), x, torch.zeros(len(x), dtype=torch.long), parts, engine=engine,
                      local_epochs=1, **kw).run()  # fmt: skip


@engines
@pytest.mark.parametrize(("scale", "wanted"), [("code", 0.1315789458), ("paper", 0.0993421041)])
def test_correlation(engine: str, scale: str, wanted: float) -> None:
    terms = decorr(FedDecorr(scale=scale), FEATURES, engine).last.terms
    assert 0.1 * terms["decorr"] == pytest.approx(wanted, abs=1e-10)
    assert terms["loss"] - terms["ce"] == pytest.approx(wanted, abs=1e-10)
    half = decorr(FedDecorr(scale=scale, beta=0.05), FEATURES, engine).last.terms
    assert half["loss"] - half["ce"] == pytest.approx(wanted / 2, abs=1e-10)
    corr = (4 * terms["decorr"] - 2) / 2 if scale == "paper" else terms["decorr"] * 3 / 4
    assert corr**0.5 == pytest.approx(0.9933992620, abs=1e-8)


@engines
def test_rows_of_a_batch_are_counted(engine: str) -> None:
    """A batch of one row contributes 0; a client with fewer rows than its neighbour is not padded into it."""
    assert decorr(FedDecorr(), [[1.0, 2]], engine).last.terms["decorr"] == 0
    assert decorr(FedDecorr(scale="paper"), [[1.0, 2]], engine).last.terms["decorr"] == 0
    rows = [*FEATURES, [5.0, 1], [2, 2], [0, 3], [1, 7], [4, 4]]
    fed = decorr(FedDecorr(), rows, engine, parts=[range(3), range(3, 8)], draws=[[0, 1]])
    assert float(fed.last.client_terms[0].decorr) == pytest.approx(1.315789458, abs=1e-9)
    assert decorr(FedDecorr(), [[1.0, 5], [2, 5], [4, 5]], engine).last.terms["decorr"] == 0  # no spread, guarded


def test_the_two_scales_differ_by_a_factor() -> None:
    """paper with beta = code with beta N (d-1) / ((N-1)^2 d), in gradient: the diagonal adds a constant."""
    z = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    code, paper = (torch.autograd.grad(FedDecorr(scale=s).penalty(z, torch.ones(9).double()), z)[0]
                   for s in ("code", "paper"))  # fmt: skip
    assert torch.allclose(paper * (8**2 / 9 * 4 / 3), code, atol=1e-6)  # 1e-8 in the denominator moves the diagonal
    n, d = 64, 256
    assert (n - 1) ** 2 / n * d / (d - 1) == pytest.approx(62.3, abs=0.05)
    assert FedDecorr().penalty(torch.randn(5, 1).double(), torch.ones(5).double()) == 0


# ---- CCVR ------------------------------------------------------------------------------------------------------------


def gaussians(engine: str, **kw: Any) -> Harnessed:
    """Two clients, d=1: class 0 has 1, 3 and 5, 7, 9; class 1 has a single sample, class 2 none."""
    x = torch.tensor([[1.0], [3], [5], [7], [9], [4]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 0, 0, 1])
    fed = federation(CCVR(**kw), Identity(3, 1), x, y, [[0, 1], [2, 3, 4, 5]], engine=engine, local_epochs=1).run()
    fed.conclude()
    return fed


@engines
def test_moments(engine: str) -> None:
    fed = gaussians(engine)
    a, b = fed.last.uploads
    assert [float(a.mean.values[0]), float(a.cov.values[0]), int(a.n[0])] == [2, 2, 2]
    assert [float(b.mean.values[0]), float(b.cov.values[0]), int(b.n[0])] == [7, 4, 3]
    assert float(b.cov.values[1]) == 0 and a.mean.has.tolist() == [True, False, False]
    n, mean, cov = fed.method.pooled([a, b])
    assert n.tolist() == [5, 1, 0] and float(mean[0]) == 5 and float(cov[0]) == pytest.approx(10, abs=1e-12)
    biased = [u | Tree(cov=Rows(u.cov.values * v, u.cov.has)) for u, v in ((a, 1 / 2), (b, 2 / 3))]
    assert float(fed.method.pooled(biased)[2][0]) == pytest.approx(9.0833333333, abs=1e-10)  # FL-bench's ddof 0


def test_pooled_moments_are_those_of_all_samples() -> None:
    fed = ragged(CCVR(transform="test"), Tiny(), rounds=1).run()
    fed.conclude()
    n, mean, cov = fed.method.pooled(fed.last.uploads)
    z = fed.task.net.embed(fed.last.received[0].net, fed.task.x).detach()
    for c in range(5):
        mine = z[fed.task.y == c]
        assert int(n[c]) == len(mine) and torch.allclose(mean[c], mine.mean(0)) and torch.allclose(cov[c], mine.T.cov())


@engines
def test_calibration(engine: str) -> None:
    """One exchange after the last round: its bytes, its passes; the output layer alone moves, one epoch of plain SGD."""
    fed = ragged(CCVR(), Tiny(norm=True), engine=engine, rounds=2, lr_decay_per_round=0.9, participation=0.5).run()
    plain = ragged(FedAvg(), Tiny(norm=True), engine=engine, rounds=2, lr_decay_per_round=0.9, participation=0.5).run()
    assert identical(state(fed), state(plain)) and fed.bytes == plain.bytes
    before = fed.shared.net
    last = fed.conclude()
    assert last is not None and last.t == 2 and last.ids == list(range(7))
    size = 4 * sum(v.numel() for v in before.values() if v.is_floating_point()) + 8
    held = [int((c > 0).sum()) for c in fed.task.counts]
    assert last.bytes == {"down": 7 * size, "up": sum(4 * k * (3 + 9) + 5 * 8 for k in held), "once": 0}
    assert last.state_bytes == 0
    moved = [k for k, v in fed.shared.net.items() if not torch.equal(v, before[k])]
    assert moved == ["head.weight", "head.bias"]

    server, method = RunServer(fed.task, last.ids, 2), fed.method
    n, mean, cov = method.pooled(last.uploads)
    assert int((n > 1).sum()) == 5
    noise = torch.from_numpy(server.stream("ccvr", "features").standard_normal((5, 200, 3)))
    values, axes = torch.linalg.eigh(cov + 1e-6 * torch.eye(3))
    z = (mean[:, None] + noise @ (axes @ values.sqrt().diag_embed() @ axes.mT)).flatten(0, 1)
    y = torch.arange(5).repeat_interleave(200)
    assert z.view(5, 200, 3).mean(1) == pytest.approx(mean, abs=0.3)
    w = {k: before[k].clone().requires_grad_() for k in moved}
    for rows in torch.from_numpy(server.stream("ccvr", "retrain").permutation(1000)).split(8):
        loss = F.cross_entropy(z[rows] @ w["head.weight"].T + w["head.bias"], y[rows])
        for v, g in zip(w.values(), torch.autograd.grad(loss, list(w.values()))):
            v.data -= 0.1 * 0.9**2 * g
    assert gap(fed.shared.net.like(w), Tree(w).map(Tensor.detach)) < 1e-10


@engines
def test_options_of_ccvr(engine: str) -> None:
    def calibrated(augment: Any = None, **kw: Any) -> Harnessed:
        fed = ragged(CCVR(**kw), engine=engine, rounds=1, augment=augment).run()
        fed.conclude()
        return fed

    base = calibrated()
    assert gap(base.shared, calibrated(per_class=50).shared) > 1e-6
    assert identical(base.shared, calibrated(transform="test").shared)  # nothing is random in this setting
    a, b = calibrated(Shift()), calibrated(Shift(), transform="test")
    assert gap(a.last.uploads[0].mean.values, b.last.uploads[0].mean.values) > 1e-6
    assert identical(a.rounds[0].uploads, b.rounds[0].uploads)


def test_ccvr_engines_agree() -> None:
    runs = [ragged(CCVR(), Tiny(norm=True), engine=e, augment=Shift(), participation=0.5).run() for e in ENGINES]
    for fed in runs:
        fed.conclude()
    assert gap(*map(state, runs)) < 1e-10 and runs[0].bytes == runs[1].bytes


def test_passes_of_the_final_exchange() -> None:
    """Every client reads its data once more, and trains nothing."""
    trial = Trial(CCVR(), awkward()).run()
    assert [r.t for r in trial.rounds] == [0, 1, 2, 3]
    assert trial.rounds[-1].samples == {"trained": 0, "forward": sum(SIZES)}


@pytest.mark.parametrize(("d", "k", "floats"), [(256, 10, 657_920), (256, 100, 6_579_200), (192, 10, 370_560),
                                                (192, 100, 3_705_600)])  # fmt: skip
def test_floats_of_the_tables(d: int, k: int, floats: int) -> None:
    """K_i (d + d^2) of a client that has all classes, and the counts."""
    y = torch.arange(k).repeat(2)
    fed = federation(CCVR(), Identity(k, d), torch.zeros(2 * k, 1), y, [range(2 * k)])
    program = fed.method.tell(RunClient(fed.task, 0, 1), fed.shared, Tree())
    next(program)
    with pytest.raises(StopIteration) as ended:
        program.send((Tree(z=torch.randn(2 * k, d)), torch.arange(2 * k)))
    upload, kept = ended.value.value
    assert nbytes(upload) == 4 * floats + 8 * k and not kept
