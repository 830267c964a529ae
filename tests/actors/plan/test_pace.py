"""The longest answers against max_staleness: what a step has to take, and when the doctor says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.commands.recipe import load_config
from actors.config import RunConfig
from actors.doctor.facts import PaperFacts
from actors.doctor.paper_rules import on_paper
from actors.plan.gpus import Gpus
from actors.plan.pace import MEAN_SHARE, MOST_ADVISED, OPERATIONS, TOKENS_PER_S, pace
from actors.plan.shape import ModelShape
from actors.plan.traffic import active_parameters
from actors.settings.derived import derived
from tests.actors.known_models import QWEN3_8B

RECIPES = Path(__file__).parents[3] / "recipes"
SHAPE, GPU = ModelShape.of(QWEN3_8B), Gpus.parse("H100x8").memory
LONG = ("rollout.sampling.max_tokens=32768", "rollout.engine.context_length=40960")


def eight(*overrides: str) -> RunConfig:
    return derived(load_config(RunConfig, RECIPES / "qwen3_8b_8gpu.yaml", overrides), has_gpu=True)


def said(*overrides: str) -> list[str]:
    found = on_paper(PaperFacts(SHAPE, (GPU,)), eight(*overrides))
    return [str(one) for one in found if "it has to be ready after" in one.sentence]


def test_a_step_takes_the_longest_of_three_times() -> None:
    """64 groups of 8 answers of a quarter of 8,192 tokens, by 4 engines whose caches hold 178 of them each."""
    found, tokens = pace(SHAPE, eight(), GPU), 512 * 2048
    assert found.longest_answer_s == 8192 / TOKENS_PER_S and found.tail_s == found.longest_answer_s / 3
    at_once = 512 / (found.engines_s * TOKENS_PER_S / (8192 * MEAN_SHARE))
    assert round(at_once) == 4 * 178, "fewer than max_running_requests = 256"
    assert found.learner_s == 6 * active_parameters(SHAPE) * tokens / (4 * OPERATIONS)
    roomy = pace(SHAPE, eight(), 8 * GPU)
    assert roomy.engines_s == pytest.approx(found.engines_s * 178 / 256)


def test_answers_that_outlast_what_may_be_stale_have_a_price() -> None:
    assert said() == [], "a third of two minutes and a half is little more than what the learner needs"
    (price,) = said(*LONG, "groups_per_step=16")
    assert "an answer of 32,768 tokens takes 546 s at 60 tokens a second, and with max_staleness = 2 it has to be ready" in price
    assert "after 3 steps" in price
    enough = pace(SHAPE, eight(*LONG, "groups_per_step=16"), GPU).enough
    assert f"Set max_staleness: {enough}, which costs older samples and more correction, or lower" in price
    assert said(*LONG, "groups_per_step=16", f"max_staleness={enough}") == []
    assert said(*LONG, "groups_per_step=16", "max_staleness=0") == [], "synchronous: that is what was asked for"


def test_nothing_is_said_of_seconds_that_other_parts_of_a_step_take_as_well() -> None:
    """600 tokens are 10 s, half of which a step waits; the nano recipe's 10 are none. One group leaves the rest idle meanwhile."""
    one = ("groups_per_step=1", "max_staleness=1")
    assert said(*one, "rollout.sampling.max_tokens=600") == []
    assert len(said(*one, "rollout.sampling.max_tokens=602")) == 1


def test_no_more_staleness_is_advised_than_a_run_can_bear() -> None:
    """A few long answers would want 22 versions; where as many as are advised don't do, shorter answers are what is left."""
    few = (*LONG, "groups_per_step=4")
    assert pace(SHAPE, eight(*few), GPU).enough == MOST_ADVISED
    (price,) = said(*few)
    assert f"Set max_staleness: {MOST_ADVISED}, which" in price
    (price,) = said(*few, f"max_staleness={MOST_ADVISED}")
    assert "Set max_staleness" not in price and "Lower rollout.sampling.max_tokens" in price
