"""The ledger: every prompt of a run, once.

One line of ledger.jsonl for each prompt that left the queue, with what became of it. A prompt id holds its epoch, so an id that comes
twice is a prompt that was used twice. After a resume the lines behind the checkpoint's step are taken back, like those prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from actors.carriers import QueueSnapshot
from correction.errors import LedgerError


class Ledger:
    """Outcomes by prompt id, on disk as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._settled: dict[str, int] = {}
        if path.exists():
            _cut_torn_line(path)
            self._settled = {prompt_id: step for _, step, prompt_id in self._lines()}

    def __len__(self) -> int:
        return len(self._settled)

    def rewind(self, step: int) -> None:
        """Forget what happened after `step`: those steps will be done again."""
        if not self._path.exists():
            return
        kept = [entry for entry in self._lines() if entry[1] <= step]
        replacement = self._path.with_suffix(".tmp")
        replacement.write_text("".join(line + "\n" for line, _, _ in kept))
        replacement.replace(self._path)
        self._settled = {prompt_id: step for _, step, prompt_id in kept}

    def doubt(self, queue: QueueSnapshot) -> str | None:
        """What is to be said of a ledger that has not as many prompts as the queue has counted; None if it has."""
        settled = queue.trained + queue.discarded - len(queue.unreported)
        if len(self) == settled:
            return None
        return (
            f"{self._path} is damaged: it has {len(self)} of the {settled} prompts used so far. The run goes on by the checkpoint's "
            "counts, but a prompt that is missing there wouldn't be known if it came again"
        )

    def _lines(self) -> list[tuple[str, int, str]]:
        """(line, step, prompt id) of each line that can be read."""
        found = []
        for line in self._path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
                found.append((line, int(entry["step"]), str(entry["prompt_id"])))
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def settle(self, step: int, *, trained: Iterable[str], discarded: Iterable[tuple[str, str]] = ()) -> None:
        """Write down the prompts that a step trained and those given up since the last one, as (prompt id, reason).

        Raises: LedgerError if one of them was settled before.
        """
        outcomes = [(prompt_id, "trained") for prompt_id in trained] + list(discarded)
        lines = []
        for prompt_id, outcome in outcomes:
            if prompt_id in self._settled:
                raise LedgerError(f"step {step}: prompt {prompt_id} ({outcome}) was settled in step {self._settled[prompt_id]} already")
            self._settled[prompt_id] = step
            lines.append(json.dumps({"step": step, "prompt_id": prompt_id, "outcome": outcome}) + "\n")
        with self._path.open("a") as file:
            file.write("".join(lines))


def _cut_torn_line(path: Path) -> None:
    """A crash in the middle of a write leaves a line without an end; its step is after the last checkpoint and will be done again."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
