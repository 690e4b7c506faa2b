"""Where cells run besides this machine, as it was asked for. Needs neither torch nor Ray: what is wrong is refused at once."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import sys
from dataclasses import dataclass

from ..errors import UserError, nearest

ENGINES = ("auto", "loop", "batched", "graphs", "ray")
"""What --engine takes: how clients are computed, or where runs are."""


@dataclass(frozen=True)
class Place:
    """A cluster of Ray.

    address: "auto" or IP:PORT of one that this machine is a node of; None: $RAY_ADDRESS, or one of this machine alone.
    most: runs, or processes of one run, at a time; None: as many as there are resources.
    gpus: what a run takes of a GPU; None: one on cuda, none elsewhere.
    """

    address: str | None = None
    most: int | None = None
    gpus: float | None = None

    @property
    def found(self) -> str:
        """The address, as Ray takes it; "local": it is started here."""
        return self.address or os.environ.get("RAY_ADDRESS") or "local"

    def settle(self) -> None:
        """Set what Ray reads when it is imported: it tells nobody of its use, and if it is started here its ports answer
        the processes of this command alone."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning about what it means today
        if self.found == "local" and not {"RAY_AUTH_MODE", "ray"} & {*os.environ, *sys.modules}:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def gpus_of(self, device: str) -> float:
        """What a run on a device takes of a GPU."""
        if device == "cpu":
            return 0.0
        return 1.0 if self.gpus is None else self.gpus


def asked(engine: str | None, address: str | None, gpus: str | None, most: int | None) -> Place | None:
    """The cluster that the options ask for; None: this machine, without Ray."""
    if engine not in (None, *ENGINES):
        raise UserError(f"--engine {engine!r} is not one of {', '.join(ENGINES)}{nearest(engine, ENGINES)}")
    if engine != "ray":
        for name, value in (("--address", address), ("--gpus-per-run", gpus)):
            if value is not None:
                raise UserError(f"{name} is an option of a cluster: give --engine ray as well")
        return None
    if importlib.util.find_spec("ray") is None:
        raise UserError("--engine ray needs Ray, which is not installed: pip install 'protofl[ray]'")
    if address is not None and not re.fullmatch(r"auto|[^:/]+:\d+", address):
        raise UserError(f"--address {address!r}: auto or IP:PORT of a cluster that this machine is a node of")
    try:
        share = None if gpus is None else float(gpus)
    except ValueError:
        share = 0.0
    if share is not None and not 0 < share <= 1:
        raise UserError(f"--gpus-per-run {gpus!r}: a share of a GPU, above 0 and at most 1")
    return Place(address, most, share)
