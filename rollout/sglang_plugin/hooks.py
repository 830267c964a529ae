"""What owner and plugin agree on, and the small hooks of the scheduler. SGLang is imported when they are registered, not before: the owner
reads the names and settings where there is no engine yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from evenkeel.engines import machine as host_memory
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.sglang_plugin.mapped_memory import keep_mapped
from evenkeel.rollout.sglang_plugin.weight_group import joined_in, leave, received_in

# Actions that the plugin adds to SGLang's request `check_weights`
SPECS = "evenkeel.specs"
"""Answer: HF name -> "dtype:shape", for example "float32:128,64"."""
CHECKSUMS = "evenkeel.checksums"
"""Answer: HF name -> tensor_checksum of the tensor that the engine holds."""
PROCESSOR = "evenkeel.processor"
"""Answer: the fields of Processor, of the scheduler process."""
RECEIPT = "evenkeel.receipt"
"""Answer: what the scheduler process has loaded since the update began (weights.py)."""
FAILURE = "evenkeel.failure"
"""Sent instead of an answer: why this process has none. If it raised instead, the other processes would wait for it."""

VARIABLE = "EVENKEEL_SGLANG_PLUGIN"
"""Holds PluginSettings as JSON; set by rollout.engine.engine_process while it starts an engine. An environment variable is the only way in
before SGLang runs."""


class PluginSettings(BaseModel):
    """Settings of one engine's plugin; the same in all its processes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    engine_id: str = ""
    """Marks the processes of one engine: they carry it in their environment."""
    last_error: str = ""
    """File for the exception of which a process of the engine dies."""
    engine: EngineConfig = EngineConfig()
    """The engine's own."""

    def as_variable(self) -> str:
        """The settings as JSON, without engine_args: those may not be serialisable."""
        return self.model_dump_json(exclude={"engine": {"engine_args"}})

    @classmethod
    def from_environment(cls) -> PluginSettings:
        return cls.model_validate_json(os.environ.get(VARIABLE, "{}"))


def draw_no_bars() -> None:
    """Keep progress bars of this process off the terminal: SGLang draws them as it loads weights, whatever its log level is."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    original = tqdm.__init__

    def without_bar(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "disable": True})

    tqdm.__init__ = without_bar


def register(group_timeout_s: float) -> None:
    """Register the hooks of every engine: prefix cache, pauses, deadlines of the weight-update group, the address of its ranks' store."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def with_timeout(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from evenkeel.engines.rendezvous import gloo_towards

        if kwargs.get("backend") == "gloo":
            backend, options = gloo_towards(urlsplit(kwargs.get("init_method") or "").hostname, psutil.net_if_addrs())
            kwargs |= {"backend": backend, "pg_options": options}
        return original(*args, **{"timeout": timedelta(seconds=group_timeout_s), **kwargs})

    HookRegistry.register("sglang.srt.managers.scheduler.publish", _with_metrics, HookType.AFTER)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}._add_request_to_queue", _into_current_namespace, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.record_weight_version_change", _move_waiting, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.continue_generation", _give_back_memory, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.pause_generation", _end_the_step_under_way, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.record_weight_version_change", _count_what_is_on_its_way, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.common.maybe_cache_unfinished_req", _leave_out_what_was_found, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}._record_scheduler_state_for_paused_engine", _sleep, HookType.AFTER)
    HookRegistry.register("sglang.srt.utils.common.init_custom_process_group", with_timeout, HookType.AROUND)
    HookRegistry.register("torch.distributed.rendezvous._create_c10d_store", _store_on_its_address, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.load_snapshot.create_load_snapshot_writer", _no_file, HookType.REPLACE)
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}._update_weights_from_flattened_bucket", keep_mapped, HookType.BEFORE)
    HookRegistry.register(f"{updater}.init_weights_update_group", joined_in(group_timeout_s), HookType.AROUND)
    HookRegistry.register(f"{updater}.destroy_weights_update_group", leave, HookType.AROUND)
    HookRegistry.register(f"{updater}.receive_weights_from_distributed", received_in(group_timeout_s), HookType.AROUND)


