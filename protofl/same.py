"""Readings that give what another one gives: what a method's file claims, so that an ablation can prove it.

A claim holds by construction, or in settings in which a choice cannot act. `protofl ablate` does not take its word: it
runs both sides for three rounds in float64 and compares what they score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .nets import Net
    from .protocol import Protocol


class Scene(NamedTuple):
    """A method in a setting; counts: samples by client and class [N, K]."""

    method: Any
    protocol: Protocol
    net: Net
    counts: np.ndarray


Condition = Callable[[Scene], bool]


def always(scene: Scene) -> bool:
    """By construction."""
    return True


@dataclass(frozen=True)
class Same:
    """Readings of an option (or protocol field) that give what the method as it is set gives, where `when` holds.

    instead: options of the command line with which it acts; empty where it never does. exact: bit for bit, else up to
    rounding. The other side may be another than the method as it is set: `against` are its options, `method` is another
    method's name; `beside` are options of both sides; `scaled` are options that must change with the reading, and
    `rescale` (federation, round, shared) -> shared undoes a factor in what the server sends. With any of these the reading
    itself acts.
    """

    option: str
    readings: tuple[Any, ...] = ()
    why: str = ""
    when: Condition = always
    instead: str = ""
    exact: bool = True
    against: Mapping[str, Any] = field(default_factory=dict)
    method: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)
    scaled: Mapping[str, Callable[[Scene], Any]] = field(default_factory=dict)
    rescale: Callable[[Scene, Any, Any], Any] | None = None

    @property
    def idle(self) -> bool:
        """Whether the reading changes nothing, so that it need not be run."""
        return not (self.against or self.method or self.beside or self.scaled or self.rescale)

    def covers(self, reading: Any) -> bool:
        """Whether it speaks of this reading; none named: of all."""
        return not self.readings or reading in self.readings


# ---- where a choice cannot act --------------------------------------------------------------------------------------


def everybody_drawn(scene: Scene) -> bool:
    """All clients take part in every round."""
    return scene.protocol.participation == 1


def no_batchnorm(scene: Scene) -> bool:
    """The network has no running statistics."""
    return not scene.net.count()["buffers"]


def no_projection(scene: Scene) -> bool:
    """The output layer reads the encoder's output."""
    return scene.net.projected is None


def no_augmentation(scene: Scene) -> bool:
    """Training images are the test images' kind."""
    return not scene.protocol.augment


def global_model_alone(scene: Scene) -> bool:
    """No personal model is measured."""
    return set(scene.protocol.metrics) == {"gm"}


def not_a_resnet(scene: Scene) -> bool:
    """The network has no residual blocks."""
    return not scene.net.name.startswith("resnet")


def every_class_everywhere(scene: Scene) -> bool:
    """Every client has every class."""
    return bool((scene.counts > 0).all())


def every_class_held(scene: Scene) -> bool:
    """In every round somebody who takes part has every class."""
    return everybody_drawn(scene) and bool((scene.counts > 0).any(0).all())


def equal_sizes(scene: Scene) -> bool:
    """All clients have equally many samples."""
    return len(set(scene.counts.sum(1).tolist())) == 1


def equal_counts(scene: Scene) -> bool:
    """The owners of a class have equally many samples of it."""
    return all(len(set(column[column > 0].tolist())) < 2 for column in scene.counts.T)


def no_short_batch(scene: Scene) -> bool:
    """No client has a last batch that is short, unless it is its only one."""
    size = scene.protocol.batch_size
    return all(n < size or n % size == 0 for n in scene.counts.sum(1).tolist())


def option_is(name: str, *values: Any) -> Condition:
    """The method's option has one of these values."""
    return lambda scene: getattr(scene.method, name) in values


def field_is(name: str, *values: Any) -> Condition:
    """The protocol's field has one of these values."""
    return lambda scene: getattr(scene.protocol, name) in values


def either(*conditions: Condition) -> Condition:
    """One of them holds."""
    return lambda scene: any(one(scene) for one in conditions)


def both(*conditions: Condition) -> Condition:
    """All of them hold."""
    return lambda scene: all(one(scene) for one in conditions)


FIELDS = (
    Same("resnet_norm", (), "the network is no ResNet", not_a_resnet, "--net resnet18_gn2"),
    Same("bn_buffers", (), "the network has no BatchNorm", no_batchnorm, "--net resnet18_bn"),
    Same("classifier_input", (), "the network has no projection", no_projection, "--net simple_cnn, mlp"),
    Same("model_weighting", (), "all clients have equally many samples", equal_sizes, "--partition dir_class"),
    Same("optimizer_reset", (), "without momentum there is nothing to reset", field_is("momentum", 0.0), "--set momentum=0.9"),
    Same("drop_last", (), "no client has a short last batch", no_short_batch, "another --batch-size"),
    Same("pm_clients", (), "only the global model is measured", global_model_alone, "--set metrics=gm,pm_v,pm_l"),
    Same(
        "partition_min_classes", (), "a rule of the split dir_class_fednh alone",
        lambda scene: scene.protocol.partition != "dir_class_fednh", "--partition dir_class_fednh",
    ),
    Same(
        "partition_cap", (), "a rule of the split dir_class and its kind alone",
        lambda scene: scene.protocol.partition in ("iid", "file", "dir_client"), "--partition dir_class",
    ),
)  # fmt: skip
"""Protocol fields that cannot act, whatever the method."""
