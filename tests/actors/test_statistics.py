"""Wilson's interval against its closed form, and figures from the literature."""

from __future__ import annotations

import math

import pytest

from actors.evaluation import wilson


@pytest.mark.parametrize(("k", "n"), [(0, 10), (7, 10), (10, 10), (281, 512), (507, 512)])
def test_closed_form(k: int, n: int) -> None:
    """Centre (p + z^2 / 2n) / (1 + z^2 / n), half width z / (1 + z^2 / n) sqrt(p (1 - p) / n + z^2 / 4n^2), z = 1.959964."""
    z, p = 1.959963984540054, k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = wilson(k, n)
    assert (found.value, found.n) == (p, n)
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-12)


def test_published_example() -> None:
    """81 of 263: 0.2553 to 0.3662 (Newcombe 1998, Statistics in Medicine 17, table I, method 3)."""
    assert (wilson(81, 263).low, wilson(81, 263).high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_in_words() -> None:
    assert str(wilson(10, 10)) == "1.000 [0.722, 1.000], n = 10"


@pytest.mark.parametrize(("k", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_no_share_of_nothing(k: int, n: int) -> None:
    with pytest.raises(ValueError):
        wilson(k, n)
