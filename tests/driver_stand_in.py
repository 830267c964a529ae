"""A library with the three functions of NVIDIA's driver by which GPUs are counted, compiled here."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = """
int cuDriverGetVersion(int *version) { *version = %(version)d; return 0; }
int cuInit(unsigned flags) { return %(init)d; }
int cuDeviceGetCount(int *count) { *count = %(count)d; return %(counts)d; }
"""


def stand_in_driver(folder: Path, *, version: int = 13000, init: int = 0, count: int = 8, counts: int = 0) -> Path:
    """Args: version: the newest CUDA that it runs, 1000 times the major version and 10 times the minor one; init, counts: what cuInit and
    cuDeviceGetCount return, 0 for success."""
    (folder / "driver.c").write_text(_SOURCE % {"version": version, "init": init, "count": count, "counts": counts})
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "driver.c")], check=True)
    return library
