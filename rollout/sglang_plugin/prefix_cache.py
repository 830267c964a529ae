"""What enters the prefix cache, and what may be found there.

A stale prefix is never reused: the cache has one namespace for each weight version. With `retract` it is empty after an update anyway. With
`in_place` it is not: running requests keep their keys and values, and SGLang would hand them on to requests that start later. Requests that
still wait therefore move to the namespace of the version that will prefill them; what runs stays in its own.

A request that finds its prompt there adds nothing: SGLang would insert each sample twice, after its prefill and with its answer, which is a
tenth of the scheduler's time where answers are short; but the prompt is there already, and nobody asks for an answer's continuation.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_serving


def register() -> None:
    managers = "sglang.srt.managers"
    scheduler = f"{managers}.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}._add_request_to_queue", _into_current_namespace, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.record_weight_version_change", _move_waiting, HookType.AFTER)
    prefilled = f"{managers}.scheduler_components.batch_result_processor.maybe_cache_unfinished_req"
    HookRegistry.register(prefilled, _leave_out_what_was_found, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.stash_chunked_request", _keep_the_chunk, HookType.BEFORE)


def _into_current_namespace(_scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    req.cache_salt = get_serving().weight_version


def _move_waiting(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    for req in scheduler.waiting_queue:
        req.cache_salt = get_serving().weight_version


def _leave_out_what_was_found(req: Any, *_: Any, **__: Any) -> None:
    """All of the prompt but the last token, which is always computed."""
    req.skip_radix_cache_insert = req.kv.cache_protected_len >= len(req.origin_input_ids) - 1


def _keep_the_chunk(_scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """A prefill in several parts, after a retraction, finds the part before in the cache."""
    req.skip_radix_cache_insert = False
