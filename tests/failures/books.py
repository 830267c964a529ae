"""How a run must end that something has died in: with the books of a run that nothing has, in order, and without a process left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import Run


def check_end(
    run: Run, *, groups_per_step: int, steps: int | None = None, goes_back: bool = False, within_s: float = 30.0, but: tuple[str, ...] = ()
) -> None:
    """`check_books`; a traceback has reached nobody, and all of its processes have ended.

    Args:
        goes_back: it has gone back to a checkpoint or to its beginning; otherwise it must not have.
        within_s: of the driver's end.
        but: processes with one of these words in their command may stay.
    """
    check_books(run, groups_per_step=groups_per_step, steps=steps)
    assert ("The run goes back to" in run.events()) == goes_back, run.events()
    assert "Traceback" not in run.output(), run.output()[-4000:]
    assert run.orphans(within_s, but=but) == []


class Written(Protocol):
    """What a run has written down."""

    run_dir: Path

    def steps(self) -> list[int]: ...

    def metrics(self) -> list[dict[str, Any]]: ...

    def ledger(self) -> list[dict[str, Any]]: ...


def check_books(run: Written, *, groups_per_step: int, steps: int | None = None) -> None:
    """Its lines are in order, up to the last checkpoint, and each prompt is there once.

    That is trained, discarded or under way in the last checkpoint: together the first `admitted` of the stream, in full steps.

    Args:
        steps: how many it has; None: as many as it had time for.
    """
    state = TrainingState.load(RunFolder.view(run.run_dir).checkpoints()[-1].state)
    assert run.steps() == list(range(1, state.step + 1)), "one line a step, in order"
    assert steps in (None, state.step)
    entries = run.ledger()
    settled = [entry["prompt_id"] for entry in entries]
    assert len(set(settled)) == len(settled), "trained or discarded twice"
    under_way = [t.prompt.prompt_id for t in state.book.in_flight] + [g.prompt.prompt_id for g in state.book.finished]
    positions = sorted(int(prompt_id.rpartition("/")[2]) for prompt_id in settled + under_way)
    assert positions == list(range(state.book.admitted)), "lost or doubled"
    trained = [entry["step"] for entry in entries if entry["outcome"] == "trained"]
    assert [trained.count(step) for step in range(1, state.step + 1)] == [groups_per_step] * state.step
    by_reason = Counter(entry["outcome"] for entry in entries if entry["outcome"] != "trained")
    assert (state.book.trained, Counter(state.book.discarded_by_reason)) == (len(trained), by_reason)
    assert [line["groups/trained_total"] for line in run.metrics()] == [groups_per_step * line["step"] for line in run.metrics()]
