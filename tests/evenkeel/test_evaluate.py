"""`evenkeel eval`, without its engine: the file of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from evenkeel import evaluation as command
from evenkeel.correction.errors import ConfigError
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.trajectory import Prompt, Trajectory
from evenkeel.task_config import mixture
from tests.actors.cases import trajectory


class Unscored:
    """In the place of the engine and its scorers: each answer has failed, by the JSON in it."""

    def __init__(self, rollout: RolloutConfig, *_: object) -> None:
        self.engines.append(rollout.engine)

    engines: ClassVar[list[EngineConfig]] = []
    """Those that were asked for."""

    @asynccontextmanager
    async def started(self, samples: Sequence[Prompt]) -> AsyncIterator[None]:
        yield

    async def answer(self, asked: Sequence[Prompt], how: object) -> list[tuple[Trajectory, ...]]:
        return [(replace(trajectory(prompt, reward=None), error="no such key: \ud83d"),) for prompt in asked]


def test_half_a_surrogate_pair_in_an_error_is_written_as_its_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Asker", Unscored)
    monkeypatch.setattr(command, "tasks_for", lambda config: (mixture(config, {}), config.rollout.with_context(100)))
    samples = tmp_path / "answers.txt"
    result = command.evaluate_folder(tmp_path, "spell_backward", [], problems=2, samples=samples, say=lambda _: None)
    assert result.failed == 2 and samples.read_text(encoding="utf-8").count(r"no such key: \ud83d)") == 2


def asks(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> Callable[..., EngineConfig]:
    """Takes settings, and returns the engine that a machine with so many GPUs would be asked for."""
    monkeypatch.setattr(command, "Asker", Unscored)
    monkeypatch.setattr(command, "tasks_for", lambda config: (mixture(config, {}), config.rollout.with_context(100)))
    monkeypatch.setattr(command, "visible_gpus", lambda: gpus)

    def ask(*words: str) -> EngineConfig:
        command.evaluate_folder(folder, "spell_backward", words, problems=2, samples=None, say=lambda _: None)
        return Unscored.engines[-1]

    return ask


@pytest.mark.parametrize(("gpus", "found"), [(0, ("cpu", "float16")), (1, ("cuda", "float16"))])
def test_the_engine_has_the_type_that_the_learner_s_weights_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, found: tuple[str, str]
) -> None:
    """As in a run, where a recipe says float16 of the learner alone; float32 on a GPU is refused before an engine starts."""
    ask = asks(tmp_path, monkeypatch, gpus)
    engine = ask("learner.dtype=float16")
    assert (engine.device, engine.dtype) == found
    if gpus:
        with pytest.raises(ConfigError, match=r"rollout\.engine\.dtype = float32 with device = cuda"):
            ask("learner.dtype=float32")


def test_only_what_contradicts_the_engine_s_own_operators_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No learner runs, and nobody asks for experts: `train` alone refuses what a recipe says of these."""
    ask = asks(tmp_path, monkeypatch, gpus=0)
    assert not ask("learner.batch_invariant=true").batch_invariant
    engine = ask("true_on_policy=true", "learner.batch_invariant=false", "learner.tensor_parallel=2", "learner.routing_replay=rollout",
                 "rollout.engine.return_routed_experts=false")  # fmt: skip
    assert (engine.batch_invariant, engine.projection_parts) == (True, 2)
    with pytest.raises(ConfigError, match=r"^rollout\.engine\.batch_invariant: false with true_on_policy: true"):
        ask("true_on_policy=true", "learner.batch_invariant=false", "rollout.engine.batch_invariant=false")
    with pytest.raises(ConfigError, match=r"projection_parts: 3 with true_on_policy: true and learner\.tensor_parallel: 1"):
        ask("true_on_policy=true", "rollout.engine.projection_parts=3")
