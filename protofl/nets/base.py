"""Networks without state: an architecture, the names of its tensors, and functions of them.

A `Net` holds no weights. They live in a `Tree` from name to tensor, in the order of a `state_dict` (modules
as they are written down, a block's main path before its shortcut, weight before bias). So one architecture
serves any number of models at once: one client plainly, or many under `torch.func.vmap`, whose weights and
(padded, masked) batches have one more axis that the code here never sees. That is why nothing here branches
on the values of tensors, writes into an input, or asks a tensor for a Python number.

Every net has the same parts, told apart by the beginnings of names:

    encoder: x [rows, C, H, W] -> r [rows, d]
    projection: r -> z [rows, Q]    Linear, ReLU, Linear (MOON 3.2); z is r where a net has none
    head: z (or r) -> logits [rows, K]
    aux: r -> logits [rows, K]      an auxiliary classifier that only training sees (FedCSPC's code), optional
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import re
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, get_args

import torch
import torch.nn.functional as F
from numpy.random import RandomState
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import UserError
from ..tree import Tree

Mode = Literal["train", "train_frozen", "eval"]
Kind = Literal["weight", "bias", "kaiming", "ones", "zeros", "counter"]

MODES: tuple[Mode, ...] = get_args(Mode)
MOMENTUM = 0.1  # of running statistics, torch's default
EPS = 1e-5  # of normalisation layers, torch's default
SMALLEST_NORM = 1e-6  # a shorter z has no direction


class Entry(NamedTuple):
    """One tensor of a net.

    kind says how it starts (protofl's `init`, PyTorch's defaults): `weight` uniform within 1/sqrt(fan_in);
    `bias` the same, with the fan_in of the weight before it; `kaiming` normal with std sqrt(2/fan_out) (He et
    al. 2015); `ones`, `zeros`; `counter` the integer 0.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind


class Options(NamedTuple):
    """What a setting chooses about a network, whatever its encoder.

    projection_dim: Q, or None for a net without a projection.
    reads_z: whether the output layer reads z, or else r.
    z_normalize: z / |z| takes the place of z everywhere (FedProc's code), r / |r| without projection.
    aux_classifier: a second output layer on r with a cross-entropy of its own (FedCSPC's code).
    head_bias: whether the output layer has a bias.
    """

    classes: int
    shape: tuple[int, int, int]
    projection_dim: int | None
    reads_z: bool = True
    z_normalize: bool = False
    aux_classifier: bool = False
    head_bias: bool = True


class Statistics(NamedTuple):
    """What a batch tells of its channels: mean and unbiased variance [channels].

    seen: 1, or 0 for a batch of padding alone, which must leave no trace in running statistics.
    """

    mean: Tensor
    var: Tensor
    seen: Tensor | int


