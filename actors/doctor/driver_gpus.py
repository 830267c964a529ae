"""The GPUs that nvidia-smi lists, which of them torch sees, and how they are connected. No GPU is used for this."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from actors.doctor.facts import GpuFact

_SMI = "nvidia-smi"
_LIST = ("--query-gpu=index,uuid,name,memory.total,memory.free,compute_cap,mig.mode.current", "--format=csv,noheader,nounits")
_SMI_S = 10.0


def gpus_of_driver() -> list[GpuFact]:
    """GPUs that nvidia-smi lists; none where there is no driver, or it doesn't answer."""
    return [_gpu(line) for line in _said(*_LIST).splitlines() if line.count(",") >= 6]


def seen_by_torch(gpus: Sequence[GpuFact], visible: str | None, count: int) -> tuple[GpuFact, ...]:
    """The driver's GPUs that torch sees.

    Args:
        gpus: of the driver, numbered by their places on the bus, as CUDA numbers GPUs that are alike.
        visible: CUDA_VISIBLE_DEVICES, numbers or the beginnings of UUIDs; None: it isn't set.
        count: that torch sees. Where the variable names others than so many (parts of a GPU), the first ones are taken,
            and what is free of them isn't known.
    """
    named = [_named(gpus, word.strip()) for word in visible.split(",")] if visible else list(gpus)
    known = [gpu for gpu in named if gpu is not None]
    if len(known) == count:
        return tuple(known)
    return tuple(replace(gpu, free=None) for gpu in gpus[:count])


def _named(gpus: Sequence[GpuFact], word: str) -> GpuFact | None:
    found = [gpu for gpu in gpus if (gpu.number == int(word) if word.isdigit() else word and gpu.uuid.startswith(word))]
    return found[0] if len(found) == 1 else None


def _said(*words: str) -> str:
    """Nothing where there is no driver, or it doesn't answer."""
    if shutil.which(_SMI) is None:
        return ""
    try:
        return subprocess.run((_SMI, *words), capture_output=True, text=True, timeout=_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _gpu(line: str) -> GpuFact:
    number, uuid, rest = (part.strip() for part in line.split(",", 2))
    name, total, free, capability, divided = (part.strip() for part in rest.rsplit(",", 4))
    free_bytes = None if divided == "Enabled" else _mib(free)
    return GpuFact(name, _mib(total) or 0, free_bytes, "sm_" + capability.replace(".", ""), int(number), uuid)


def _mib(text: str) -> int | None:
    """Bytes; None where the driver says [N/A]."""
    return int(text) << 20 if text.isdigit() else None
