"""Ablations: every open choice is a row, claims are proved or refuted by runs, and tables say what the records say."""

from __future__ import annotations

import csv
import functools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_cli import protofl, runs

from protofl import ablation, cli, registry, same
from protofl.data import load
from protofl.experiment import Settings
from protofl.method import Method
from protofl.nets import build
from protofl.protocol import Protocol
from protofl.records import read_rows
from protofl.same import Same, Scene

SIX = ("fedproc", "fednh", "fedcspc", "moon", "fedproto", "scaffold")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, sketched: None) -> None:
    monkeypatch.setattr(cli, "out", Console(width=250))


@functools.cache
def small() -> str:
    """300 of the digits, as a file."""
    data, path = load("digits"), Path(tempfile.mkdtemp()) / "small.npz"
    train, test = slice(None, None, 5), slice(None, None, 4)
    np.savez(
        path,
        x_train=data.x_train[train],
        y_train=data.y_train[train],
        x_test=data.x_test[test],
        y_test=data.y_test[test],
    )
    return str(path)


def settings(name: str, **given: Any) -> Settings:
    made = Settings(methods=[name], seeds=[0])
    fields = {"preset": "digits.digits", "dataset": small(), "clients": 5, "partition_min_size": 2, "local_epochs": 1}
    made.take_document({**fields, "rounds": 3, **given}, "test")
    return made


def studied(name: str, choices: tuple[str, ...] = (), **given: Any) -> list[ablation.Studied]:
    """Rows of an ablation whose claims are proved in this process."""
    made = ablation.study(settings(name, **given), choices)
    for one in made:
        one.proofs = [ablation.prove(sides) for _, sides in one.claims]
    return made


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_fedproc_has_every_row_of_its_table() -> None:
    """Prototype source, both averages, empty and absent classes, denominator, temperature, schedule, granularity, round 0,
    first prototypes, classifier input, z normalisation with the rate, BatchNorm mode and data of the pass, sampling."""
    made = ablation.study(settings("fedproc"))
    choices = {one.row.choice for one in made}
    assert choices >= {
        "preset", "loss_prototype_source", "proto_weighting", "model_weighting", "empty_class", "absent_class",
        "gpc_denominator", "gpc_temperature", "alpha_schedule", "alpha_granularity", "round0_loss", "schedule_t0",
        "classifier_input", "z_normalize", "client_lr", "z_normalize x client_lr", "proto_init", "proto_bn_mode",
        "proto_transform", "proto_drop_last", "proto_participants", "eval_head", "report", "local_epochs", "partition_seed",
    }  # fmt: skip
    code = next(one for one in made if one.row.choice == "preset")
    assert dict(code.row.beside) == {"z_normalize": True, "client_lr": 0.1, "drop_last": True} and not code.refused
    assert all(c.protocol.client_lr == 0.1 and c.protocol.z_normalize for c in (*code.base, *code.cells))
    gpc = next(one for one in made if one.row.reading.startswith("gpc_only"))
    assert "eval_head=prototype" in gpc.row.reading and not gpc.refused
    splits = [c.protocol.partition_seed for one in made if one.row.choice == "partition_seed" for c in one.cells]
    assert splits == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fedproc",
        *(pytest.param(m, marks=pytest.mark.slow) for m in registry.names() if m not in ("fedavg", "fedproc")),
    ],
)
def test_a_row_differs_from_its_base_in_its_reading_alone(method: str) -> None:
    for one in ablation.study(settings(method)):
        for cell, base in zip(one.cells, one.base, strict=True):
            mine, theirs = ({**c.protocol.document(), **dict(c.method.given)} for c in (cell, base))
            changed = {k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)}
            assert changed == {key.rpartition(".")[2] for key in one.row.changed}, one.row


def test_official_code_of_fednh_differs_in_its_first_prototypes_alone() -> None:
    (one,) = ablation.study(settings("fednh"), ("preset",))
    assert dict(one.row.beside) == {
        "init": "torch", "init_seed": 2022, "partition_seed": "run", "client_sampling": "fednh_compat", "client_seed": "shared",
    }  # fmt: skip
    assert not one.refused and one.cells[0].protocol == one.base[0].protocol


def test_pairs_are_crossed_in_full() -> None:
    made = ablation.study(settings("moon"), (), [("mu", "temperature")])
    assert {one.row.reading for one in made if "x" in one.row.choice} == {
        f"{mu}, {tau}" for mu in ("1", "0.1", "5", "10") for tau in ("0.5", "0.1", "1")
    } - {f"{made[0].row.default}"} and len(made) == 11


