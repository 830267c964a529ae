"""A process that reads shared memory as a scheduler does. By spawn it imports this file alone, neither Ray nor the tests beside it."""

from __future__ import annotations

import pickle
import resource
from types import SimpleNamespace
from typing import Any

from evenkeel.rollout.sglang_plugin.mapped_memory import keep_mapped


def read_all(payloads: Any, found: Any) -> None:
    """How many pages it had to be given for each bucket that it read."""
    while (payload := payloads.recv()) is not None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bucket = {"flattened_tensor": pickle.loads(payload)}
        total = int(bucket["flattened_tensor"][::4096].sum())
        keep_mapped(SimpleNamespace(device="cpu"), flattened_tensor_bucket_dict=bucket)
        found.send((total, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))
