"""The prompts whose rewards took longest: slowest.json in the run folder, a table in the report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.rollout.trajectory import GroupFacts

FILE = "slowest.json"
_KEPT = 10


@dataclass(frozen=True, slots=True, order=True)
class SlowPrompt:
    """A group whose scoring took long."""

    reward_s: float
    """Seconds from its last answer to its last reward, waiting for a scoring process included."""
    generate_s: float
    response_tokens: int
    prompt_id: str
    worker: str
    unscored: int
    """Answers without a reward."""


class SlowestPrompts:
    """The ten slowest to score of a run, those of before a resume included."""

    def __init__(self, folder: RunFolder) -> None:
        self._kept = read_slowest(folder)
        """Slowest first."""
        self._is_new = False

    def add(self, group: GroupFacts, worker: str) -> None:
        one = SlowPrompt(group.reward_s, group.generate_s, group.response_tokens, group.prompt_id, worker, len(group.failures))
        before, self._kept = self._kept, sorted([*self._kept, one], reverse=True)[:_KEPT]
        self._is_new |= before != self._kept

    def changed(self) -> str | None:
        """New content of the file; None if it hasn't changed since the last call."""
        if not self._is_new:
            return None
        self._is_new = False
        return json.dumps([asdict(one) for one in self._kept], indent=1)


def read_slowest(folder: RunFolder) -> list[SlowPrompt]:
    """Slowest first; none of a run that has none, or whose file is damaged."""
    try:
        return sorted((_parsed(one) for one in json.loads((folder.path / FILE).read_text(encoding="utf-8"))), reverse=True)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return []


def _parsed(one: dict[str, Any]) -> SlowPrompt:
    return SlowPrompt(
        float(one["reward_s"]),
        float(one["generate_s"]),
        int(one["response_tokens"]),
        str(one["prompt_id"]),
        str(one["worker"]),
        int(one["unscored"]),
    )


def slowest_rows(folder: RunFolder) -> list[tuple[str, ...]]:
    """(prompt, seconds of its rewards, seconds of its answers, their tokens, answers without a reward, worker)."""
    return [
        (
            one.prompt_id,
            CATALOGUE["time/reward_s"].text(one.reward_s),
            CATALOGUE["time/generate_s"].text(one.generate_s),
            CATALOGUE["worker/tokens/"].number(one.response_tokens),
            str(one.unscored),
            one.worker,
        )
        for one in read_slowest(folder)
    ]