# ---- proofs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [pytest.param(m, marks=pytest.mark.slow) if m == "fedcspc" else m for m in SIX])
def test_every_claim_that_applies_holds(method: str) -> None:
    """On the embedded data; BatchNorm, clusters and other settings in which a claim applies are below."""
    for one in studied(
        method, **({"rounds": 2, "method": {"fedcspc": {"calib_epochs": 2}}} if method == "fedcspc" else {})
    ):
        for (claim, _), proof in zip(one.claims, one.proofs):
            assert isinstance(proof, ablation.Proved) and proof.holds(claim), (one.row, claim.why, proof)


ELSEWHERE: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("fedproc", ("round0_loss",), {"method": {"fedproc": {"proto_init": "zeros_masked"}}}),
    ("fedproc", ("round0_loss", "schedule_t0", "alpha_granularity"), {"method": {"fedproc": {"alpha_schedule": "ce_only"}}}),
    ("fedproc", ("empty_class",), {"method": {"fedproc": {"proto_weighting": "count"}}}),
    ("fedproc", ("empty_class", "absent_class"), {"partition": "iid"}),
    ("fedproc", ("proto_weighting", "model_weighting"), {"partition": "iid", "clients": 1}),
    ("fedproc", ("proto_drop_last",), {"batch_size": 1000}),
    ("fednh", ("proto_client_weight", "client_proto_norm", "proto_pre_normalize", "proto_post_normalize", "pm_proto",
               "proto_timing", "proto_transform"), {"method": {"fednh": {"rho": 1.0}}}),
    ("fednh", ("scale_weight_decay",), {"method": {"fednh": {"scale_trainable": False}}}),
    ("fednh", ("embed_layer",), {"model": "mlp_plain"}),
    ("fednh", ("pm_proto",), {"metrics": ["gm"]}),
    ("moon", ("contrast_feature",), {"model": "mlp_plain"}),
    ("fedcspc", ("kmeans_init", "kmeans_space"), {"method": {"fedcspc": {"n_clusters": 1, "calib_epochs": 2}}}),
    ("fedcspc", ("reg_form", "reg_weights", "max_triplets"),
     {"rounds": 2, "method": {"fedcspc": {"local_reg": "P", "calib_epochs": 2}}}),
    ("fedcspc", ("pos_mix", "margin_metric", "con_form"),
     {"rounds": 2, "method": {"fedcspc": {"calib_losses": "ce", "calib_epochs": 2}}}),
    ("fedcspc", ("eta", "calib_lr_schedule"), {"rounds": 2, "method": {"fedcspc": {"calib_epochs": 0}}}),
    ("scaffold", ("tau", "correction"), {"momentum": 0.0}),
    ("scaffold", ("weighting",), {"model_weighting": "uniform"}),
    ("fedproto", ("reg_missing",), {"participation": 0.3, "method": {"fedproto": {"reg_form": "class_mean_l2"}}}),
    ("fedproto", ("proto_candidates",), {"partition": "iid"}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("method", "choices", "given"), ELSEWHERE, ids=str)
def test_claims_hold_where_their_conditions_do(method: str, choices: tuple[str, ...], given: dict[str, Any]) -> None:
    made = studied(method, choices, **given)
    claimed = {one.row.choice for one in made if one.claims or one.refused}
    assert claimed >= set(choices) - {"partition_seed"}
    for one in made:
        for (claim, _), proof in zip(one.claims, one.proofs):
            assert isinstance(proof, ablation.Proved) and proof.holds(claim), (one.row, claim.why, proof)


def test_a_false_claim_is_refuted_and_its_reading_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    moon = registry.load("moon")
    monkeypatch.setattr(moon, "same", (Same("temperature", (), "it is said to do nothing"),))
    words = (
        "ablate",
        "moon",
        "--choices",
        "temperature",
        "--rounds",
        2,
        "--local-epochs",
        1,
        "--seeds",
        0,
        "--workers",
        1,
    )
    said = protofl(*words, "--no-report", cwd=tmp_path)
    assert "REFUTED" in said and "which did not hold" in said
    (table,) = (tmp_path / "results/tables").glob("*.json")
    assert all(row["runs"] and not row["idle"] for row in json.loads(table.read_text())["ablation"]["rows"])


