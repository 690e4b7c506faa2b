"""The streams and draws that two teams must share (protocol 0 and 4.3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import Identity, federation
from toy import build

from protofl import rng
from protofl.data.augment import Pipeline


def test_training_stream() -> None:
    stream = rng.train(0, 0, 0)
    assert stream.permutation(10)[:5].tolist() == [0, 9, 3, 4, 5]
    offsets = stream.randint(0, 9, (2, 10))
    assert offsets[0, :3].tolist() == [2, 1, 6] and offsets[1, :3].tolist() == [6, 2, 2]
    assert (stream.random_sample(10) < 0.5)[:3].tolist() == [True, False, False]
    assert (30 * stream.random_sample(10) - 15)[0] == pytest.approx(14.590181, abs=1e-6)
    assert stream.permutation(10)[:5].tolist() == [4, 3, 2, 8, 7]
    assert rng.train(1, 2, 7).permutation(10)[:5].tolist() == [1, 4, 0, 7, 3]


def test_private_streams() -> None:
    offsets = rng.private("fednh", "survey", 0, 0, 0).randint(0, 9, (2, 10))
    assert offsets[0, :5].tolist() == [3, 5, 0, 4, 5] and offsets[1, :5].tolist() == [7, 8, 6, 1, 8]
    normal = rng.private("fednh", "init", 0, -1, -1).standard_normal(2)
    assert normal == pytest.approx([-0.33356669, -0.55201004], abs=1e-8)


def test_the_pipeline_draws_in_the_order_of_the_protocol() -> None:
    stream = rng.train(0, 0, 0)
    stream.permutation(10)
    drawn = Pipeline(("zero_pad4", "crop32", "hflip", "rotate15"), (0,), (1,), 255, (32, 32, 3)).draw(stream, 10)
    assert drawn is not None
    assert drawn[0, :3].tolist() == [2, 6, 1] and float(drawn[0, 3]) == pytest.approx(14.590181, abs=1e-6)


def draws(n: int, t: int, **fields: object) -> list[int]:
    x = torch.zeros(n, 2, dtype=torch.float64)
    fed = federation(
        build("fedavg"),
        Identity(2, 2),
        x,
        torch.zeros(n, dtype=torch.long),
        [[i] for i in range(n)],
        **fields,
    )
    return fed.drawn(t)


def test_client_draws() -> None:
    ten = dict(participation=0.1)
    assert draws(100, 0, **ten) == [80, 84, 33, 81, 93, 17, 36, 82, 69, 65]
    assert draws(100, 0, client_sampling="fednh_compat", **ten) == [80, 84, 33, 81, 93, 17, 36, 82, 69, 65]
    assert draws(100, 0, seed=1, **ten) == [18, 91, 11, 75, 53, 70, 58, 28, 71, 25]
    assert draws(100, 0, seed=1, client_sampling="fednh_compat", **ten) == [
        83,
        30,
        56,
        24,
        16,
        23,
        2,
        27,
        28,
        13,
    ]
    assert draws(100, 0, participation=0.2, client_sampling="moon_compat") == [
        49, 97, 53, 5, 33, 65, 62, 51, 38, 61, 45, 74, 27, 64, 17, 36, 96, 12, 79, 32,
    ]  # fmt: skip
    shifted = draws(100, 1, client_sampling="fednh_compat", **ten)
    assert shifted == draws(100, 0, seed=1, client_sampling="fednh_compat", **ten)


def test_ages_of_clients() -> None:
    """Protocol 4.3: at ratio .1, T=200, run seed 0, every client is drawn 11 to 30 times."""
    rounds = [rng.draw(0, t).permutation(100)[:10] for t in range(200)]
    times = np.bincount(np.concatenate(rounds), minlength=100)
    last = np.array([max(t for t, ids in enumerate(rounds) if i in ids) for i in range(100)])
    age = 199 - last
    assert (times.min(), times.max()) == (11, 30)
    assert (round(age.mean(), 1), np.median(age), age.max()) == (10.2, 6, 86)


def test_participation_counts() -> None:
    assert len(draws(100, 0, participation=0.29)) == 29  # int(0.29 * 100) is 28
    assert len(draws(10, 0, participation=0.01)) == 1
    assert sorted(draws(10, 0)) == list(range(10))


def test_empty_clients_are_never_drawn() -> None:
    x = torch.zeros(3, 2, dtype=torch.float64)
    parts = [[0], [], [1], [], [2]]
    y = torch.zeros(3, dtype=torch.long)
    for t in range(5):
        fed = federation(build("fedavg"), Identity(2, 2), x, y, parts, participation=0.8)
        assert set(fed.drawn(t)) == {0, 2, 4}
