"""What one rank of an engine has loaded: SGLang answers for all of them with the result of the first."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class RankReceipts:
    """What this scheduler process has loaded since the weight update began."""

    def __init__(self) -> None:
        self._buckets = 0
        self._failure = ""

    def register(self) -> None:
        """Follow SGLang's weight updates."""
        manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        HookRegistry.register(f"{manager}.begin_weight_update", self._begin, HookType.BEFORE)
        for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
            HookRegistry.register(f"{manager}.{name}", self._load, HookType.AFTER)

    def receipt(self) -> dict[str, str]:
        """buckets: loaded so far; version: of the weights, as this rank has it; failure: why it missed one, or empty."""
        from sglang.srt.runtime_context import get_serving

        return {"buckets": str(self._buckets), "version": str(get_serving().weight_version), "failure": self._failure}

    def _begin(self, *_: Any, **__: Any) -> None:
        self._buckets, self._failure = 0, ""

    def _load(self, result: Any, *_: Any, **__: Any) -> None:
        if result.success:
            self._buckets += 1
        else:
            self._failure = self._failure or str(result.message)
