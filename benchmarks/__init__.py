"""Suites, as files of the package: `protofl suite list`."""
