"""For processes of actors that are to lose patience within seconds; Ray has each run `impatient` as it starts."""

from __future__ import annotations

PATIENCE_S = 2.0


def impatient() -> None:
    """Before an actor's class is imported, or after it."""
    from evenkeel.actors.pool import pool

    pool.ANSWER_S = PATIENCE_S  # type: ignore[attr-defined]
