"""Data and split of a protocol, once per process. Needs no torch: what is wrong with them is refused at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .cells import Cell
from .data import Data, Partition, load
from .data.partition import load as load_split
from .data.partition import partition as make_split
from .errors import UserError
from .protocol import Protocol

received: dict[tuple[Any, ...], Any] = {}
"""Data sets and stored splits that were sent to this process, whose machine need not have them; see `needed`."""


@functools.lru_cache(maxsize=4)
def load_data(name: str, data_dir: str | None, order: str) -> Data:
    """A data set, once per process."""
    if sent := received.get((name, data_dir, order)):
        return sent  # type: ignore[no-any-return]
    return load(name, Path(data_dir) if data_dir else None, order)


@functools.lru_cache(maxsize=64)
def _split(data_key: tuple[str, str | None, str], fields: tuple[tuple[str, Any], ...], file: str) -> Partition:
    data = load_data(*data_key)
    if sent := received.get((*data_key, file)):
        return sent  # type: ignore[no-any-return]
    if file:
        return load_split(Path(file), data.y_train, len(data.classes))
    return make_split(data.y_train, classes=len(data.classes), **dict(fields))


def split(protocol: Protocol, data_dir: str | None) -> Partition:
    """The partition: a function of data, scheme, beta, clients and partition seed, and of nothing else."""
    p = protocol
    key = (p.dataset, data_dir, p.data_order)
    if p.partition == "file":
        made = _split(key, (), p.partition_file)
        if len(made.indices) != p.clients:
            raise UserError(
                f"{p.partition_file} splits among {len(made.indices)} clients: set --clients {len(made.indices)}"
            )
        return made
    classes = p.partition_min_classes if p.partition == "dir_class_fednh" else None  # a rule of that scheme alone
    fields = dict(
        scheme=p.partition, clients=p.clients, beta=p.beta, seed=p.split_seed(), min_size=p.partition_min_size,
        min_classes=classes, cap=p.partition_cap, max_tries=p.max_tries, on_min_fail=p.on_min_fail,
        alpha_convention=p.alpha_convention,
    )  # fmt: skip
    return _split(key, tuple(fields.items()), "")


def needed(cell: Cell) -> dict[tuple[Any, ...], Any]:
    """What a process elsewhere has to have `received` for a cell. Maps of files become arrays."""
    p = cell.protocol
    key = (p.dataset, cell.data_dir, p.data_order)
    data = load_data(*key)
    plain = dataclasses.replace(data, x_train=np.asarray(data.x_train), x_test=np.asarray(data.x_test))
    stored = {(*key, p.partition_file): split(p, cell.data_dir)} if p.partition == "file" else {}
    return {key: plain, **stored}


def check(cells: Iterable[Cell]) -> None:
    """Read every data set and make every split that the cells ask for; raises `UserError`."""
    for cell in cells:
        split(cell.protocol, cell.data_dir)
