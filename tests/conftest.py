"""Fixtures that every package's tests share: a tiny Qwen3 folder, and one SGLang engine for the whole session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from correction.weight_bucket import WeightBucket
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

T = TypeVar("T")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3 of 2 layers, hidden 64, 512 tokens, tied embeddings, random weights, with its tokenizer."""
    return save_tiny_model(save_tiny_tokenizer(tmp_path_factory.mktemp("tiny_qwen3")))


class BackgroundLoop:
    """An event loop in a thread, as in a Ray async actor; tests call it from outside."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 300.0) -> T:
        return self.start(coroutine).result(timeout_s)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin; the result is waited for later."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
        self.loop.close()


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path, engine_loop: BackgroundLoop) -> Iterator[Any]:
    """One RolloutEngine on `tiny_model`; tests that change its weights use `engine`, which restores them."""
    from rollout.engine import RolloutEngine
    from rollout.engine_config import EngineConfig

    config = EngineConfig(device="cpu", max_total_tokens=65_536, max_running_requests=64, weight_group_timeout_s=10.0)
    engine = engine_loop.run(RolloutEngine.start(tiny_model, config, name="test engine"))
    yield engine
    engine_loop.run(engine.shutdown())


@pytest.fixture
def engine(shared_engine: Any, engine_loop: BackgroundLoop, tiny_model: Path) -> Iterator[Any]:
    """The shared engine; when a test has changed its weights, those of `tiny_model` come back under a new version."""
    version = shared_engine.version
    yield shared_engine
    if shared_engine.version != version or not shared_engine.is_healthy:
        from safetensors.torch import load_file

        weights = WeightBucket.of(load_file(tiny_model / "model.safetensors"))
        engine_loop.run(shared_engine.update_weights(shared_engine.version + 1, [weights]))
