"""Fixtures that every package's tests share: a tiny Qwen3 folder, and one SGLang engine for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from correction.engines.weight_bucket import WeightBucket
from lab.background_loop import BackgroundLoop
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

_ENGINE_FIXTURES = {"shared_engine", "engine"}
_LONGEST_FIRST = ("tests/e2e", "shared engine", "tests/learner", "tests/failures", "tests/rollout", "tests/benchmarks")
"""Order in which two processes take groups of tests: what is short fills the end."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `pytest -n 2 --dist loadgroup`: a file stays in one process, and so does everything that uses the shared engine.

    Fixtures of a module or of the session (engines, ranks, whole runs) are then made once, whatever the number of processes.
    """
    names = {item.nodeid: _group(item) for item in items}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(names[item.nodeid]))
    places = {name: place for place, name in enumerate(dict.fromkeys(names.values()))}
    items.sort(key=lambda item: (_rank(names[item.nodeid]), places[names[item.nodeid]]))  # stable: tests of a group keep their order


def _group(item: pytest.Item) -> str:
    return "shared engine" if _ENGINE_FIXTURES & set(getattr(item, "fixturenames", ())) else item.nodeid.split("::")[0]


def _rank(group: str) -> int:
    return next((rank for rank, start in enumerate(_LONGEST_FIRST) if group.startswith(start)), len(_LONGEST_FIRST))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3 of 2 layers, hidden 64, 512 tokens, tied embeddings, random weights, with its tokenizer."""
    return save_tiny_model(save_tiny_tokenizer(tmp_path_factory.mktemp("tiny_qwen3")))


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
