"""Pauses before something is tried again: each twice as long as the one before, up to a longest one."""

_MOST_DOUBLINGS = 1000
"""A float takes no more than 1023. Any pause has reached its longest by then."""


def doubled_pause_s(number: int, first_s: float, most_s: float) -> float:
    """Seconds of a pause: `first_s`, 2 `first_s`, 4 `first_s` ... up to `most_s`.

    Args: number: of the pause, from 1; below that there is none (0 s).
    """
    return min(most_s, first_s * 2.0 ** min(number - 1, _MOST_DOUBLINGS)) if number > 0 else 0.0
