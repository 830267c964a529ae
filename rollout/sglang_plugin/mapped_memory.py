"""The shared memory in which an engine's weights come: a scheduler maps it once, and on a GPU page-locks it.

It is read while the engine is paused. Mapping it anew would take time then, with a page fault for each page; and from pageable memory CUDA
copies everything once more, in the host's memory, on its way to the GPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from typing import Any

import torch
from torch import UntypedStorage

HALVES = 2
"""Number of halves, as many as the owner's shared memory has (rollout.engine.weight_transfer.SharedStaging)."""
# Each with whether it is page-locked, the one that was used last at the end.
_mapped: deque[tuple[UntypedStorage, bool]] = deque()

logger = logging.getLogger(__name__)


def keep_mapped(updater: Any, flattened_tensor_bucket_dict: dict[str, Any], **__: Any) -> None:
    """A hook before SGLang's loading of a bucket: its memory stays mapped until other memory has taken its place."""
    storage = flattened_tensor_bucket_dict["flattened_tensor"].untyped_storage()
    for kept in _mapped:
        if kept[0].data_ptr() == storage.data_ptr():
            _mapped.remove(kept)
            _mapped.append(kept)
            return
    if len(_mapped) == HALVES:
        gone, is_locked = _mapped.popleft()
        if is_locked:
            torch.cuda.cudart().cudaHostUnregister(gone.data_ptr())  # type: ignore[no-untyped-call]
    _mapped.append((storage, updater.device == "cuda" and _lock(storage)))


def _lock(storage: UntypedStorage) -> bool:
    """What can't be locked is copied as pageable memory is. Every rank of an engine locks the same pages for its own GPU.

    Returns: whether it is locked.
    """
    failed = int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))  # type: ignore[no-untyped-call]
    if failed:
        logger.warning("weights come through pageable memory: CUDA locked none of %d bytes (error %d)", storage.nbytes(), failed)
        with contextlib.suppress(RuntimeError):  # CUDA tells the error once more, to the next kernel: to this one
            torch.zeros(1, device="cuda")
    return not failed
