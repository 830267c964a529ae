"""A real rollout worker over a sampler that a test gives it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import evenkeel.actors.pool.rollout_worker as module
from evenkeel.actors.pool.rollout_worker import RolloutWorker
from evenkeel.rollout.sampler import Sampler
from tests.actors.pool.pool_cases import worker_settings


async def started_worker(
    monkeypatch: pytest.MonkeyPatch, sampler: Any, *, counted: Callable[[str, float], object] = lambda *_: None, **changes: Any
) -> RolloutWorker:
    """Args: counted: takes what the worker adds to its metrics. changes: of its settings."""

    async def made(*_: Any, **__: Any) -> Any:
        return sampler

    registry = SimpleNamespace(register=lambda _: None)
    endpoint = SimpleNamespace(add=counted, set=lambda *_: None, registry=registry, target="127.0.0.1:1")
    monkeypatch.setattr(Sampler, "start", made)
    monkeypatch.setattr(module, "MetricsEndpoint", lambda *_, **__: endpoint)
    monkeypatch.setattr(module, "EndNotice", lambda: None)
    monkeypatch.setattr(module, "own_folder", lambda: contextlib.nullcontext(Path("temporary")))
    monkeypatch.setattr(module, "require_checksums", lambda *_: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    worker = RolloutWorker("0", replace(worker_settings(1), **changes))
    await worker.start(0)
    return worker
