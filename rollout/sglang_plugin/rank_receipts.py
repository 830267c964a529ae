"""What one rank of an engine has loaded, and what it has under way: SGLang answers for all of them with the result of the first."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class RankReceipts:
    """What this scheduler process has loaded since the weight update began."""

    def __init__(self) -> None:
        self._buckets = 0
        self._failure = ""
        self._unfinished = 0

    def register(self) -> None:
        """Follow SGLang's weight updates."""
        manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        HookRegistry.register(f"{manager}.begin_weight_update", self._begin, HookType.BEFORE)
        for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
            HookRegistry.register(f"{manager}.{name}", self._load, HookType.AFTER)
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.pause_generation", self._pause, HookType.AFTER)

    def receipt(self) -> dict[str, str]:
        """buckets: loaded so far; version: of the weights, as this rank has it; failure: why it missed one, or empty; unfinished: tokens
        sampled of the requests under way when it paused."""
        from sglang.srt.runtime_context import get_serving

        version, unfinished = str(get_serving().weight_version), str(self._unfinished)
        return {"buckets": str(self._buckets), "version": version, "failure": self._failure, "unfinished": unfinished}

    def _pause(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        batches = (batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None)
        under_way = [*scheduler.waiting_queue, *(req for batch in batches for req in batch.reqs)]
        self._unfinished = sum(len(req.output_ids) for req in {req.rid: req for req in under_way if not req.finished()}.values())

    def _begin(self, *_: Any, **__: Any) -> None:
        self._buckets, self._failure = 0, ""

    def _load(self, result: Any, *_: Any, **__: Any) -> None:
        if result.success:
            self._buckets += 1
        else:
            self._failure = self._failure or str(result.message)
