"""A stale prefix is never reused: the prefix cache has one namespace for each weight version.

With `retract` the cache is empty after an update anyway. With `in_place` it is not: running requests keep their keys and values, and
SGLang would hand them on to requests that start later. Requests that still wait therefore move to the namespace of the version that will
prefill them; what runs stays in its own.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_serving


def register() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}._add_request_to_queue", _into_current_namespace, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.record_weight_version_change", _move_waiting, HookType.AFTER)


def _into_current_namespace(_scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    req.cache_salt = get_serving().weight_version


def _move_waiting(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    for req in scheduler.waiting_queue:
        req.cache_salt = get_serving().weight_version
