"""What tests of the pool share."""

from __future__ import annotations

from pathlib import Path

from evenkeel.actors.carriers import WorkerSettings
from evenkeel.rollout.config import RolloutConfig
from tests.actors.cases import prompt


def worker_settings(workers: int) -> WorkerSettings:
    """Of so many workers on CPUs, with a task of reasoning-gym."""
    config = RolloutConfig.model_validate(
        {
            "workers": workers,
            "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
            "reward": {"kind": "exact_match"},
            "engine": {"device": "cpu"},
        }
    )
    return WorkerSettings(config, Path("model"), (prompt(0),), bind="127.0.0.1", resource="rollout")
