"""Collectives of the weight-update group fail after a time of ours; torch's default blocks the scheduler for 30 minutes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register(timeout_s: float) -> None:
    def with_timeout(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"timeout": timedelta(seconds=timeout_s), **kwargs})

    HookRegistry.register("sglang.srt.utils.common.init_custom_process_group", with_timeout, HookType.AROUND)
