"""`evenkeel eval`, without its engine: the file of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.commands import evaluate as command
from rollout.tasks import build_task
from rollout.trajectory import Prompt, Trajectory
from tests.actors.cases import trajectory


class Unscored:
    """In the place of the engine and its scorers: each answer has failed, by the JSON in it."""

    def __init__(self, *_: object) -> None:
        pass

    @asynccontextmanager
    async def started(self, sample: Prompt) -> AsyncIterator[None]:
        yield

    async def answer(self, asked: Sequence[Prompt], how: object) -> list[tuple[Trajectory, ...]]:
        return [(replace(trajectory(prompt, reward=None), error="no such key: \ud83d"),) for prompt in asked]


def test_half_a_surrogate_pair_in_an_error_is_written_as_its_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Asker", Unscored)
    monkeypatch.setattr(command, "task_for", lambda config: (build_task(config.rollout.task), 100))
    samples = tmp_path / "answers.txt"
    result = command.evaluate_folder(tmp_path, "spell_backward", [], problems=2, samples=samples, say=lambda _: None)
    assert result.failed == 2 and samples.read_text(encoding="utf-8").count(r"no such key: \ud83d)") == 2
