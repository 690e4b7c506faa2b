"""What a method is, and all that it may ask for.

A method is a frozen dataclass whose fields are its options. It consists of

* functions of one batch, `(net, w, batch, view) -> tensors`: pure, for one client, never batched by hand;
* a client program: ordinary Python for one client that yields requests (`Train`, `Survey`, `Collect`) and returns
  what the client uploads and what it keeps;
* server functions: any torch.

How many clients are answered in one call is the engine's business and cannot be seen from here. Rules:

1. Programs and server functions return *changes* of trees; the runtime merges them, so that parts compose.
2. Functions in a request are methods or module-level functions (a closure cannot be grouped with its like); tensors
   that differ per client travel in `const`.
3. Functions of a batch never branch on the value of a tensor and never write into what they are given.
4. Surveys return sums, never means: sums pad, shard and add. Padding rows are zero in `batch.onehot`, and
   `batch.mean` leaves them out.
5. Trees hold tensors, `Rows` and trees, and nothing else: they are counted, stored and resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch.nn.functional as F
from numpy.random import RandomState
from torch import Tensor

from .errors import UserError
from .options import choice, flag, number, text, value
from .same import Same
from .tree import Rows, Tree

if TYPE_CHECKING:
    from .nets import Net
    from .protocol import Protocol

__all__ = [
    "OFF", "WEIGHTINGS", "Batch", "Bill", "Client", "Collect", "Diverged", "Exchange", "Group", "Last", "Method",
    "Model", "Noise", "Plugin", "Program", "Rows", "Same", "Server", "Survey", "Task", "Train", "Tree", "View", "choice", "flag",
    "need", "number", "value",
]  # fmt: skip

OFF = math.inf
"""Group(clip=OFF): not clipped."""

Program = Generator[Any, Any, Any]


# ---- what a function of one batch sees --------------------------------------------------------------------------


class Batch(NamedTuple):
    """One mini-batch: what changes at every step."""

    x: Any  # [rows, C, H, W], augmented and normalised; on the server what was given to `server.train`
    y: Tensor  # [rows] class ids
    mask: Tensor  # [rows] 1 for real rows, 0 for padding
    frozen: Any = None  # what Train.frozen said about these rows
    noise: Any = None  # uniform numbers of Train.noise
    epoch: Any = 0  # 0 .. epochs-1
    step: Any = 0  # 0 .. steps-1

    def mean(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """Mean of `values` [rows] over the real rows (for which `where` [rows] holds); 0 if there are none."""
        m = self.mask if where is None else self.mask * where
        return (values * m).sum() / m.sum().clamp_min(1)

    def onehot(self, classes: int) -> Tensor:
        """[rows, classes]; a padding row is all zero."""
        return F.one_hot(self.y, classes).to(self.mask.dtype) * self.mask[:, None]


class View(NamedTuple):
    """What does not change while a request is answered."""

    shared: Tree  # as broadcast
    own: Tree  # this client's memory, as at the start of the round
    const: Tree  # what the program handed to this request
    n: Any  # samples of the client
    counts: Tensor  # [classes] samples per class
    steps: Any  # optimiser steps of this request
    epochs: Any  # epochs of this request
    lr: float  # eta_t
    round: int  # t
    rounds: int  # T


# ---- what a client program may ask for --------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Parameters with one setting; None: as the protocol says.

    The first group whose `names` (a regular expression) match takes a parameter; a parameter in no group does not
    move. Groups with equal `clip` and `norm` share one gradient norm: a group is not a clip scope.
    """

    names: str = ".*"
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    norm: str = ""


class Noise(NamedTuple):
    """Uniform numbers in [0, 1) for `batch.noise`: `shape` for every batch, or for every row of it. Always float64:
    floor(number * count) must not hang on the precision of the run."""

    shape: tuple[int, ...]
    per: str = "batch"  # "batch" | "row"


