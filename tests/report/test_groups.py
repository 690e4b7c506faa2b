"""What settings are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from protofl.report import runs
from protofl.report.groups import settings


def test_settings_that_differ_in_much_have_short_names(write: Callable[..., Path]) -> None:
    """All fields while they are few; else as many as tell the settings apart, and that there are more."""
    few = {"clients": 20, "beta": 0.1}
    more = {**few, "dataset": "digits", "rounds": 7, "batch_size": 3}
    for fields in ({}, few):
        folder = write("fedavg", 0, protocol=fields)
    made = settings(runs([folder.parent]))
    assert [sorted(s.name.split(", ")) for s in made] == [["beta=0.1", "clients=20"], ["beta=0.5", "clients=10"]]
    write("fedavg", 0, protocol=more)
    names = [s.name for s in settings(runs([folder.parent]))]
    assert names == [
        "dataset=cifar10, beta=0.1, ...",
        "dataset=cifar10, beta=0.5, ...",
        "dataset=digits, beta=0.1, ...",
    ]
    (alone,) = settings(runs([folder]))
    assert alone.name == ""
