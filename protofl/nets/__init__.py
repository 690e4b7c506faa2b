"""Networks: architectures without state, built by name.

net = build("simple_cnn", classes=10, shape=(32, 32, 3))
w = net.init(numpy.random.RandomState(0))
logits = net(w, x)
"""

from __future__ import annotations

import functools
from typing import TypeVar

from ..errors import UserError, nearest
from .base import Batch, Entry, Kind, Mode, Net, Options, affine, unit, weights_hash
from .resnet import NORMS, STEMS, ResNet
from .small import LAYERS as _SMALL
from .small import SmallNet

T = TypeVar("T", bound=str)

__all__ = [
    "NETS",
    "NORMS",
    "STEMS",
    "Batch",
    "Entry",
    "Kind",
    "Mode",
    "Net",
    "Options",
    "affine",
    "build",
    "unit",
    "weights_hash",
]

NETS = {
    "cnn_fednh": "two 64-channel convolutions, two linear layers, head without bias (FedNH on CIFAR)",
    "simple_cnn": "LeNet-like, with projection (MOON, FedProc, FedCSPC on CIFAR-10)",
    "simple_cnn_plain": "simple_cnn without projection (NIID-Bench)",
    "resnet18_gn2": "ResNet-18 with GroupNorm(2), head without bias (FedNH on Tiny-ImageNet)",
    "resnet18_bn": "ResNet-18 with BatchNorm and projection (FedCSPC)",
    "resnet50_bn": "ResNet-50 with BatchNorm and projection (MOON, FedProc on CIFAR-100, Tiny-ImageNet)",
    "mlp": "two linear layers of 128 and 64, with projection (digits)",
    "mlp_plain": "mlp without projection (digits)",
    "conv_digits": "two 3x3 convolutions and a linear layer, with projection (digits)",
}


@functools.lru_cache(maxsize=32)  # a net holds no weights
def build(
    name: str,
    *,
    classes: int,
    shape: tuple[int, int, int],
    projection_dim: int = 256,
    use_projection_head: bool = True,
    classifier_input: str = "z",
    z_normalize: bool = False,
    aux_classifier: bool = False,
    stem: str = "cifar",
    resnet_norm: str = "groupnorm2",
) -> Net:
    """The net of this name for images of `shape` (H, W, C).

    projection_dim: width Q of z; without effect on nets that have no projection, like use_projection_head.
    classifier_input, z_normalize, aux_classifier: see `Options`.
    stem: of resnet18_bn and resnet50_bn; resnet_norm: of resnet18_gn2; see `ResNet`.
    """
    if name not in NETS:
        raise UserError(f"unknown net {name!r}{nearest(name, NETS)}; known: {', '.join(NETS)}")
    if len(shape) != 3 or min(*shape, classes, projection_dim) < 1:
        raise UserError(
            f"net {name}: shape must be (H, W, C), and it, classes and projection_dim positive, "
            f"not {tuple(shape)}, {classes} and {projection_dim}"
        )
    if classifier_input not in ("z", "r"):
        raise UserError(f"net {name}: classifier_input must be 'z' or 'r', not {classifier_input!r}")
    chosen_stem = _choice(name, "stem", stem, STEMS, name in ("resnet18_bn", "resnet50_bn"))
    chosen_norm = _choice(name, "resnet_norm", resnet_norm, NORMS, name == "resnet18_gn2")
    options = Options(
        classes=classes,
        shape=(shape[0], shape[1], shape[2]),
        projection_dim=projection_dim if use_projection_head else None,
        reads_z=classifier_input == "z",
        z_normalize=z_normalize,
        aux_classifier=aux_classifier,
    )
    if name in _SMALL:
        return SmallNet(name, options)
    return ResNet(name, options, chosen_stem, chosen_norm if name == "resnet18_gn2" else "batchnorm")


def _choice(name: str, option: str, value: str, known: tuple[T, ...], offered: bool) -> T:
    """The one of `known` that equals `value`; nets without the option take its default, the first."""
    for choice in known if offered else known[:1]:
        if choice == value:
            return choice
    if value in known:
        raise UserError(f"net {name}: {option} is not among its options, leave it at {known[0]!r}")
    raise UserError(f"net {name}: {option} must be one of {', '.join(map(str, known))}, not {value!r}")