@dataclass(frozen=True, eq=False)
class Train:
    """Local SGD -> the weights, or (weights, sums) with a tally.

    One step: gradient of `loss`, `correct`, clip, `after_clip`, weight decay, momentum, step, `after_step`. These
    three see the parameters that move, and only those. `loss` returns a scalar, or (scalar, Tree of named terms to
    be recorded). `frozen` gives per-row tensors of constant models, once per sample where nothing is random.
    `tally` gathers sums before each step of the last epoch, or of every epoch. `stream` feeds `noise`; batches and
    augmentation come from the training stream, which nothing else touches. `recorded`: whether its loss goes into the
    record of the round; not where only the evaluation wants the result.
    """

    start: Tree
    loss: Callable[..., Any]  # (net, w, batch, view)
    groups: tuple[Group, ...] = (Group(),)
    epochs: int | None = None
    const: Tree = field(default_factory=Tree)
    mode: str = "train"  # of the normalisation layers in `loss`; "eval" and "train_frozen": as in a Survey
    frozen: Callable[..., Any] | None = None  # (net, batch, view)
    frozen_mode: str = "eval"  # "eval" | "train_frozen": batch statistics, buffers left alone
    correct: Callable[..., Tree] | None = None  # (grads, w, view) -> grads
    after_clip: Callable[..., Tree] | None = None  # (grads, w, view) -> grads
    after_step: Callable[..., Tree] | None = None  # (w, before, view) -> w
    tally: Callable[..., Tree] | None = None  # (net, w, batch, view) -> sums
    tally_epochs: str = "last"  # "last" | "all"
    noise: Noise | None = None
    stream: RandomState | None = None
    optimizer: str = "new"  # "same": with the momenta that this program's Train before left
    recorded: bool = True


@dataclass(frozen=True, eq=False)
class Survey:
    """One pass over the client's data -> the sum of `fn` over its batches.

    mode "eval"; "train_frozen": batch statistics; "train": batch statistics that the buffers remember, and the
    answer is (sums, weights). `stream` (private) feeds the augmentation and, where batches matter (another mode than
    eval, or drop_last), their order; without augmentation in eval mode it is not touched.
    """

    w: Tree
    fn: Callable[..., Tree]  # (net, w, batch, view) -> sums
    const: Tree = field(default_factory=Tree)
    mode: str = "eval"
    augment: bool = False
    drop_last: bool = False
    stream: RandomState | None = None


@dataclass(frozen=True, eq=False)
class Collect:
    """One pass over the client's data -> (`fn` for every sample that was read, their positions in client.y).

    Rows come in the order of client.y; with drop_last those of the short last batch are missing. mode: "eval" or
    "train_frozen".
    """

    w: Tree
    fn: Callable[..., Tree]  # (net, w, batch, view) -> per-row tensors
    const: Tree = field(default_factory=Tree)
    mode: str = "eval"
    augment: bool = False
    drop_last: bool = False
    stream: RandomState | None = None


def logits(net: Net, tree: Tree, x: Tensor) -> Tensor:
    """The network's own scores."""
    return net(tree, x)


WEIGHTINGS = ("uniform", "v", "l")
"""Class weightings of protocol 5.2: all classes alike, those that the client has, as often as the client has them."""


class Model(NamedTuple):
    """Something to evaluate.

    scores(net, tree, x) -> [rows, classes], or several by name, of which the first is the headline; a name whose
    scores are undefined maps to None. Predictions are the argmax; the loss is the cross-entropy of the scores called
    `loss` (default: the headline), which must be logits. only: by the name of the scores, the weightings of
    protocol 5.2 under which they mean something; the others are undefined.
    """

    tree: Tree
    scores: Callable[..., Any] = logits
    loss: str = ""
    only: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class Exchange(NamedTuple):
    """One meeting of server and clients: a client program and its server function."""

    program: Callable[..., Any]  # (client, shared, own) -> requests -> (upload, changes of own[, shown])
    aggregate: Callable[..., tuple[Tree, Tree]]  # (server, shared, private, uploads) -> changes of shared, of private


class Last(NamedTuple):
    """What the evaluation knows about a client's participation in this round."""

    received: Tree  # shared, as it was broadcast
    upload: Tree
    shown: Tree = Tree()  # the third tree of the program, which is neither sent nor kept


# ---- handles (filled in by the runtime) ---------------------------------------------------------------------------


