"""One thread per test process, as in a run: tests are spread over processes."""

from __future__ import annotations

import torch
from threadpoolctl import threadpool_limits

torch.set_num_threads(1)
threadpool_limits(1)
