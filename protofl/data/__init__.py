"""Data sets, their partition over clients, and augmentation."""

from __future__ import annotations

from protofl.data.augment import AUGMENTATIONS, Pipeline
from protofl.data.partition import Partition, Skew, partition
from protofl.data.sources import Data, Location, Source, fetch, known, load, locate

__all__ = [
    "AUGMENTATIONS",
    "Data",
    "Location",
    "Partition",
    "Pipeline",
    "Skew",
    "Source",
    "fetch",
    "known",
    "load",
    "locate",
    "partition",
]
