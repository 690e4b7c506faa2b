"""What a step frees is there for the next step."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import ctypes
import resource

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no large pages: one fault would stand for 512

import torch
from protofl import heap

{keep}
def step():
    parts = [torch.ones(2**20) for _ in range(24)]  # 4 MB each, freed in the order of their making

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: str) -> int:
    """Pages fetched by ten steps of 96 MB, in a process of its own."""
    told = subprocess.run([sys.executable, "-c", STEPS.format(keep=keep)], capture_output=True, text=True, check=True)
    return int(told.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_stays() -> None:
    pages = 24 * 2**22 // 4096
    if faults("") < 5 * pages:
        pytest.skip("this glibc, or larger pages, keep it anyway")
    assert faults("heap.keep()") < pages  # of ten steps
    assert faults("heap.keep(); heap.trim()") < pages
