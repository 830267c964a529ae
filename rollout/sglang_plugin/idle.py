"""A paused scheduler sleeps until the next message, as an idle one does with SGLang's `sleep_on_idle`.

SGLang's loop spins while it is paused, and so takes a core from whoever prepares the weights that it waits for.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register() -> None:
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine", _sleep, HookType.AFTER)


def _sleep(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    scheduler.maybe_sleep_on_idle()
