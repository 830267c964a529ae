"""Shares: their intervals, over trials and over questions, pass@k, their words, and what is refused."""

from __future__ import annotations

import itertools
import random
from statistics import fmean

import pytest

from evenkeel.actors.metrics.held_out import Proportion, pass_at, share_over_questions, wilson_interval


def wilson(right: int, n: int) -> Proportion:
    return Proportion(right / n, *wilson_interval(right / n, n), n)


def test_wilsons_interval_and_no_other() -> None:
    """81 of 263: 0.2553 to 0.3662 (Newcombe 1998, Statistics in Medicine 17, table I, method 3; exact would be 0.2527 to 0.3676)."""
    found = wilson(81, 263)
    assert (found.value, found.n) == (81 / 263, 263)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 40), (40, 40), (13, 40), (499, 500)])
def test_wilsons_interval_is_scipys(right: int, n: int) -> None:
    """Which takes whole trials alone."""
    from scipy.stats import binomtest  # it imports for a second, in every process of the suite

    theirs = binomtest(right, n).proportion_ci(method="wilson")
    found = wilson(right, n)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12) and found.low <= found.value <= found.high


@pytest.mark.parametrize("values", [[1.0] * 13 + [0.0] * 27, [0.0] * 5, [1.0]])
def test_one_answer_a_question_has_wilsons_interval_itself(values: list[float]) -> None:
    assert share_over_questions(values, len(values)) == wilson(sum(values), len(values))


def test_answers_that_agree_count_once_and_equally_hard_questions_count_each_answer() -> None:
    """The two ends: 40 questions whose 8 answers are alike are 40 trials; where questions differ no more than 320 coins would, 320."""
    alike = share_over_questions([1.0] * 13 + [0.0] * 27, 320)
    assert (alike.low, alike.high) == pytest.approx((wilson(13, 40).low, wilson(13, 40).high), abs=1e-12) and alike.n == 40
    equally_hard = share_over_questions([0.5] * 38 + [0.25, 0.75], 320)
    assert (equally_hard.low, equally_hard.high) == (wilson(160, 320).low, wilson(160, 320).high) and equally_hard.n == 40


def test_the_interval_over_questions_covers_and_one_over_answers_does_not() -> None:
    """Difficulties that are uniform on [0, 1], 64 questions of 8 answers: 95 % of intervals hold the mean difficulty of all questions, 0.5.
    An interval of 512 independent answers holds it far less often: the variance of a question's mean is 1/12 + 1/48, not 1/32, so that 1.83
    times as wide is right, and P(|z| < 1.96 / 1.83) = 0.72."""
    generator = random.Random(3)
    ours, naive, tries = 0, 0, 2000
    for _ in range(tries):
        difficulties = [generator.random() for _ in range(64)]
        values = [sum(generator.random() < p for _ in range(8)) / 8 for p in difficulties]
        found, wrong = share_over_questions(values, 512), wilson(8 * sum(values), 512)
        ours += found.low <= 0.5 <= found.high
        naive += wrong.low <= 0.5 <= wrong.high
    assert 0.93 < ours / tries < 0.97
    assert 0.69 < naive / tries < 0.75


@pytest.mark.parametrize("right", range(6))
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(right: int) -> None:
    """All subsets of 5 answers, listed."""
    answers = [i < right for i in range(5)]
    for k in range(1, 6):
        assert pass_at(k, right=right, answers=5) == pytest.approx(fmean(any(chosen) for chosen in itertools.combinations(answers, k)))


def test_pass_at_k_is_unbiased_where_the_plain_formula_is_not() -> None:
    """1 - (1 - c / n)^k is too low (Chen et al. 2021, appendix A): at p = 0.2, n = 8, k = 4 the truth is 1 - 0.8^4 = 0.5904."""
    from math import comb

    chances = [comb(8, c) * 0.2**c * 0.8 ** (8 - c) for c in range(9)]
    assert sum(p * pass_at(4, right=c, answers=8) for c, p in enumerate(chances)) == pytest.approx(1 - 0.8**4, abs=1e-12)
    assert sum(p * (1 - (1 - c / 8) ** 4) for c, p in enumerate(chances)) < 0.57


def test_in_words() -> None:
    assert str(wilson(10, 10)) == "1.000 [0.722, 1.000], n = 10"
