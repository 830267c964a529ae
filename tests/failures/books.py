"""The books of a run that something has died in: they must be those of a run that nothing has."""

from __future__ import annotations

from typing import Any, Protocol

from actors.state.resume import TrainingState


class Written(Protocol):
    """What a run has written down."""

    def metrics(self) -> list[dict[str, Any]]: ...

    def ledger(self) -> list[dict[str, Any]]: ...


def check_books(run: Written, state: TrainingState, *, groups_per_step: int) -> None:
    """Each prompt once: trained, discarded or under way in the last checkpoint, together the first `admitted` of the stream; full steps.

    Args: state: of the last checkpoint.
    """
    entries = run.ledger()
    settled = [entry["prompt_id"] for entry in entries]
    assert len(set(settled)) == len(settled), "trained or discarded twice"
    under_way = [t.prompt.prompt_id for t in state.queue.in_flight] + [g.prompt.prompt_id for g in state.queue.finished]
    positions = sorted(int(prompt_id.rpartition("/")[2]) for prompt_id in settled + under_way)
    assert positions == list(range(state.queue.admitted)), "lost or doubled"
    trained = [entry["step"] for entry in entries if entry["outcome"] == "trained"]
    assert [trained.count(step) for step in range(1, state.step + 1)] == [groups_per_step] * state.step
    assert (state.queue.trained, state.queue.discarded) == (len(trained), len(entries) - len(trained))
    assert [line["groups/trained_total"] for line in run.metrics()] == [groups_per_step * line["step"] for line in run.metrics()]
