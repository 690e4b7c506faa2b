"""Data sets and their partition over clients; `data.augment` (which needs torch) is not imported here."""

from __future__ import annotations

from protofl.data.partition import Partition, Skew, partition
from protofl.data.sources import Data, Location, Source, fetch, known, load, locate

__all__ = [
    "Data",
    "Location",
    "Partition",
    "Skew",
    "Source",
    "fetch",
    "known",
    "load",
    "locate",
    "partition",
]
