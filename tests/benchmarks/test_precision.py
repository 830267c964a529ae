"""The figures of Table 2 of the paper on objective-level hacking, and what follows from the formats themselves."""

import pytest

from benchmarks.precision import precision_gap
from evenkeel.correction.errors import ConfigError


def test_the_published_figures_for_bfloat16():
    """Ratio mean 1.0000, std 0.0048, max about 1.019, min about 0.9815; k3 is about half the variance, far under the KL column."""
    gap = precision_gap("bfloat16", tokens=20_000)
    assert gap.ratio_mean == pytest.approx(1.0, abs=1.5e-4)
    assert gap.ratio_std == pytest.approx(0.0048, abs=1e-4)
    assert gap.ratio_max == pytest.approx(1.019, abs=2.5e-3) and gap.ratio_min == pytest.approx(0.9815, abs=2.5e-3)
    assert gap.k3_kl == pytest.approx(gap.ratio_std**2 / 2, rel=0.02)
    assert gap.k3_kl < 0.014 / 500


def test_three_more_bits_make_an_eighth_of_the_gap():
    """float16 has 10 bits of mantissa, bfloat16 7; probabilities here are above float16's smallest normal number or nearly so."""
    low, high = precision_gap("bfloat16", tokens=5_000), precision_gap("float16", tokens=5_000)
    assert low.ratio_std / high.ratio_std == pytest.approx(8, rel=0.15)


def test_a_format_without_room_for_the_probabilities_is_refused():
    with pytest.raises(ConfigError, match="every probability of a token is 0"):
        precision_gap("float8_e4m3fn", tokens=3, vocabulary=1_000_000)
