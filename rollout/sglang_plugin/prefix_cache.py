"""What enters the prefix cache, and what may be found there.

A stale prefix is never reused: the cache has one namespace for each weight version. With `retract` it is empty after an update anyway. With
`in_place` it is not: running requests keep their keys and values, and SGLang would hand them on to requests that start later. Requests that
still wait therefore move to the namespace of the version that will prefill them; what runs stays in its own.

A request that finds its prompt there adds nothing: SGLang would insert each of a group's samples twice, after its prefill and with its
answer, which is a tenth of the scheduler's time where answers are short. A turn that went on from such an answer would prefill it again.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_serving


def register() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}._add_request_to_queue", _into_current_namespace, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.record_weight_version_change", _move_waiting, HookType.AFTER)
    HookRegistry.register("sglang.srt.mem_cache.common.maybe_cache_unfinished_req", _leave_out_what_was_found, HookType.BEFORE)


def _into_current_namespace(_scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    req.cache_salt = get_serving().weight_version


def _move_waiting(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    for req in scheduler.waiting_queue:
        req.cache_salt = get_serving().weight_version


def _leave_out_what_was_found(req: Any, _cache: Any, *, chunked: bool = False, **__: Any) -> None:
    """Called after each prefill, and after each part of one that comes in several: the next part finds its beginning in the cache alone.

    Found means all of the prompt but its last token, which is always computed.
    """
    req.skip_radix_cache_insert = not chunked and 0 < len(req.origin_input_ids) - 1 <= req.kv.cache_protected_len
