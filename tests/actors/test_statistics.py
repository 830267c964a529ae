"""Shares: the interval that we ask scipy for, their words, and what is refused."""

from __future__ import annotations

import pytest

from actors.evaluation import wilson


def test_wilsons_interval_and_no_other() -> None:
    """81 of 263: 0.2553 to 0.3662 (Newcombe 1998, Statistics in Medicine 17, table I, method 3; exact would be 0.2527 to 0.3676)."""
    found = wilson(81, 263)
    assert (found.value, found.n) == (81 / 263, 263)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_in_words() -> None:
    assert str(wilson(10, 10)) == "1.000 [0.722, 1.000], n = 10"


def test_no_share_of_nothing() -> None:
    """scipy's interval of none of none is 0 to 1, and a division by 0 would say nothing of where."""
    with pytest.raises(ValueError, match="0 of 0: a share needs at least one trial"):
        wilson(0, 0)