def _store_on_its_address(host: str, port: int, rank: int, world_size: int, timeout: timedelta, *_: Any, **__: Any) -> Any:
    """Where an engine's ranks find each other: SGLang asks for 127.0.0.1, and torch would listen on all interfaces all the same."""
    from evenkeel.engines.rendezvous import rendezvous_store

    return rendezvous_store(host, port, rank=rank, world_size=world_size, timeout=timeout)


def _with_metrics(context: Any, *_: Any, role: str, **__: Any) -> None:
    """Have a scheduler write SGLang's own metrics (engine_metrics.py). SGLang puts hooks wherever a function was imported: the engine's
    owner calls this one, too."""
    if role == "scheduler":
        context.override("evenkeel", enable_metrics=True)


def _no_file(*_: Any, **__: Any) -> None:
    """Keep a scheduler from writing down its load after each step, for SGLang's own distribution of requests, which we do ourselves: the
    file would stay in /dev/shm for good."""


def use_plain_host_memory() -> None:
    """Have plain memory, on a CPU, for the host buffers in which SGLang keeps routed experts; it would register them with CUDA."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def plain(dims: Sequence[int], dtype: torch.dtype, *_: Any, **__: Any) -> Tensor:
        return torch.empty(dims, dtype=dtype)

    ALLOC_MEMORY_FUNCS["cpu"] = plain


# A stale prefix is never reused: the cache has one namespace for each weight version. With `retract` it is empty after an update anyway.
# With `in_place` it is not: running requests keep their keys and values, and SGLang would hand them on to requests that start later.
# Requests that still wait therefore move to the namespace of the version that will prefill them; what runs stays in its own.


def _into_current_namespace(_scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    from sglang.srt.runtime_context import get_serving

    req.cache_salt = get_serving().weight_version


def _move_waiting(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    for req in scheduler.waiting_queue:
        _into_current_namespace(scheduler, req)


def _give_back_memory(*_: Any, **__: Any) -> None:
    """Give memory back after an update, once requests go on. During the update the engine is paused, and this would add a tenth of a
    second."""
    host_memory.give_back_in_thread()


def _leave_out_what_was_found(req: Any, _cache: Any, *, chunked: bool = False, **__: Any) -> None:
    """Keep a request that found its prompt in the prefix cache from adding to the cache. SGLang would insert each of a group's samples
    twice, after its prefill and with its answer: a tenth of the scheduler's time if answers are short. The price: a later turn that goes on
    from such an answer prefills it again.

    Called after each prefill, and after each chunk of a chunked one: the next chunk needs the earlier ones in the cache. "Found" means all
    of the prompt but its last token, which is always computed.
    """
    req.skip_radix_cache_insert = not chunked and 0 < len(req.origin_input_ids) - 1 <= req.kv.cache_protected_len


def _sleep(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    """Let a paused scheduler sleep until the next message, as an idle one does with `sleep_on_idle`. SGLang's loop would spin while it is
    paused, and take a core from the process that prepares the weights."""
    scheduler.maybe_sleep_on_idle()


# With SGLang's overlap schedule, which is on for GPUs, the scheduler starts a step before it has looked at the tokens of the one before. A
# pause by `retract` looks at them. One `in_place` leaves them where they are, until requests go on.


def _end_the_step_under_way(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    """Wait for the GPU before an update: new weights are copied on another stream than the one that computes, and SGLang doesn't wait."""
    scheduler.device_module.synchronize()


def _count_what_is_on_its_way(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Count the token of the step under way as one of the old weights: SGLang counts only the tokens that a request has when they
    change."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old = get_serving().weight_version
    original(scheduler, *args, **kwargs)
    if get_serving().weight_version == old:
        return
    for batch, _ in getattr(scheduler, "result_queue", ()):  # only the overlapping loop has one
        for req in batch.reqs:
            if not (req.finished() or req.is_retracted or req.inflight_middle_chunks > 0):  # SGLang drops that token, or there is none
                req.weight_version_events.append(WeightVersionEvent(old_version=old, num_output_tokens=len(req.output_ids) + 1))
