"""One thread a process: the tests run in several (`pytest -n 2`), and OpenMP's threads of one wait by spinning."""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
