"""For processes of actors that are to lose patience with the trajectory queue within seconds; Ray has each run `impatient` as it starts."""

from __future__ import annotations

PATIENCE_S = 2.0


def impatient() -> None:
    """Before an actor's class is imported, or after it."""
    from actors.pool import admission, pool
    from actors.queue import trajectory_queue

    for module in (admission, pool, trajectory_queue):
        module.ANSWER_S = PATIENCE_S  # type: ignore[attr-defined]
    admission._POLL_S = PATIENCE_S