def test_an_exact_claim_needs_the_bits() -> None:
    loose, exact = Same("x", exact=False), Same("x")
    assert ablation.Proved(1e-13, 3).holds(loose) and not ablation.Proved(1e-13, 3).holds(exact)
    assert ablation.Proved(0.0, 3).holds(exact) and not ablation.Proved(1e-9, 3).holds(loose)


def test_conditions() -> None:
    """By hand, each true and false."""
    wide = np.array([[3, 4], [5, 2]])
    gap = np.array([[3, 0], [5, 2]])
    plain, bn = build("mlp_plain", classes=2, shape=(8, 8, 1)), build("resnet18_bn", classes=2, shape=(8, 8, 1))

    def scene(counts: Any = wide, net: Any = plain, **fields: Any) -> Scene:
        return Scene(Method(), Protocol(**fields), net, counts)

    cases = [
        (same.everybody_drawn, scene(), scene(participation=0.5)),
        (same.no_batchnorm, scene(), scene(net=bn)),
        (same.no_projection, scene(), scene(net=bn)),
        (same.not_a_resnet, scene(), scene(net=bn)),
        (same.no_augmentation, scene(), scene(augment=("hflip",))),
        (same.global_model_alone, scene(), scene(metrics=("gm", "pm_v"))),
        (same.every_class_everywhere, scene(), scene(gap)),
        (same.every_class_held, scene(gap), scene(gap, participation=0.5)),
        (same.every_class_held, scene(gap), scene(np.array([[3, 0], [5, 0]]))),
        (same.equal_sizes, scene(), scene(gap)),
        (same.equal_counts, scene(np.array([[3, 0], [3, 2]])), scene()),
        (same.no_short_batch, scene(batch_size=7), scene(batch_size=3)),
        (same.no_short_batch, scene(batch_size=9), scene(batch_size=6)),
        (same.both(same.no_augmentation, same.everybody_drawn), scene(), scene(participation=0.5)),
        (same.either(same.equal_sizes, same.everybody_drawn), scene(participation=0.5), scene(gap, participation=0.5)),
    ]
    for condition, good, bad in cases:
        assert condition(good) and not condition(bad), condition.__name__


def test_claims_of_all_parts_of_a_method_count() -> None:
    made = ablation.study(settings("moon+cspc"), ("prev_age", "pool"))
    assert [[claim.option for claim, _ in one.claims] for one in made] == [["prev_age"], ["pool"]]


# ---- end to end -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    words = ("ablate", "fedproc", "--choices", "proto_weighting,absent_class,report,partition_seed",
             "--rounds", 3, "--local-epochs", 1, "--seeds", "0,1", "--workers", 1)  # fmt: skip
    said = protofl(*words, cwd=folder)
    assert "Proved to change nothing: absent_class=keep_zero, absent_class=drop." in " ".join(said.split())
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (table,) = (folder / "results/tables").glob("*.json")
    return json.loads(table.read_text())["ablation"]["rows"]  # type: ignore[no-any-return]


def test_the_table_says_what_the_records_say(made: Path) -> None:
    """Recomputed from the raw rows: differences, rounds where curves part, order by size."""
    gm = {
        p.parent.name: [r["gm"] for r in read_rows(p) if r["round"] >= 0]
        for p in (made / "results").glob("*/*/rounds.jsonl")
    }
    (path,) = (made / "reports").glob("*/tables/ablation-gm.csv")
    with open(path, encoding="utf-8") as file:
        shown = list(csv.DictReader(file))
    wanted = {}
    for row in rows_of(made):
        pairs = [(gm[row["runs"][s]], gm[row["base"][s]]) for s in row["runs"]]
        if not pairs:
            continue
        reported = {"": lambda v: v[-1], "best": max, "mean_last_5": statistics.fmean}[row["rule"]]
        difference = statistics.fmean(reported(a) - b[-1] for a, b in pairs)
        part = [{t for t in range(3) if a[t] != b[t]} for a, b in pairs]
        first = (
            "same runs"
            if row["rule"]
            else (
                f"{min(set.union(*part))} / {min(set.intersection(*part), default='-')}"
                if set.union(*part)
                else "never"
            )
        )
        wanted[row["choice"], row["reading"]] = (difference, first)
    assert len(shown) == len(wanted) == 7
    for line in shown:
        difference, first = wanted[line["choice"], line["reading"]]
        assert (
            line["difference"].startswith(f"{100 * difference:+.2f}".replace("-0.00", "+0.00"))
            or abs(difference) < 1e-9
        )
        assert line["curves part"] == first
    sizes = [abs(float(line["difference"].split()[0])) for line in shown]
    assert sizes == sorted(sizes, reverse=True)
    split = max(abs(d) for (choice, _), (d, _) in wanted.items() if choice == "partition_seed")
    for line in shown:
        small = line["choice"] != "partition_seed" and 1e-9 < abs(wanted[line["choice"], line["reading"]][0]) <= split
        assert ("< split" in line["remark"]) == small


