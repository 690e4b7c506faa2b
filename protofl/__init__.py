"""protofl: a comparative benchmark suite for prototype-based federated learning."""

__version__ = "0.1.0"
