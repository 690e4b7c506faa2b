"""Partitions against the published check sums, literal re-writings of the schemes, and their general
properties."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofl.data.partition import Partition, load, partition, save
from protofl.errors import UserError

HERE = Path(__file__).parent
DIGITS = np.repeat(np.arange(10), [143, 146, 142, 147, 145, 146, 145, 144, 140, 144])
LABELS = {
    "cifar10": np.repeat(np.arange(10), 5000),
    "cifar100": np.repeat(np.arange(100), 500),
    "tinyimagenet": np.repeat(np.arange(200), 500),
    "digits": DIGITS,
}
SCHEMES = ("dir_class", "dir_class_fednh", "dir_client", "iid")
FINGERPRINTS = list(csv.DictReader((HERE / "partition_fingerprints.csv").open()))


def split(dataset: str, scheme: str, clients: int, beta: float | None, seed: int = 0, **more: Any) -> Partition:
    y = LABELS[dataset]
    return partition(y, scheme=scheme, clients=clients, beta=beta, seed=seed, classes=int(y[-1]) + 1, **more)


@pytest.mark.parametrize("row", FINGERPRINTS, ids=lambda r: "-".join(list(r.values())[:5]))
def test_published_check_sums(row: dict[str, str]) -> None:
    # FedNH's sampler gives up after three attempts and takes what it has
    fednh = {"max_tries": 3, "on_min_fail": "accept_last"} if row["kind"] == "dir_class_fednh" else {}
    made = split(
        row["dataset"],
        row["kind"],
        int(row["clients"]),
        float(row["beta"]),
        int(row["partition_seed"]),
        **fednh,
    )
    assert made.count_hash() == row["count_sha16"]
    assert made.index_hash() == row["index_sha16"]
    assert (made.attempts, made.min_size, made.max_size) == tuple(
        int(row[key]) for key in ("tries", "min_size", "max_size")
    )
    assert int((made.counts > 0).sum(1).min()) == int(row["min_classes"])
    assert made.sizes[:5].tolist() == [int(size) for size in row["first_five_sizes"].split()]


def test_all_rows_are_there() -> None:
    assert len(FINGERPRINTS) == 56


def test_worked_examples() -> None:
    iid = split("digits", "iid", 10, None)
    assert (iid.count_hash(), iid.index_hash()) == ("d852e0d7720693bb", "b21427499ecc7f90")
    sizes = [5307, 3688, 4435, 5047, 5189, 3803, 5202, 4325, 8078, 4926]
    assert split("cifar10", "dirichlet", 10, 0.5).sizes.tolist() == sizes
    first = split("cifar10", "dir_client", 100, 0.3).counts[0]
    assert first.tolist() == [120, 3, 114, 39, 89, 2, 23, 32, 6, 72]


def test_repair_check() -> None:
    made = split("cifar10", "dir_class_fednh", 100, 0.05, max_tries=3, on_min_fail="repair")
    assert (made.count_hash(), made.index_hash()) == ("fc14a5ea066f233b", "4b6f06fbc24f47c4")
    assert "100 samples moved" in made.note and made.attempts == 3 and made.min_size == 10


def test_accepted_after_failing_is_said() -> None:
    made = split("cifar10", "dir_class_fednh", 100, 0.05, max_tries=3, on_min_fail="accept_last")
    assert made.note == "accepted after 3 failed attempts" and made.one_class == 18 and made.min_size == 0


@pytest.mark.parametrize(("clients", "beta"), [(50, 0.1), (100, 0.5), (100, 0.05), (140, 0.01)])
def test_refused_in_seconds_when_the_minimum_is_out_of_reach(clients: int, beta: float) -> None:
    began = time.perf_counter()
    with pytest.raises(UserError) as fault:
        split("digits", "dir_class", clients, beta)
    assert time.perf_counter() - began < 20
    text = str(fault.value)
    wanted = ("1000 tries", "1442 rows", f"{clients} clients", f"beta {beta}", "smallest client", "repair")
    assert all(word in text for word in wanted) and "\n" not in text


def test_the_original_would_loop_for_ever() -> None:
    with pytest.raises(UserError, match="none of 200 tries"):
        split("cifar10", "dir_class", 100, 0.05, max_tries=200)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta": 0.0}, "beta must be"),
        ({"beta": -1.0}, "beta must be"),
        ({"beta": float("nan")}, "beta must be"),
        ({"beta": float("inf")}, "beta must be"),
        ({"beta": None}, "beta must be"),
        ({"beta": "abc"}, "beta must be"),
        ({"clients": 0}, "at least 1"),
        ({"clients": 5000}, "at most 1442"),
        ({"clients": 1000}, "at most 144 clients"),
        ({"min_size": -1}, "partition_min_size"),
        ({"min_classes": 11}, "at most 10"),
        ({"seed": -1}, "partition_seed"),
        ({"scheme": "dir_clas"}, "did you mean 'dir_class'"),
        ({"on_min_fail": "repare"}, "did you mean 'repair'"),
        ({"max_tries": 0}, "max_tries"),
        ({"alpha_convention": "totl"}, "did you mean 'total'"),
        ({"alpha_convention": "total"}, "dir_client"),
        ({"classes": 9}, "0..8"),
        ({"beta": 1e-320}, "nearer to 1"),
        ({"beta": 1e308}, "nearer to 1"),
    ],
)
def test_settings_that_cannot_work(change: dict[str, Any], words: str) -> None:
    good = {"scheme": "dir_class", "clients": 10, "beta": 0.5, "seed": 0, "classes": 10}
    with pytest.raises(UserError, match=words):
        partition(DIGITS, **(good | change))


# --------------------------------------------------------------------------------------- literal re-writings


def dir_client_one_by_one(y: np.ndarray, clients: int, k: int, beta: float, seed: int) -> list[list[int]]:
    rs = np.random.RandomState(seed)
    rows = []
    for c in range(k):
        of_class = np.flatnonzero(y == c)
        rs.shuffle(of_class)
        rows.append(of_class.tolist())
    mixes = rs.dirichlet(np.full(k, beta), size=clients)
    parts = []
    for i in range(clients):
        part = []
        for _ in range(len(y) // clients + (i < len(y) % clients)):
            open_ = np.array([len(of_class) > 0 for of_class in rows])
            v = mixes[i] * open_
            if v.sum() == 0:
                v = open_.astype(float)
            edges = np.cumsum(v)
            u = rs.random_sample() * edges[-1]
            part.append(rows[int(np.argmax(edges > u))].pop())
        parts.append(part)
    return parts


@pytest.mark.parametrize("beta", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("clients", [1, 7, 40])
def test_client_wise_is_the_one_by_one_scheme(beta: float, clients: int) -> None:
    made = split("digits", "dir_client", clients, beta, 3)
    assert [part.tolist() for part in made.indices] == dir_client_one_by_one(DIGITS, clients, 10, beta, 3)


def test_total_concentration_is_spread_over_the_classes() -> None:
    total = split("digits", "dir_client", 10, 5.0, alpha_convention="total")
    assert total.index_hash() == split("digits", "dir_client", 10, 0.5).index_hash()


def dir_class_literal(
    y: np.ndarray, n: int, k: int, beta: float, seed: int, cap: bool = True, skip: int = 0
) -> list[list[int]]:
    rs = np.random.RandomState(seed)
    rs.permutation(skip)
    while True:
        parts: list[list[int]] = [[] for _ in range(n)]
        for c in range(k):
            rows = np.flatnonzero(y == c)
            rs.shuffle(rows)
            q = rs.dirichlet(np.repeat(beta, n))
            if cap:
                q = np.array([p * (len(part) < len(y) / n) for p, part in zip(q, parts, strict=True)])
            cuts = (np.cumsum(q / q.sum()) * len(rows)).astype(int)[:-1]
            parts = [part + own.tolist() for part, own in zip(parts, np.split(rows, cuts), strict=True)]
        if min(map(len, parts)) >= 10:
            break
    for part in parts:
        rs.shuffle(part)
    return parts


@pytest.mark.parametrize("cap", [True, False])
@pytest.mark.parametrize(("clients", "beta", "seed"), [(1, 0.5, 0), (10, 0.2, 1), (20, 0.5, 2)])
def test_class_wise_is_the_plain_scheme(cap: bool, clients: int, beta: float, seed: int) -> None:
    made = split("digits", "dir_class", clients, beta, seed, cap=cap)
    assert [part.tolist() for part in made.indices] == dir_class_literal(DIGITS, clients, 10, beta, seed, cap)


def test_min_classes_one_turns_the_swaps_off() -> None:
    # FedNH's scheme is then the plain one behind one unused permutation
    made = split("digits", "dir_class_fednh", 20, 0.1, min_classes=1)
    literal = dir_class_literal(DIGITS, 20, 10, 0.1, 0, skip=len(DIGITS))
    assert [part.tolist() for part in made.indices] == literal
    swapped = split("digits", "dir_class_fednh", 20, 0.1, on_min_fail="accept_last")
    assert swapped.index_hash() != made.index_hash()


def test_min_size_zero_takes_the_first_attempt() -> None:
    made = split("digits", "dir_class", 40, 0.05, min_size=0)
    assert made.attempts == 1 and made.min_size == 0 and made.note == ""


# ------------------------------------------------------------------------------------------------ properties


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    labels=st.lists(st.integers(0, 5), min_size=2, max_size=200),
    clients=st.integers(1, 12),
    beta=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
    min_size=st.integers(0, 3),
)
def test_every_row_goes_to_one_client(
    scheme: str, labels: list[int], clients: int, beta: float, seed: int, min_size: int
) -> None:
    y = np.array(labels)
    if clients * max(min_size, 1) > len(y):
        return
    made = partition(
        y,
        scheme=scheme,
        clients=clients,
        beta=beta,
        seed=seed,
        classes=6,
        min_size=min_size,
        max_tries=5,
        on_min_fail="repair",
    )
    assert sorted(np.concatenate(made.indices).tolist()) == list(range(len(y)))
    assert made.clients == clients and made.min_size >= min_size
    assert made.counts.sum(0).tolist() == np.bincount(y, minlength=6).tolist()
    assert made.counts.sum(1).tolist() == made.sizes.tolist()


@pytest.mark.parametrize("scheme", ["dir_class", "dir_class_fednh"])
def test_large_beta_gives_equal_shares(scheme: str) -> None:
    made = split("digits", scheme, 10, 1e6)
    assert np.abs(made.counts - np.bincount(DIGITS) / 10).max() <= 2
    assert np.abs(made.sizes / (len(DIGITS) / 10) - 1).max() <= 0.08


def test_iid_gives_every_client_every_class() -> None:
    assert (split("digits", "iid", 5, None).counts > 0).all()
    assert split("digits", "iid", 5, 0.1).index_hash() == split("digits", "iid", 5, None).index_hash()


def test_one_client_holds_everything() -> None:
    for scheme in SCHEMES:
        assert split("digits", scheme, 1, 0.5).sizes.tolist() == [1442]


def test_all_classes_are_handed_out_however_many() -> None:
    y = np.tile(np.arange(62), 20)
    made = partition(y, scheme="dir_class", clients=5, beta=0.5, seed=0, classes=62)
    assert made.counts.sum(0).tolist() == [20] * 62


def test_counts_do_not_depend_on_the_order_of_the_rows() -> None:
    y = np.random.RandomState(0).permutation(DIGITS)
    for scheme in ("dir_class", "dir_class_fednh", "dir_client"):
        shuffled = partition(y, scheme=scheme, clients=10, beta=0.5, seed=0, classes=10)
        assert shuffled.count_hash() == split("digits", scheme, 10, 0.5).count_hash()


def test_skew_falls_with_beta() -> None:
    skews = [split("digits", "dir_class", 10, beta).skew for beta in (0.1, 1.0, 100.0)]
    assert skews[0].label_entropy < skews[1].label_entropy < skews[2].label_entropy < np.log(10)
    assert skews[0].total_variation > skews[1].total_variation > skews[2].total_variation
    assert skews[0].js_distance > skews[1].js_distance > skews[2].js_distance


def test_skew_by_hand() -> None:
    # two clients of one class each, equally large: entropy 0, half of each mix differs from (1/2, 1/2);
    # Jensen-Shannon divergence of (1, 0) and (1/2, 1/2): H(3/4, 1/4) - H(1/2, 1/2)/2 = .8113 - .5 bits
    both = Partition((np.arange(3), np.arange(3, 6)), np.array([[3, 0], [0, 3]]), 1, "by hand")
    assert both.skew.label_entropy == 0 and both.skew.classes_per_client == 1 and both.one_class == 2
    assert both.skew.total_variation == 0.5 and both.skew.size_cv == 0
    assert both.skew.js_distance == pytest.approx(0.3112781244591328**0.5)
    # an empty client has no mix, but a size: sizes 4, 0 -> mean 2, deviation 2
    one = Partition((np.arange(4), np.arange(0)), np.array([[2, 2], [0, 0]]), 1, "by hand")
    assert one.skew.label_entropy_normalised == pytest.approx(1) and one.skew.size_cv == 1


# ----------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_stored_and_read_again(tmp_path: Path, suffix: str) -> None:
    made = split("digits", "dir_class_fednh", 30, 0.01, max_tries=2, on_min_fail="accept_last")
    assert made.min_size == 0
    file = save(made, tmp_path / "new" / f"split{suffix}")
    again = load(file, DIGITS)
    assert (again.index_hash(), again.count_hash()) == (made.index_hash(), made.count_hash())
    assert (again.attempts, again.scheme, again.note) == (made.attempts, made.scheme, made.note)
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_the_same_partition_is_the_same_file(tmp_path: Path) -> None:
    made = split("digits", "iid", 10, None)
    assert save(made, tmp_path / "a.npz").read_bytes() == save(made, tmp_path / "b.npz").read_bytes()


def test_rows_left_out_are_said(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"indices": [[0, 3], [], [1]]}))
    made = load(tmp_path / "s.json", np.array([0, 1, 1, 0]))
    assert made.note == "1 of 4 training rows belong to no client" and made.sizes.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"indices": [[0, 1], [1]]}', "row 1 is handed out 2 times"),
        ('{"indices": [[0, 4]]}', "index 4"),
        ('{"indices": [[-1]]}', "index -1"),
        ('{"indices": [[0.5]]}', "lists of integers"),
        ('{"indices": [["a"]]}', "lists of integers"),
        ('{"indices": [[0]], "counts": [[0, 1]]}', "other data"),
        ('{"indices": [[0]], "format": 99}', "format 99"),
        ('{"indices": []}', "no clients"),
        ('{"indices": 7}', "cannot be read"),
        ("[1]", "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(UserError, match=words):
        load(tmp_path / "s.json", np.array([0, 1, 1, 0]))


def test_a_file_for_other_labels_is_refused(tmp_path: Path) -> None:
    file = save(split("digits", "iid", 10, None), tmp_path / "s.npz")
    with pytest.raises(UserError, match="other data"):
        load(file, np.roll(DIGITS, 500))
    with pytest.raises(UserError, match="outside the 100 training rows"):
        load(file, DIGITS[:100], 10)
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(UserError, match="cannot be read"):
        load(file, DIGITS)
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "none.npz", DIGITS)
    with pytest.raises(UserError, match=r"\.npz or \.json"):
        load(tmp_path / "s.pkl", DIGITS)


def test_a_pickled_file_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", indices=np.array([[1], None], dtype=object), sizes=np.array([1]))
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "s.npz", DIGITS)


@pytest.mark.parametrize("beta", [1e-4, 1e-300])
def test_mixes_that_underflow_are_refused(beta: float) -> None:
    """They would turn into equal shares without a word."""
    with pytest.raises(UserError, match="underflow"):
        partition(np.arange(1000) % 10, scheme="dir_client", clients=10, beta=beta, seed=0, classes=10)