def test_the_page_names_what_cannot_act_and_where_it_can(made: Path) -> None:
    (page,) = (made / "reports").glob("*/README.md")
    text = page.read_text()
    assert "Cannot act in this setting" in text and "--participation 0.2" in text
    assert "Equal by construction" not in text and "2 seeds (0, 1)" in text
    assert "With fewer than 5 seeds no interval" in text and "points: mean over seeds" in text


def test_again_reuses_everything_and_an_archive_makes_the_same_report(made: Path, tmp_path: Path) -> None:
    (table,) = (made / "results/tables").glob("*.json")
    before = runs(made / "results")
    protofl("report", table, "--out", tmp_path / "a", "--archive", tmp_path / "x.tar.xz", cwd=made)
    protofl("report", tmp_path / "x.tar.xz", "--out", tmp_path / "b", cwd=tmp_path)
    a, b = ((tmp_path / name / "README.md").read_text() for name in "ab")
    head, tail = a.split("## Runs")[0], b.split("## Runs")[0]
    assert head == tail and runs(made / "results") == before
    for name in ("ablation-gm.csv", "cannot-act.csv"):
        assert (tmp_path / "a/tables" / name).read_bytes() == (tmp_path / "b/tables" / name).read_bytes()
    again = tmp_path / "y.tar.xz"
    protofl("report", table, "--out", tmp_path / "a", "--archive", again, cwd=made)
    assert again.read_bytes() == (tmp_path / "x.tar.xz").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fedprocc",), "did you mean 'fedproc'"),
        (("fedproc", "--choices", "proto_weightin"), "did you mean 'proto_weighting'"),
        (("fedproc", "--choices", "momentum"), "no open choice 'momentum'"),
        (("fedproc", "--choices", "alpha_schedul=reverse"), "did you mean 'alpha_schedule'"),
        (("fedproc", "--choices", "proto_weighting=counts"), "proto_weighting, which has: count"),
        (("fedproc", "--choices", "proto_weighting="), "proto_weighting, which has: count"),
        (("fedproc", "--choices", "proto_weighting=uniform"), "proto_weighting, which has: count"),
        (("fedproc", "--pairs", "z_normalize"), "--pairs takes two choices"),
        (("fedproc", "--beta", "0.1,0.5"), "one value of beta"),
        (("fedproc", "--methods", "moon"), "the one method that is named first"),
        (("fedproc", "--suite", "smoke"), "protofl suite run"),
        (("fedproc", "--seeds", "x"), "not a whole number"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    told = protofl("ablate", *words, cwd=tmp_path, code=2)
    assert said in told and told.count("\n") <= 1 and not (tmp_path / "results").exists()


def test_single_readings_are_those_rows_of_their_choices() -> None:
    wanted = ("alpha_schedule=gpc_only", "lr=0.1", "report=best", "alpha_schedule=linear_100", "preset=official_code")
    ones = [one.row for one in ablation.study(settings("fedproc"), wanted)]
    assert [(row.choice, row.reading.partition(" ")[0]) for row in ones] == [
        ("alpha_schedule", "gpc_only"), ("client_lr", "0.1"), ("report", "best"), ("alpha_schedule", "linear_100"),
        ("preset", "official_code"),
    ]  # fmt: skip
    every = [one.row for one in ablation.study(settings("fedproc"))]
    assert all(row in every for row in ones)
    twice = ablation.study(settings("fedproc"), ("report=best", "report", "report=best", "report"))
    assert [one.row.reading for one in twice] == ["best", "mean_last_5"]


def test_a_dry_run_prices_and_runs_nothing(tmp_path: Path) -> None:
    said = protofl("ablate", "moon", "--choices", "mu,prev_age,frozen_mode", "--seeds", 0, "--dry-run", cwd=tmp_path)
    assert (
        "moon beta 0.5 mu 10 seed 0" in said
        and "2 proved to change nothing instead" in said
        and not (tmp_path / "results").exists()
    )