class Batch(Protocol):
    """What `Net.loss` reads of a batch: x [rows, C, H, W], y [rows] and the mean over its real rows."""

    @property
    def x(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...
    def mean(self, values: Tensor) -> Tensor: ...


class Net:
    """An architecture: encoder -> r, projection -> z, output layer -> logits.

    A function of a batch receives a *bound* net (`bound`), which knows the mode, which rows are real, and
    gathers in `updates` what normalisation layers want to remember. An unbound net is in mode "eval".

    Attributes:
        name, classes, shape: as given to `build`; shape is (H, W, C) of the input.
        encoded: width d of r = encode(x).
        projected: width Q of the projection, None without one.
        dim: width of the embedding, which is what the output layer reads.
        mode: "train"; "train_frozen": batch statistics, nothing remembered; "eval": running statistics.
        mask: [rows], 1 for real rows and 0 for padding; None: all are real.
        updates: new values of running statistics by full name, detached; filled in mode "train" alone.
        passes: an entry per pass of the encoder over the batch: whether gradients flow back through it.
        moves: whether the encoder is trained by what is computed now.
        encoder_end: names (a regular expression) of the encoder's last layers; None where a net does not say.
        default_scale: where FedNH's cosine scale starts (Conv2Cifar 1, ResNet18 20 in its code).
        optional_relu: whether `encode` can leave out the ReLU before r.
        pools: whether r is the mean of a `feature_map` over its places.
    """

    encoder = r"encoder\."
    projection = r"projection\."
    head = r"head\."
    aux = r"aux\."
    buffers = r".*\.(running_mean|running_var|num_batches_tracked)$"
    encoder_end: str | None = None
    default_scale: float = 1.0
    optional_relu: bool = False
    pools: bool = False

    def __init__(self, name: str, encoded: int, options: Options) -> None:
        self.name = name
        self.classes = options.classes
        self.shape = options.shape
        self.encoded = encoded
        self.projected = options.projection_dim
        self.options = options
        self.reads_z = options.reads_z
        self.dim = self.projected if self.projected and self.reads_z else encoded
        self.mode: Mode = "eval"
        self.mask: Tensor | None = None
        self.updates = Tree()
        self.passes: list[bool] = []
        self.moves = True
        self.place = ""

    def bound(self, mode: Mode, mask: Tensor | None = None, moves: bool = True) -> Net:
        """This net for one batch: its mode, its real rows (mask [rows]), nothing remembered yet."""
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
        net = copy.copy(self)
        net.mode, net.mask, net.updates, net.passes, net.moves = mode, mask, Tree(), [], moves
        return net

    def within(self, place: str) -> Net:
        """The same net for a tree whose names were stripped of `place`; both fill the same `updates`."""
        net = copy.copy(self)
        net.place = self.place + place
        return net

    # ---- the tensors ---------------------------------------------------------------------------------------

    def encoder_table(self) -> list[Entry]:
        """The tensors of the encoder, in order."""
        raise NotImplementedError

    def table(self) -> list[Entry]:
        """All tensors of the net in the order of a state_dict: init, counts and buffers follow from it."""
        out = self.encoder_table()
        if self.projected:
            out += declare_linear("projection.0", self.encoded, self.encoded)
            out += declare_linear("projection.2", self.encoded, self.projected)
        out += declare_linear("head", self.dim, self.classes, self.options.head_bias)
        if self.options.aux_classifier:
            out += declare_linear("aux", self.encoded, self.classes)
        return out

    def init(self, stream: RandomState) -> Tree:
        """Initial weights drawn from `stream` in the order of `table`: float64 cast to float32."""
        w, fan = Tree(), 1
        for name, shape, kind in self.table():
            fan = _fan(shape, kind, fan)
            if kind in ("weight", "bias"):
                drawn = stream.uniform(-1 / math.sqrt(fan), 1 / math.sqrt(fan), shape)
            elif kind == "kaiming":
                drawn = stream.standard_normal(shape) * math.sqrt(2 / fan)
            else:
                w[name] = _constant(shape, kind)
                continue
            w[name] = torch.from_numpy(drawn.astype("float32"))
        return w

    def init_torch(self, seed: int) -> Tree:
        """The weights of PyTorch's modules, built in the order of `table` after `torch.manual_seed(seed)`.

        `kaiming` convolutions are drawn twice, as in torchvision: by default when built, again when all are
        built. PyTorch's global generator is left alone. Last bits may differ between kinds of CPU.
        """
        generator = torch.Generator().manual_seed(seed)
        w, fan, table = Tree(), 1, self.table()
        for name, shape, kind in table:
            fan = _fan(shape, "bias" if kind == "bias" else "weight", fan)
            if kind in ("weight", "kaiming"):
                w[name] = _constant(shape, "zeros")
                torch.nn.init.kaiming_uniform_(w[name], a=math.sqrt(5), generator=generator)
            elif kind == "bias":
                w[name] = _constant(shape, "zeros").uniform_(
                    -1 / math.sqrt(fan), 1 / math.sqrt(fan), generator=generator
                )
            else:
                w[name] = _constant(shape, kind)
        for name, _, kind in table:
            if kind == "kaiming":
                torch.nn.init.kaiming_normal_(w[name], mode="fan_out", nonlinearity="relu", generator=generator)
        return w

    @property
    def last_block(self) -> str | None:
        """Names (a regular expression) of what stands before the output layer: the projection that it reads, or else
        the encoder's last layers; None where a net does not tell its last layers apart."""
        return self.projection if self.projected and self.reads_z else self.encoder_end

    def trainable(self, w: Tree) -> Tree:
        """The parameters among `w`: all but the buffers."""
        return w.without(self.buffers)

    def count(self) -> dict[str, int]:
        """Trainable numbers by part and in total; beside them the buffers: floats, and integer counters."""
        out = dict.fromkeys(("encoder", "projection", "head", "aux", "total", "buffers", "counters"), 0)
        for name, shape, kind in self.table():
            if re.match(self.buffers, name):
                out["counters" if kind == "counter" else "buffers"] += math.prod(shape)
            else:
                out[name.partition(".")[0]] += math.prod(shape)
                out["total"] += math.prod(shape)
        return out

    @functools.cached_property
    def macs(self) -> int:
        """Multiply-adds of convolutions and linear layers in the forward pass of one sample."""
        w = Tree({e.name: torch.zeros(e.shape) for e in self.table()})
        x = torch.zeros(1, self.shape[2], *self.shape[:2])
        counter = _Multiplications()
        with counter, torch.no_grad():
            self.bound("eval")(w, x)
        return counter.total

    # ---- functions of a batch ------------------------------------------------------------------------------

    def encode(self, w: Tree, x: Tensor, relu: bool = True) -> Tensor:
        """r [rows, d] of x [rows, C, H, W]; relu=False: without the last ReLU (`optional_relu` nets only)."""
        if not relu and not self.optional_relu:
            raise UserError(f"net {self.name}: the ReLU before the embedding cannot be left out")
        self.passes.append(self.moves and torch.is_grad_enabled())
        return self._encode(w, x, relu)

    def _encode(self, w: Tree, x: Tensor, relu: bool) -> Tensor:
        """What an encoder defines; relu is False only where `optional_relu` allows it."""
        raise NotImplementedError

    def feature_map(self, w: Tree, x: Tensor) -> Tensor:
        """The map [rows, d, H', W'] of x [rows, C, H, W] that `pool` makes r of (`pools` nets only)."""
        if not self.pools:
            raise UserError(f"net {self.name}: r is not the mean of a feature map; the ResNets' is")
        self.passes.append(self.moves and torch.is_grad_enabled())
        return self._feature_map(w, x)

    def _feature_map(self, w: Tree, x: Tensor) -> Tensor:
        """What an encoder that pools defines."""
        raise NotImplementedError

    def pool(self, maps: Tensor) -> Tensor:
        """r [rows, d] of maps [rows, d, H', W']."""
        return maps.mean((2, 3))

    def project(self, w: Tree, r: Tensor) -> Tensor:
        """z [rows, Q] of r [rows, d]; r itself without a projection; of length 1 (or 0) with z_normalize."""
        z = r
        if self.projected:
            z = F.relu(affine(r, w["projection.0.weight"], w["projection.0.bias"]))
            z = affine(z, w["projection.2.weight"], w["projection.2.bias"])
        return unit(z) if self.options.z_normalize else z

    def classify(self, w: Tree, r: Tensor, z: Tensor) -> Tensor:
        """Logits [rows, K] from z, or from r where the options say so."""
        return affine(z if self.reads_z else r, w["head.weight"], w.get("head.bias"))

    def embed(self, w: Tree, x: Tensor) -> Tensor:
        """The embedding [rows, dim]: what the output layer reads."""
        r = self.encode(w, x)
        return self.project(w, r) if self.reads_z else r

    def __call__(self, w: Tree, x: Tensor) -> Tensor:
        """Logits [rows, K]."""
        embedding = self.embed(w, x)
        return self.classify(w, embedding, embedding)

    def aux_loss(self, w: Tree, r: Tensor, batch: Batch) -> Tensor | float:
        """Cross-entropy of the auxiliary classifier on r, weight 1; 0.0 without one."""
        if not self.options.aux_classifier:
            return 0.0
        logits = affine(r, w["aux.weight"], w["aux.bias"])
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))

    def loss(self, w: Tree, batch: Batch) -> Tensor:
        """Mean cross-entropy over the real rows, plus `aux_loss`."""
        r = self.encode(w, batch.x)
        z = self.project(w, r) if self.reads_z else r
        loss = batch.mean(F.cross_entropy(self.classify(w, r, z), batch.y, reduction="none"))
        return loss + self.aux_loss(w, r, batch) if self.options.aux_classifier else loss

    # ---- for the encoders ----------------------------------------------------------------------------------

    def batch_norm(self, w: Tree, name: str, x: Tensor) -> Tensor:
        """Batch normalisation of x [rows, channels, H, W]; padded rows take no part in the statistics.

        Equals `torch.nn.BatchNorm2d` on the real rows (eps 1e-5, momentum 0.1, running variance unbiased),
        but for a single value per channel, which PyTorch refuses: its variance is 0 here, remembered without
        correction.
        """
        weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        if self.mode == "eval":
            mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
            return F.batch_norm(x, mean, var, weight, bias, training=False, eps=EPS)
        if self.mask is None:
            out, statistics = _whole_norm(x, weight, bias)
        else:
            out, statistics = _masked_norm(x, weight, bias, self.mask.to(x.dtype))
        if self.mode == "train":
            self._remember(w, name, statistics)
        return out

    def _remember(self, w: Tree, name: str, statistics: Statistics) -> None:
        """Moves the running statistics; a second pass through a layer continues where the first left them."""
        mean, var, seen = statistics
        for part, new in (("running_mean", mean), ("running_var", var)):
            old = self._latest(w, f"{name}.{part}")
            self.updates[f"{self.place}{name}.{part}"] = (old + (new - old) * seen * MOMENTUM).detach()
        counter = f"{name}.num_batches_tracked"
        self.updates[self.place + counter] = self._latest(w, counter) + seen

    def _latest(self, w: Tree, name: str) -> Tensor:
        """A buffer as this bound net last left it."""
        latest: Tensor = self.updates.get(self.place + name, w[name])
        return latest