class Task:
    """The same for the whole run: net, initial (weights w^0), classes (K), clients (N), sizes [N], rounds (T), protocol."""

    net: Net
    initial: Tree
    classes: int
    clients: int
    sizes: list[int]
    rounds: int
    protocol: Protocol

    def stream(self, method: str, tag: str, *axes: int) -> RandomState:
        """The private stream (method, tag, t=-1, server, *axes) of protocol section 0."""
        raise NotImplementedError

    def client_stream(self, method: str, tag: str, client: int, *axes: int) -> RandomState:
        """The private stream (method, tag, t=-1, client, *axes): what a client has from before round 0."""
        raise NotImplementedError


class Client:
    """One client in one round: id, n (samples), y [n], counts [K], round (t), rounds (T), lr, momentum, task.

    measured: whether its personal model will be evaluated after this round.
    """

    task: Task
    id: int
    n: int
    y: Tensor
    counts: Tensor
    round: int
    rounds: int
    lr: float
    momentum: float
    measured: bool

    def steps(self, epochs: int | None = None) -> int:
        """Optimiser steps of a Train of so many epochs (default: the protocol's)."""
        raise NotImplementedError

    def stream(self, method: str, tag: str, *axes: int) -> RandomState:
        """The private stream (method, tag, t, client, *axes) of protocol section 0."""
        raise NotImplementedError


class Server:
    """The server in one exchange: ids (ascending), weights and uniform [m] (each sums to 1), round, rounds, task."""

    task: Task
    ids: list[int]
    weights: Tensor
    uniform: Tensor
    round: int
    rounds: int

    def stream(self, method: str, tag: str, *axes: int) -> RandomState:
        """The private stream (method, tag, t, server, *axes) of protocol section 0."""
        raise NotImplementedError

    def mean(self, trees: list[Tree], weights: Tensor | None = None) -> Tree:
        """Weighted mean by name, in ascending client id (default weights: the protocol's); integers: the largest."""
        raise NotImplementedError

    def merge(self, old: Tree, trees: list[Tree], weights: Tensor | None = None) -> Tree:
        """`old` moved by server_lr towards the mean; buffers are averaged plainly."""
        raise NotImplementedError

    def train(
        self,
        request: Train,
        x: Tree,
        y: Tensor,
        *,
        batch_size: int,
        epochs: int,
        lr: Callable[[int], float],
        weight_decay: float,
        stream: RandomState,
    ) -> Tree:
        """The clients' SGD on tensors that the server has (no momentum, no clip, short last batch kept) -> weights.

        Named terms of the loss are recorded, its sum as `server_loss`.
        x: tree of [rows, ...]; lr: rate of an epoch. Per epoch the stream gives a permutation, then the noise.
        """
        raise NotImplementedError


# ---- a method -----------------------------------------------------------------------------------------------------


class Bill(NamedTuple):
    """Cost of one client in one round, as Python expressions of the symbols below; P floats each way is FedAvg's.

    P, B, H, L, V: parameters of the network, all but the output layer, of it, of the projection, of the last block
    before the output layer (`Net.last_block`); K: classes, K_t: with a global prototype, K_i: of the client, N_i:
    prototypes of the client; d, q, z: width of the encoder, the embedding (input of the output layer) and the
    projection's output; n, E: samples and local epochs of the client; int: an integer (two floats). Buffers of
    BatchNorm count with the part that they belong to.
    """

    down: str = "P"
    up: str = "P"
    trained: str = "E*n"  # samples passed forward and backward
    forward: str = "0"  # samples passed forward alone
    state: str = "0"  # floats that a client keeps between rounds
    server: str = "an average"  # in words


class Diverged(RuntimeError):
    """Weights, losses or a method's own quantities that no longer mean anything: the run ends, marked as diverged."""


def need(method: str, protocol: Protocol, **fields: Any) -> None:
    """Refuse a protocol whose fields differ from what a method needs, with the line that changes them for all."""
    for name, wanted in fields.items():
        if getattr(protocol, name) != wanted:
            raise UserError(
                f"{method} needs {name}={text(wanted)}, the experiment has {text(getattr(protocol, name))}: "
                f"`--set {name}={text(wanted)}` changes it for every method of the table"
            )


