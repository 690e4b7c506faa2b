"""What models make of a sample of the data: stored in chosen rounds, for pictures of features (FedProc figure 2,
FedCSPC figures 7 and 8).

`features/round-NNNNN.npz` in a run's folder: floats are float32, everything else is int64. NNNNN: the round t, from 0;
the rounds are the first and the last of those whose prototypes are stored. Names of models, <name> below:

  global          the server's model, if there is one
  <stage>         the server's network at a stage before it, where the method names one (`Method.stages`)
  client-<id>     what the client uses right after its training in this round (protocol 5.3; where this round measures no
                  personal models, without training that only they would get); of the two clients of this round with the
                  most samples, ties by id, if the method has personal models

Arrays; of the test set, M samples that are the same for all rounds, methods and seeds:

  test_index [M]                        positions in the test set, ascending
  test_labels [M]                       classes
  test:<name> [M, q]                    z, what the network's output layer reads (`Net.embed`); r where a method has no
                                        projection
  test_encoded:<name> [M, d]            r, the encoder's output; only where it is not z
  test_predicted:<name> [M]             argmax of the model's headline scores; only where they are defined. Of a stage: of
                                        its output layer
  test_network_predicted:<name> [M]     argmax of the network's own output layer; only where it has one and the model's
                                        scores are others: what compares with a stage

Of each of the two clients, m of its training samples:

  train_index:<id> [m]                  positions in the training set, ascending
  train_labels:<id> [m]                 classes
  train:<id>:<name> [m, q]              as above, of <name>: global, every stage, and client-<id>
  train_encoded:<id>:<name> [m, d]
  train_predicted:<id>:<name> [m]
  train_network_predicted:<id>:<name> [m]

M and m are the protocol's `features` at most. Samples are seen as in a test: eval mode, not augmented, `evaluate.READ`
per call. A model that is not built on the setting's network is left out; a round without any model has no file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from .engine.base import located
from .evaluate import READ, TestSet
from .federation import Federation, Round
from .method import Method, Model, logits
from .nets import Net
from .tree import Tree

CLIENTS = 2
"""Clients of a round that are pictured."""

Array = np.ndarray


def stratified(labels: Array, most: int) -> Array:
    """Positions of at most `most` of labels [n], ascending: as many of every class as of any other, as far as can be.

    Classes are served from the rarest to the most frequent (ties by id), each with an equal share of what is left,
    rounded down. Of a class the positions are spread evenly over its own: neighbours in a data set are often alike.
    """
    counts = np.bincount(labels)
    chosen, left = [np.zeros(0, dtype=np.int64)], most
    for served, c in enumerate(np.argsort(counts, kind="stable")):
        share = min(int(counts[c]), left // (len(counts) - served))
        chosen.append(np.flatnonzero(labels == c)[np.arange(share) * counts[c] // max(share, 1)])
        left -= share
    return np.sort(np.concatenate(chosen))


def network(net: Net, tree: Tree) -> Tree | None:
    """The tensors of the network in what a model is made of: the tree, or its entry `net`; None if it has none."""
    w: Tree = tree.get("net", tree)
    return w if {e.name for e in net.encoder_table()} <= w.keys() else None


def collect(fed: Federation, played: Round, test: TestSet) -> dict[str, Array]:
    """The arrays of a round, as above; empty if there is nothing to be stored. Nothing of the federation changes."""
    most, task = fed.protocol.features, fed.task
    clients = sorted(played.ids, key=lambda i: (-task.sizes[i], i))[:CLIENTS]
    models = _server_models(fed, played.t) | {f"client-{i}": m for i, m in _trained(fed, played, clients)}
    if not (most and models):
        return {}
    labels = test.y.cpu().numpy()
    index = stratified(labels, most)
    arrays = {"test_index": index, "test_labels": labels[index]}
    for name, model in models.items():
        found = _seen(task.net, model, lambda at: test.pipeline.test(test.x[at]), index, played.t, name)
        arrays |= {f"test{kind}:{name}": v for kind, v in found.items()}
    for i in clients:
        own = np.sort(task.parts[i].cpu().numpy())
        labels = task.y.cpu().numpy()[own]
        chosen = stratified(labels, most)
        arrays |= {f"train_index:{i}": own[chosen], f"train_labels:{i}": labels[chosen]}
        for name, model in models.items():
            if name == f"client-{i}" or not name.startswith("client-"):
                found = _seen(task.net, model, lambda at: task.rows(at, None)[0], own[chosen], played.t, name)
                arrays |= {f"train{kind}:{i}:{name}": v for kind, v in found.items()}
    return arrays


def _server_models(fed: Federation, t: int) -> dict[str, Model]:
    """The server's model and its stages, by name."""
    method, model = fed.method, fed.global_model()
    w = None if model is None else network(fed.task.net, model.tree)
    if model is None or w is None:
        return {}
    with located(method.stages, t, "server", fed.shared):
        stages = method.stages(fed.shared, fed.private)
        for name, changes in stages.items():
            if not name.isidentifier() or name == "global" or not changes.keys() <= w.keys():
                raise ValueError(f"stage {name!r} needs a name of its own, an identifier, and tensors of the network")
    return {"global": model} | {name: Model(w | changes) for name, changes in stages.items()}


def _trained(fed: Federation, played: Round, clients: list[int]) -> Iterator[tuple[int, Model]]:
    """The personal models of these clients of the round that are built on the network."""
    if type(fed.method).personal_model is Method.personal_model:
        return
    drawn = copy.copy(fed)
    drawn.protocol = fed.protocol.replace(pm_clients="active")  # a refresh asks all, idle ones have no model here
    for i, model in drawn.personal(played):
        if i in clients and network(fed.task.net, model.tree) is not None:
            yield i, model


def _seen(
    net: Net, model: Model, images: Callable[[Tensor], Tensor], index: Array, t: int, who: str
) -> dict[str, Array]:
    """What a model makes of the samples at `index`, by the kind of the array."""
    found: dict[str, list[Tensor]] = {}
    with torch.no_grad(), located(model.scores, t, who, model.tree):
        for at in torch.split(torch.from_numpy(index), READ):
            for kind, v in _read(net.bound("eval"), model, images(at)).items():
                found.setdefault(kind, []).append(v.float() if v.is_floating_point() else v)
    return {kind: torch.cat(parts).cpu().numpy() for kind, parts in found.items()}


def _read(net: Net, model: Model, x: Tensor) -> dict[str, Tensor]:
    """z, r and predictions of a batch x, by the kind of the array."""
    w = network(net, model.tree)
    assert w is not None  # others are not pictured
    r = net.encode(w, x)
    projects = net.reads_z and (net.projected is None or bool(w.only(net.projection)))
    z = net.project(w, r) if projects else r
    network_says = net.classify(w, r, z) if w.only(net.head) else None
    model_says = network_says if model.scores is logits else model.scores(net, model.tree, x)
    if isinstance(model_says, dict):
        model_says = next(iter(model_says.values()))
    told = {"": z, "_encoded": None if z is r else r}
    scores = {"_predicted": model_says, "_network_predicted": None if model_says is network_says else network_says}
    told |= {kind: None if v is None else v.argmax(1) for kind, v in scores.items()}
    return {kind: v for kind, v in told.items() if v is not None}
