"""What an engine's processes are given; and whose it ends, when it has failed to start and never told which are its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evenkeel.correction.errors import EngineError
from evenkeel.rollout.engine import engine_process
from evenkeel.rollout.engine.engine_process import EngineProcess
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.sglang_plugin.hooks import PluginSettings
from tests.e2e.launch import ROOT

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize("jump_s", [-3600.0, 0.0, 3600.0])
def test_the_children_of_a_failed_start_are_ended_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """Somebody sets the wall clock while it starts. What this process had started before is none of the engine's."""
    started: list[subprocess.Popen[bytes]] = []
    now = time.time

    def build(_: object) -> object:
        started.append(subprocess.Popen(SLEEPS, env=dict(os.environ), cwd=ROOT))
        raise RuntimeError("no memory for the weights")

    async def scenario() -> None:
        process = EngineProcess("test", EngineConfig(device="cpu"))
        monkeypatch.setattr(time, "time", lambda: now() + jump_s)
        with pytest.raises(EngineError, match="no memory for the weights"):
            await process.start({})

    monkeypatch.setattr(engine_process, "_build_engine", build)
    before = subprocess.Popen(SLEEPS, cwd=Path("/"))
    try:
        asyncio.run(scenario())
        assert [psutil.pid_exists(child.pid) for child in started] == [False] and before.poll() is None
    finally:
        for child in (before, *started):
            child.kill()
            child.wait()


def test_an_engine_s_processes_are_given_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that its owner was given, but for SGLang's own arguments: they may be what no JSON says."""
    arguments = {"page_size": object()}
    config = EngineConfig(device="cuda", dtype="bfloat16", max_running_requests=7, gpu_share=0.5, engine_args=arguments)

    async def environment() -> dict[str, str]:
        return EngineProcess("test", config)._environment()

    for name, value in asyncio.run(environment()).items():
        monkeypatch.setenv(name, value)
    settings = PluginSettings.from_environment()
    assert settings.engine == config.model_copy(update={"engine_args": {}})
    assert settings.engine_id and settings.last_error.endswith(f"{settings.engine_id}.error")