# ---- layers ------------------------------------------------------------------------------------------------


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out].

    In this order of factors the stacked gradients of `weight` come out contiguous under vmap, where those of
    `F.linear` do not, and a small MLP of 50 clients trains a quarter faster (plainly it trains a fifth
    slower).
    """
    out = (weight @ x.mT).mT
    return out if bias is None else out + bias


def unit(z: Tensor) -> Tensor:
    """z / |z| by rows [rows, width]; a row shorter than 1e-6 becomes 0 and passes no gradient.

    Such a row is replaced by a constant *before* the division: a clamped norm would pass gradients of order
    1e6, a `where` behind the division NaN.
    """
    short = z.detach().norm(dim=-1, keepdim=True) < SMALLEST_NORM
    safe = torch.where(short, torch.ones_like(z), z)
    return torch.where(short, torch.zeros_like(z), safe / safe.norm(dim=-1, keepdim=True))


def _whole_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Statistics]:
    """x normalised by its batch statistics, and these."""
    out, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, MOMENTUM, EPS)
    var = (inverse.square().reciprocal() - EPS).clamp_min(0)
    n = x.numel() // x.shape[1]
    return out, Statistics(mean, var * (n / max(n - 1, 1)), 1)


def _masked_norm(x: Tensor, weight: Tensor, bias: Tensor, real: Tensor) -> tuple[Tensor, Statistics]:
    """x normalised by the statistics of its real rows, and these; padded rows are normalised alike."""
    n = (real.sum() * (x.shape[2] * x.shape[3])).clamp_min(1)
    mean = real @ x.sum((2, 3)) / n
    centred = x - mean[:, None, None]
    var = real @ centred.square().sum((2, 3)) / n
    factor = weight * (var + EPS).rsqrt()
    out = torch.addcmul(bias[:, None, None], centred, factor[:, None, None])
    seen = real.sum().clamp_max(1).to(torch.int64)
    return out, Statistics(mean, var * n / (n - 1).clamp_min(1), seen)


# ---- declarations of tensors -------------------------------------------------------------------------------


def declare_linear(name: str, n_in: int, n_out: int, bias: bool = True) -> list[Entry]:
    """The tensors of a linear layer."""
    weight = Entry(f"{name}.weight", (n_out, n_in), "weight")
    return [weight, Entry(f"{name}.bias", (n_out,), "bias")] if bias else [weight]


def declare_conv(
    name: str, n_in: int, n_out: int, kernel: int, bias: bool = True, kind: Kind = "weight"
) -> list[Entry]:
    """The tensors of a convolution."""
    weight = Entry(f"{name}.weight", (n_out, n_in, kernel, kernel), kind)
    return [weight, Entry(f"{name}.bias", (n_out,), "bias")] if bias else [weight]


def declare_norm(name: str, channels: int, running: bool) -> list[Entry]:
    """The tensors of an affine normalisation layer, `running`: with the buffers of batch normalisation."""
    out = [Entry(f"{name}.weight", (channels,), "ones"), Entry(f"{name}.bias", (channels,), "zeros")]
    if running:
        out.append(Entry(f"{name}.running_mean", (channels,), "zeros"))
        out.append(Entry(f"{name}.running_var", (channels,), "ones"))
        out.append(Entry(f"{name}.num_batches_tracked", (), "counter"))
    return out


def _fan(shape: tuple[int, ...], kind: Kind, before: int) -> int:
    """What a tensor's bound is made of: fan_out for `kaiming`, else fan_in, a bias that of its weight."""
    if kind == "kaiming":
        return shape[0] * math.prod(shape[2:])
    return math.prod(shape[1:]) if kind == "weight" else before


