"""The map before pooling: what its mean is, what it counts and remembers, who has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numpy.random import RandomState
from torch.func import vmap

from protofl.errors import UserError
from protofl.nets import NETS, Mode, Net, build
from protofl.tree import Tree, stack

SIDE = 10


def made(name: str, **options: Any) -> tuple[Net, Tree, torch.Tensor]:
    """A net, weights and images in float64."""
    net = build(name, classes=3, shape=(SIDE, SIDE, 3), **options)
    w = net.init(RandomState(0)).map(lambda v: v.double() if v.is_floating_point() else v)
    return net, w, torch.from_numpy(RandomState(1).standard_normal((4, 3, SIDE, SIDE)))


RESNETS = [("resnet18_gn2", {}, 512), ("resnet18_bn", {"projection_dim": 5}, 512),
           ("resnet50_bn", {"projection_dim": 5}, 2048)]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "width"), RESNETS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_its_mean_is_the_encoding(name: str, options: dict[str, Any], width: int, mode: Mode) -> None:
    net, w, x = made(name, **options)
    mapped, encoded = net.bound(mode), net.bound(mode)
    maps = mapped.feature_map(w, x)
    assert net.pools and maps.shape == (4, width, 2, 2) and width == net.encoded
    assert (maps >= 0).all() and maps.std((2, 3)).max() > 0
    assert torch.equal(mapped.pool(maps), encoded.encode(w, x))
    assert mapped.passes == encoded.passes == [True]  # one pass, which gradients may flow back through
    assert list(mapped.updates) == list(encoded.updates)
    assert all(map(torch.equal, mapped.updates.values(), encoded.updates.values()))
    assert bool(mapped.updates) is (mode == "train" and name != "resnet18_gn2")


def test_it_counts_as_a_forward_pass_without_gradients() -> None:
    net, w, x = made("resnet18_gn2")
    with torch.no_grad():
        bound = net.bound("eval")
        bound.feature_map(w, x)
    assert bound.passes == [False]


def test_many_clients_at_once() -> None:
    net, w, x = made("resnet18_gn2")
    models = [w, w.map(lambda v: 1.1 * v)]
    together = vmap(lambda tree: net.bound("eval").feature_map(tree, x))(stack(models))
    for one, model in zip(together, models):
        assert torch.allclose(one, net.bound("eval").feature_map(model, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", sorted(set(NETS) - {name for name, _, _ in RESNETS}))
def test_other_nets_have_none(name: str) -> None:
    net = build(name, classes=3, shape=(16, 16, 3))
    assert not net.pools
    with pytest.raises(UserError, match=f"net {name}: r is not the mean of a feature map") as refusal:
        net.feature_map(net.init(RandomState(0)), torch.zeros(1, 3, 16, 16))
    assert "\n" not in str(refusal.value)
