"""C files beside this one, compiled when an engine starts (a third of a second each), on the machine that runs it.

Their loops share torch's own threads: `#pragma omp` calls the OpenMP library that torch has loaded. One more, or threads of Python's, would
wait for work by spinning on the cores that torch's threads compute on.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

from evenkeel.correction.errors import EngineError

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")


def compiled(source: Path, definitions: list[str], *options: str) -> ctypes.CDLL:
    """The library stays loaded; its files are gone when this returns, so that nothing stale is ever found by another machine or version.

    Args: options: of the compiler. Raises: EngineError without a working C compiler.
    """
    compiler, threads = shlex.split(os.environ.get("CC") or "cc"), ["-fopenmp"] if _share_threads() else []
    try:
        with tempfile.TemporaryDirectory(prefix="evenkeel-") as folder:
            compiled, library = f"{folder}/{source.stem}.o", f"{folder}/{source.stem}.so"
            # In two steps: a linker that is told of fast-math would have the whole process round subnormal numbers to zero, and one that is
            # told of OpenMP would bring a library of its own.
            for arguments in (
                ["-O3", "-march=native", "-fPIC", *options, *threads, *definitions, "-c", str(source), "-o", compiled],
                ["-shared", compiled, "-lm", "-o", library],
            ):
                subprocess.run([*compiler, *arguments], check=True, capture_output=True, text=True, timeout=120)
            return ctypes.CDLL(library)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(
            f"{source.name}, a part of the engine on a CPU, is compiled by {' '.join(compiler)!r} when an engine starts, which failed: "
            f"{getattr(error, 'stderr', None) or error}. Install a C compiler, or name one in the environment variable CC; TMPDIR has to "
            "be a folder from which libraries can be loaded. Or set rollout.engine.attention_backend=stock, which decodes half as fast"
        ) from error


def _share_threads() -> bool:
    """Make the functions of torch's OpenMP library known to what is loaded next; False: torch has none, and loops stay on one thread."""
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return False
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if _OPENMP.search(line)}
    for path in loaded:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return bool(loaded)
