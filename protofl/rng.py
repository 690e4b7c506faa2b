"""The random streams of a run, so that methods differ only in what makes them different.

Every stream is a `numpy.random.RandomState`, the legacy generator whose output NumPy keeps frozen. Who shares what:
the partition all methods of a table, the initial weights all methods of one network, the client draw and the training
streams all methods of one run seed; everything else is private to a method.
"""

from __future__ import annotations

import zlib

from numpy.random import RandomState


def partition(seed: int) -> RandomState:
    """The stream that splits the data."""
    return RandomState(seed)


def init(seed: int) -> RandomState:
    """The stream of the initial weights."""
    return RandomState(seed)


def draw(run_seed: int, t: int) -> RandomState:
    """The stream that draws the clients of round t."""
    return RandomState((run_seed * 1000003 + t + 1) % 2**32)


def train(run_seed: int, t: int, client: int) -> RandomState:
    """The order of the batches and their augmentation, for one client in round t (T: after the last round)."""
    return RandomState([run_seed, t + 1, client])


def private(method: str, tag: str, run_seed: int, t: int, client: int, *axes: int) -> RandomState:
    """A method's own stream; client -1 is the server, t -1 is before round 0."""
    return RandomState([zlib.crc32(method.encode()), zlib.crc32(tag.encode()), run_seed, t + 1, client + 1, *axes])
