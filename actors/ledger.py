"""The ledger: every prompt of a run, once.

One line of ledger.jsonl for each prompt that left the queue, with what became of it. A prompt id holds its epoch, so an id that comes
twice is a prompt that was used twice. After a resume the lines behind the checkpoint's step are taken back, like those prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from actors.carriers import QueueSnapshot
from actors.json_lines import JsonLines
from correction.errors import LedgerError


class Ledger:
    """Outcomes by prompt id, on disk as they come."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._lines.repair()  # a torn line is of a step after the last checkpoint, which will be done again
        self._settled = dict(self._lines.read(_prompt_and_step))

    def __len__(self) -> int:
        return len(self._settled)

    def rewind(self, step: int) -> None:
        """Forget what happened after `step`: those steps will be done again."""
        self._lines.rewind(step)
        self._settled = dict(self._lines.read(_prompt_and_step))

    def doubt(self, queue: QueueSnapshot) -> str | None:
        """What is to be said of a ledger that has not as many prompts as the queue has counted; None if it has."""
        settled = queue.trained + queue.discarded - len(queue.unreported)
        if len(self) == settled:
            return None
        return (
            f"{self._lines.path} is damaged: it has {len(self)} of the {settled} prompts used so far. The run goes on by the checkpoint's "
            "counts, but a prompt that is missing there wouldn't be known if it came again"
        )

    def settle(self, step: int, *, trained: Iterable[str], discarded: Iterable[tuple[str, str]] = ()) -> None:
        """Write down the prompts that a step trained and those given up since the last one, as (prompt id, reason).

        Raises: LedgerError if one of them was settled before.
        """
        outcomes = [(prompt_id, "trained") for prompt_id in trained] + list(discarded)
        records = []
        for prompt_id, outcome in outcomes:
            if prompt_id in self._settled:
                raise LedgerError(f"step {step}: prompt {prompt_id} ({outcome}) was settled in step {self._settled[prompt_id]} already")
            self._settled[prompt_id] = step
            records.append({"step": step, "prompt_id": prompt_id, "outcome": outcome})
        self._lines.append(*records)


def _prompt_and_step(record: dict[str, Any]) -> tuple[str, int]:
    return str(record["prompt_id"]), int(record["step"])
