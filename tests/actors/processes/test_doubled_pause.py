"""Pauses that double, for any first and longest one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenkeel.actors.processes.doubled_pause import doubled_pause_s


@given(number=st.integers(-5, 10**9), first_s=st.floats(1e-3, 1e3), beyond_s=st.floats(0.0, 1e6))
def test_a_pause_doubles_from_the_first_to_the_longest_and_stays_there(number: int, first_s: float, beyond_s: float) -> None:
    """No number of failures is too large for it: a run of weeks may count thousands."""
    most_s = first_s + beyond_s
    now_s, next_s = (doubled_pause_s(number + more, first_s, most_s) for more in (0, 1))
    assert 0.0 <= now_s <= next_s <= most_s
    if number < 1:
        assert now_s == 0.0 and next_s == (first_s if number == 0 else 0.0)
    elif number > 30:
        assert now_s == most_s, "2 ** 30 ms are longer than any longest one here"
    else:
        assert next_s == min(2 * now_s, most_s)


def test_the_pauses_of_a_pool() -> None:
    assert [doubled_pause_s(number, 2.0, 60.0) for number in range(8)] == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
