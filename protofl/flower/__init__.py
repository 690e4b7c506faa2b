"""Methods of this package in a real federation: Flower's SuperLink, SuperNodes and messages around the same programs.

`export` writes an app; `server` and `client` are what it runs. Flower itself is imported by these two alone.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import UserError


def need() -> None:
    """Raise `UserError` where Flower is not installed."""
    if find_spec("flwr") is None:
        raise UserError("protofl flower needs flwr, which is not installed: pip install 'protofl[flower]'")