def _constant(shape: tuple[int, ...], kind: Kind) -> Tensor:
    """A tensor that nothing is drawn for."""
    if kind == "counter":
        return torch.zeros(shape, dtype=torch.int64)
    return torch.full(shape, 1.0 if kind == "ones" else 0.0, dtype=torch.float32)


class _Multiplications(TorchFunctionMode):
    """Counts the multiply-adds of what is computed within (PyTorch's own counter takes seconds to import)."""

    def __init__(self) -> None:
        super().__init__()
        self.total: int = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.conv2d:
            self.total += out.numel() * args[1][0].numel()
        elif func in (Tensor.matmul, Tensor.__matmul__):
            self.total += out.numel() * args[0].shape[-1]
        return out


# ---- for callers -------------------------------------------------------------------------------------------


def weights_hash(net: Net, w: Tree) -> str:
    """First 16 hex digits of the SHA-256 of the parameters in order, as little-endian float32, no buffers."""
    digest = hashlib.sha256()
    for name, _, _ in net.table():
        if not re.match(net.buffers, name):
            digest.update(w[name].detach().cpu().numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]


def too_small(name: str, shape: tuple[int, int, int], smallest: int) -> NoReturn:
    """Refuses images that a net's layers would shrink to nothing."""
    height, width, channels = shape
    raise UserError(
        f"net {name}: images of {height}x{width}x{channels} are too small, it needs at least {smallest}x{smallest}"
    )
