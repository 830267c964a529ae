"""What the benchmark of the second forward reads in a run's timeline: how much of it ran while the batch still lacked groups."""

from __future__ import annotations

from benchmarks.split_forward import of_timeline
from evenkeel.actors.record.timeline import LaneSpan


def span(what: str, begin: float, end: float, version: int | None) -> LaneSpan:
    return LaneSpan(what, begin, end, version, lane="learner-0")


def test_what_ends_before_the_last_group_is_there_is_free() -> None:
    """Batch 5 is whole at 20: of its forwards 15 to 18 is free, of 18 to 22 the half; nothing of the copy after it. Batch 4 is left out, as
    are what else a rank does and a forward of no batch."""
    spans = [
        *(span("queue", at, 21.0, 5) for at in (12.0, 20.0, 16.0)),
        *(span("forward", begin, end, 5) for begin, end in ((15.0, 18.0), (18.0, 22.0))),
        *(span("copy", 22.0, 23.0, 5), span("queue", 5.0, 9.0, 4), span("forward", 4.0, 5.0, 4)),
        *(span("step", 24.0, 30.0, 5), span("forward", 40.0, 41.0, None)),
    ]
    assert of_timeline(spans, first_version=5) == (8.0, 5.0)
    assert of_timeline(spans, first_version=6) == (0.0, 0.0)
