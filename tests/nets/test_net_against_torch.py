"""Every net against the same architecture written as torch.nn modules."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from numpy.random import RandomState
from torch import Tensor, nn

from protofl.nets import Net, build, unit
from protofl.tree import Tree


class Whole(nn.Module):
    """encoder, projection, head, aux: modules of these names, in this order."""

    def __init__(self, encoder: nn.Module, d: int, q: int | None, classes: int, bias: bool, aux: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, q)) if q else nn.Identity()
        self.head = nn.Linear(q or d, classes, bias=bias)
        self.aux = nn.Linear(d, classes) if aux else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.projection(self.encoder(x)))
        return out


class ConvEncoder(nn.Module):
    """Two convolutions, then one or two linear layers."""

    def __init__(self, a: int, b: int, kernel: int, padding: int, flat: int, widths: list[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, a, kernel, padding=padding)
        self.conv2 = nn.Conv2d(a, b, kernel, padding=padding)
        self.fc1 = nn.Linear(flat, widths[0])
        self.fc2 = nn.Linear(widths[0], widths[1]) if len(widths) > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return x if self.fc2 is None else F.relu(self.fc2(x))


class MlpEncoder(nn.Module):
    def __init__(self, flat: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(flat, 128)
        self.fc2 = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))


def normalisation(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batchnorm" else nn.GroupNorm(2, channels)


def within_block(kind: str, channels: int) -> nn.Module:
    return nn.Identity() if kind == "none_fednh" else normalisation(kind, channels)


class Residual(nn.Module):
    """A BasicBlock, or a Bottleneck with the stride on its 3x3 convolution."""

    def __init__(self, n_in: int, width: int, stride: int, bottleneck: bool, kind: str) -> None:
        super().__init__()
        n_out = 4 * width if bottleneck else width
        if bottleneck:
            self.conv1 = nn.Conv2d(n_in, width, 1, bias=False)
            self.norm1 = within_block(kind, width)
            self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
            self.norm2 = within_block(kind, width)
            self.conv3 = nn.Conv2d(width, n_out, 1, bias=False)
            self.norm3 = normalisation(kind, n_out)
        else:
            self.conv1 = nn.Conv2d(n_in, width, 3, stride, 1, bias=False)
            self.norm1 = within_block(kind, width)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.norm2 = within_block(kind, width)
        self.bottleneck = bottleneck
        self.shortcut = nn.Sequential()
        if stride != 1 or n_in != n_out:
            conv = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=normalisation(kind, n_out)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.bottleneck:
            y = self.norm3(self.conv3(F.relu(y)))
        return F.relu(y + self.shortcut(x))


class ResNetEncoder(nn.Module):
    def __init__(self, blocks: tuple[int, ...], bottleneck: bool, kind: str, stem: str) -> None:
        super().__init__()
        small = stem == "cifar"
        self.conv1 = nn.Conv2d(3, 64, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        self.norm1 = normalisation(kind, 64)
        self.pool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        n_in = 64
        for stage, count in enumerate(blocks):
            width, layers = 64 * 2**stage, []
            for i in range(count):
                stride = 2 if stage and not i else 1
                layers.append(Residual(n_in, width, stride, bottleneck, kind))
                n_in = width * (4 if bottleneck else 1)
            setattr(self, f"stage{stage + 1}", nn.Sequential(*layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm1(self.conv1(x))))
        for stage in range(1, 5):
            x = getattr(self, f"stage{stage}")(x)
        return x.mean((2, 3))


class Case(NamedTuple):
    name: str
    side: int
    options: dict[str, Any]
    id: str


CASES = [
    Case("cnn_fednh", 16, {}, "cnn_fednh"),
    Case("simple_cnn", 20, {"projection_dim": 32, "aux_classifier": True}, "simple_cnn"),
    Case("simple_cnn_plain", 16, {}, "simple_cnn_plain"),
    Case("mlp", 5, {"projection_dim": 32}, "mlp"),
    Case("mlp_plain", 5, {}, "mlp_plain"),
    Case("conv_digits", 9, {"projection_dim": 32}, "conv_digits"),
    Case("resnet18_gn2", 8, {}, "gn2"),
    Case("resnet18_gn2", 8, {"resnet_norm": "none_fednh"}, "gn2-none"),
    Case("resnet18_gn2", 8, {"resnet_norm": "batchnorm"}, "gn2-batch"),
    Case("resnet18_bn", 16, {"stem": "k7s2"}, "resnet18-k7s2"),
    Case("resnet18_bn", 32, {"stem": "imagenet"}, "resnet18-imagenet"),
    Case("resnet50_bn", 8, {}, "resnet50"),
]
FLAT = {
    "cnn_fednh": 64,
    "simple_cnn": 64,
    "simple_cnn_plain": 16,
    "conv_digits": 128,
    "mlp": 75,
    "mlp_plain": 75,
}
WIDTHS = {"cnn_fednh": [384, 192], "conv_digits": [64]}
CHANNELS = {"cnn_fednh": (64, 64, 5, 0), "conv_digits": (16, 32, 3, 1)}


def modules(name: str, options: dict[str, Any], classes: int) -> Whole:
    """The reference, built in the order in which w0 is drawn."""
    q = None if name.endswith(("_plain", "_gn2")) or name == "cnn_fednh" else options.get("projection_dim", 256)
    encoder: nn.Module
    if name.startswith("resnet"):
        blocks = (3, 4, 6, 3) if "50" in name else (2, 2, 2, 2)
        kind = options.get("resnet_norm", "groupnorm2") if name.endswith("gn2") else "batchnorm"
        encoder = ResNetEncoder(blocks, "50" in name, kind, options.get("stem", "cifar"))
        d = 2048 if "50" in name else 512
    elif name.startswith("mlp"):
        encoder, d = MlpEncoder(FLAT[name]), 64
    else:
        widths = WIDTHS.get(name, [120, 84])
        encoder, d = ConvEncoder(*CHANNELS.get(name, (6, 16, 5, 0)), FLAT[name], widths), widths[-1]
    bias = name not in ("cnn_fednh", "resnet18_gn2")
    whole = Whole(encoder, d, q, classes, bias, options.get("aux_classifier", False))
    if name.endswith("_bn"):
        for m in whole.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
    return whole


def made(case: Case, classes: int = 3) -> Net:
    return build(case.name, classes=classes, shape=(case.side, case.side, 3), **case.options)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_names_initial_weights_and_function(case: Case) -> None:
    """Order of a state_dict, init_torch bit by bit, then logits, gradients and buffers in float64."""
    net = made(case)
    torch.manual_seed(11)
    reference = modules(case.name, case.options, net.classes)
    state = torch.random.get_rng_state()
    w = net.init_torch(11)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(w) == list(reference.state_dict()) == [e.name for e in net.table()]
    for name, value in reference.state_dict().items():
        assert w[name].dtype == value.dtype and torch.equal(w[name], value), name

    reference.double().train()
    w = Tree({k: v.clone() for k, v in reference.state_dict().items()})
    x = torch.from_numpy(RandomState(5).randn(4, 3, case.side, case.side))
    read = Tree({k: v.requires_grad_() for k, v in net.trainable(w).items() if not k.startswith("aux")})
    bound = net.bound("train")
    out, expected = bound(w, x), reference(x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    ours = torch.autograd.grad(out.square().sum(), list(read.values()))
    theirs = torch.autograd.grad(
        expected.square().sum(), [v for k, v in reference.named_parameters() if not k.startswith("aux")]
    )
    for name, a, b in zip(read, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().max() + 1), msg=name)
    buffers = dict(reference.named_buffers())
    assert bound.updates.keys() == buffers.keys()
    for name, value in bound.updates.items():
        torch.testing.assert_close(value, buffers[name], rtol=1e-12, atol=1e-12, msg=name)
    with torch.no_grad():
        evaluated = net.bound("eval")(w | bound.updates, x)
        torch.testing.assert_close(evaluated, reference.eval()(x), rtol=1e-10, atol=1e-11)


class Rows(NamedTuple):
    """The least a batch has to be for `Net.loss`."""

    x: Tensor
    y: Tensor

    def mean(self, values: Tensor) -> Tensor:
        return values.mean()


def test_parts_make_up_the_whole() -> None:
    net = build("conv_digits", classes=3, shape=(8, 8, 1), projection_dim=5, aux_classifier=True)
    w, batch = net.init(RandomState(0)), Rows(torch.rand(6, 1, 8, 8), torch.arange(6) % 3)
    r = net.encode(w, batch.x)
    z = net.project(w, r)
    logits = net.classify(w, r, z)
    assert torch.equal(net.embed(w, batch.x), z) and torch.equal(net(w, batch.x), logits)
    aux = F.cross_entropy(F.linear(r, w["aux.weight"], w["aux.bias"]), batch.y)
    torch.testing.assert_close(net.aux_loss(w, r, batch), aux)
    torch.testing.assert_close(net.loss(w, batch), F.cross_entropy(logits, batch.y) + aux)


def test_the_output_layer_can_read_r() -> None:
    net = build("mlp", classes=3, shape=(8, 8, 1), projection_dim=5, classifier_input="r")
    w, batch = net.init(RandomState(0)), Rows(torch.rand(6, 1, 8, 8), torch.arange(6) % 3)
    r = net.encode(w, batch.x)
    assert torch.equal(net.embed(w, batch.x), r) and net.project(w, r).shape == (6, 5)
    logits = net.classify(w, r, net.project(w, r))
    assert torch.equal(logits, net(w, batch.x))
    torch.testing.assert_close(logits, F.linear(r, w["head.weight"], w["head.bias"]))
    torch.testing.assert_close(net.loss(w, batch), F.cross_entropy(logits, batch.y))
    assert net.aux_loss(w, r, batch) == 0.0


@pytest.mark.parametrize(("normalise", "loss"), [(False, 2.871539), (True, 1.599326)])
def test_cross_entropy_worked_out_by_hand(normalise: bool, loss: float) -> None:
    """z = (1, 2, 2): logits (-0.5, 2, 1), or a third of them. -log softmax of class 0."""
    net = build("mlp", classes=3, shape=(8, 8, 1), projection_dim=3, z_normalize=normalise)
    w = net.init(RandomState(0)).map(lambda v: torch.zeros_like(v, dtype=torch.float64))
    w["projection.2.bias"] = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    w["head.weight"] = torch.tensor([[0.5, -0.5, 0], [0, 0.5, 0.5], [1, 0, 0]], dtype=torch.float64)
    batch = Rows(torch.zeros(1, 1, 8, 8, dtype=torch.float64), torch.tensor([0]))
    assert abs(float(net.loss(w, batch)) - loss) < 1e-6


@pytest.mark.parametrize("scale", [0.0, 1e-7])
def test_a_row_without_direction_becomes_zero_without_gradient(scale: float) -> None:
    x = torch.tensor([[1.0, 2, 2], [1, -1, 0], [0, 0, -3]])
    x[1] *= scale
    x.requires_grad_()
    z = unit(x)
    assert torch.equal(z[1], torch.zeros(3))
    torch.testing.assert_close(z, torch.tensor([[1 / 3, 2 / 3, 2 / 3], [0, 0, 0], [0, 0, -1]]))
    (gradient,) = torch.autograd.grad((z * torch.tensor([1.0, 0, 0])).sum(), x)
    # d(z_1)/dx of (1, 2, 2): (1 - z_1 z) / 3 = (8, -2, -2) / 27; of (0, 0, -3): (1, 0, 0) / 3
    torch.testing.assert_close(gradient, torch.tensor([[8, -2, -2], [0, 0, 0], [9, 0, 0]]) / 27)


def test_a_projection_that_is_zero_gets_no_gradient_from_normalised_z() -> None:
    net = build("mlp", classes=3, shape=(8, 8, 1), projection_dim=4, z_normalize=True)
    w = net.init(RandomState(0))
    w |= {k: torch.zeros_like(w[k]) for k in w if k.startswith("projection.2")}
    batch = Rows(torch.rand(6, 1, 8, 8), torch.arange(6) % 3)
    w = w.map(lambda v: v.requires_grad_())
    gradients = dict(zip(w, torch.autograd.grad(net.loss(w, batch), list(w.values())), strict=True))
    assert all(not v.any() for k, v in gradients.items() if k != "head.bias")
    assert gradients["head.bias"].any()


def test_without_a_projection_it_is_r_that_is_normalised() -> None:
    net = build("mlp_plain", classes=3, shape=(8, 8, 1), z_normalize=True)
    w, x = net.init(RandomState(0)), torch.rand(2, 1, 8, 8)
    r = net.encode(w, x)
    torch.testing.assert_close(net.embed(w, x), F.normalize(r))
    plain = build("mlp_plain", classes=3, shape=(8, 8, 1))
    assert torch.equal(plain.project(w, r), r)