@dataclass(frozen=True)
class Method:
    """Everything is optional except start, local and aggregate."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Option values by the name of a method preset (an option `preset` must offer the names)."""
    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Protocol fields that a method preset needs, by its name."""
    open_fields: ClassVar[tuple[str, ...]] = ()
    """Protocol fields that this paper leaves open: shown with the options by `protofl methods NAME`."""
    same: ClassVar[tuple[Same, ...]] = ()
    """Readings that give what others give, always or where a choice cannot act: `protofl ablate` proves them. Those of all
    parts of a method count."""
    together: ClassVar[Mapping[tuple[str, Any], Mapping[str, Any]]] = {}
    """Option values without which a reading, (option, value), is refused: an ablation sets them with it."""
    crossed: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of choices that an ablation tries in full."""
    constant: ClassVar[tuple[str, ...]] = ()
    """Entries of `shared` that never change: billed once, with a client's first participation."""
    cost: ClassVar[float] = 1.0
    """Rough time of a round as a multiple of FedAvg's: for estimates and for starting long runs first."""
    keeps_personal: ClassVar[bool] = False
    """Whether every client keeps its personal model, so that all can be evaluated as trained."""

    @classmethod
    def build(cls, options: Mapping[str, Any], setting: Callable[[str], Mapping[str, Any]]) -> Method:
        """The method with these (checked) options; `setting(name)` gives another method's values in this setting."""
        return cls(**options)

    def check(self, protocol: Protocol, net: Net) -> None:
        """Raise `UserError` where this method cannot run, with the reason and what would be right."""

    def bill(self) -> Bill:
        """What a round costs a client, in symbols: what `protofl methods` shows, and tests compare with runs."""
        return Bill()

    def adapt(self, protocol: Protocol) -> Protocol:
        """What this method makes of the table's protocol: another budget of rounds, another population."""
        return protocol

    def start(self, task: Task) -> tuple[Tree, Tree]:
        """-> shared (what is broadcast), private (what the server alone has)."""
        raise NotImplementedError

    def enrol(self, client: Client) -> Tree:
        """A client's memory before its first participation."""
        return Tree()

    def local(self, client: Client, shared: Tree, own: Tree) -> Program:
        """The client program of a round -> (upload, changes of own), or a third tree for the evaluation alone."""
        raise NotImplementedError

    def aggregate(self, server: Server, shared: Tree, private: Tree, uploads: list[Tree]) -> tuple[Tree, Tree]:
        """The server's part of a round -> (changes of shared, changes of private). Uploads are in ascending id."""
        raise NotImplementedError

    def first(self) -> Exchange | None:
        """An exchange before round 0, with the clients of round 0."""
        return None

    def final(self) -> Exchange | None:
        """An exchange after the last round, with all clients that have data (t = T)."""
        return None

    def refresh(self, client: Client, shared: Tree, own: Tree) -> Program:
        """The program behind pm_protocol=refresh (protocol 5.3) -> Model; nothing of it is kept."""
        upload, changed, *shown = yield from self.local(client, shared, own)
        return self.personal_model(client, shared, own | changed, Last(shared, upload, *shown))

    def global_model(self, shared: Tree, private: Tree) -> Model | None:
        """What the server would deploy; None: there is none."""
        return None

    def personal_model(self, client: Client, shared: Tree, own: Tree, last: Any) -> Model:
        """What a client uses right after its local training; `shared` is already that of the next round.

        last: a `Last`, or None for a client that was idle in this round (`keeps_personal` methods alone are asked).
        """
        raise NotImplementedError

    def stages(self, shared: Tree, private: Tree) -> Mapping[str, Tree]:
        """Tensors of the global model's network as they were at an earlier stage of the server's part of the round, by
        the name of the stage (an identifier): networks whose features are stored beside the global one's."""
        return {}

    def prototypes(self, shared: Tree, private: Tree) -> Rows | None:
        """Global class prototypes [K, d], for the record."""
        return None

    def client_prototypes(self, upload: Tree) -> tuple[Tensor, Tensor] | None:
        """A client's prototypes ([rows, d], [rows] class ids) in the space of the global ones, for the record."""
        return None


@dataclass(frozen=True)
class Plugin(Method):
    """A part that works on top of another method's clients, `METHOD+PLUGIN` on the command line.

    Its hooks call `super()` and add to what the method behind it says; its options and its helpers' names are its own.
    """

    values_of: ClassVar[str] = ""
    """The method whose option values in a setting are taken, besides those under the plug-in's own name."""

    @classmethod
    def refuses(cls, base: type[Method]) -> str:
        """Why it cannot work on this method; empty if it can."""
        return ""
