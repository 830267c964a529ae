"""The run's switch sets both sides or refuses; a difference stops the run or is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.actors.config import OnDifference, RunConfig
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.settings.resolve import with_devices, with_equal_operators
from evenkeel.actors.settings.true_on_policy import check_batch, compare_batch, metrics_of, raise_on_difference
from evenkeel.correction.batch import FinalDecision, PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.decision import no_counts
from evenkeel.correction.errors import ActorLost, ConfigError, EngineError
from evenkeel.learner.results import StepValues


def run_config(folder: Path, **changes: Any) -> RunConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    task = {"kind": "reasoning_gym", "dataset": "spell_backward"}
    recipe = {
        "model": folder,
        "steps": 1,
        "groups_per_step": 4,
        "rollout": {"task": task, "reward": {"kind": "reasoning_gym"}},
        "true_on_policy": True,
    }
    return with_devices(RunConfig.model_validate(recipe | changes), has_gpu=False)


def resolved(config: RunConfig) -> RunConfig:
    return with_equal_operators(config, json.loads((config.model / "config.json").read_text()))


def test_the_switch_sets_both_sides(tmp_path: Path) -> None:
    config = resolved(run_config(tmp_path))
    assert config.learner.batch_invariant and config.rollout.engine.batch_invariant
    assert config.rollout.engine.dtype == config.learner.dtype == "float32"


@pytest.mark.parametrize("side", ["learner", "rollout.engine"])
def test_operators_of_one_side_that_the_switch_contradicts_are_refused(tmp_path: Path, side: str) -> None:
    """On one side alone they make nothing equal, and on both they are true_on_policy, which has the contract checked."""
    for switch in (True, False):
        given = {"batch_invariant": not switch}
        task = run_config(tmp_path).rollout.model_dump(exclude={"engine"})
        changes = {"learner": given} if side == "learner" else {"rollout": task | {"engine": given}}
        found, wanted = str(not switch).lower(), str(switch).lower()
        remedy = rf"Set {side}\.batch_invariant to {wanted}, or to null"
        with pytest.raises(ConfigError, match=rf"{side}\.batch_invariant: {found} with true_on_policy: {wanted}.*{remedy}"):
            resolved(run_config(tmp_path, true_on_policy=switch, **changes))


def test_a_part_of_a_product_is_a_rank_of_the_learner(tmp_path: Path) -> None:
    """The engine sums in the order of the learner's ranks: another number of parts would give other bits, at the first batch."""
    config = resolved(run_config(tmp_path, learner={"tensor_parallel": 2}))
    assert config.rollout.engine.projection_parts == 2
    rollout = config.rollout.model_dump() | {"engine": {"projection_parts": 3}}
    with pytest.raises(ConfigError, match=r"projection_parts: 3 with true_on_policy: true and learner.tensor_parallel: 2"):
        resolved(run_config(tmp_path, learner={"tensor_parallel": 2}, rollout=rollout))


@pytest.mark.parametrize("difference", ["stop", "correct"])
def test_a_batch_that_is_gone_with_the_service_is_not_taken_for_an_equal_one(difference: OnDifference) -> None:
    """The run goes back and compares what it trains then, unless differences are to be corrected anyway."""
    if difference == "stop":
        with pytest.raises(ActorLost, match="step 3: its batch is gone"):
            check_batch(None, difference, step=3)
    else:
        said = "step 3: its batch is gone with the correction service, and can't be compared bit by bit"
        assert check_batch(None, difference, step=3) == said


def test_without_the_switch_nothing_is_touched(tmp_path: Path) -> None:
    config = run_config(tmp_path, true_on_policy=False)
    assert resolved(config) == config
    assert not config.learner.batch_invariant and not config.rollout.engine.batch_invariant


def test_engines_tell_their_routing_only_where_it_is_replayed(tmp_path: Path) -> None:
    """A batch that has routes is computed with them: with "recompute" these would take the place of the learner's own."""
    for replay, told in (("none", False), ("recompute", False), ("rollout", True)):
        config = run_config(tmp_path, true_on_policy=False)
        config = config.model_copy(update={"learner": config.learner.model_copy(update={"routing_replay": replay})})
        assert resolved(config).rollout.engine.return_routed_experts is told
        engine = config.rollout.engine.model_copy(update={"return_routed_experts": not told})
        given = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
        with pytest.raises(ConfigError, match=f"return_routed_experts: {str(not told).lower()} with learner.routing_replay: {replay}"):
            resolved(given)


def test_engines_in_float8_are_refused(tmp_path: Path) -> None:
    engine = {"dtype": "bfloat16", "quantization": "float8_block"}
    rollout = run_config(tmp_path).rollout.model_dump() | {"engine": engine}
    with pytest.raises(ConfigError, match=r"true_on_policy: true with rollout.engine.quantization: float8_block"):
        resolved(run_config(tmp_path, rollout=rollout))
    assert resolved(run_config(tmp_path, rollout=rollout, true_on_policy=False)).rollout.engine.has_float8


def test_later_optimizer_steps_need_a_proximal_forward(tmp_path: Path) -> None:
    """In bypass the second minibatch's logprobs are of other weights, and there is nothing to compare them with."""
    several = {"optimizer_steps_per_batch": 2}
    with pytest.raises(ConfigError, match="2 optimizer steps per batch"):
        resolved(run_config(tmp_path, learner=several, correction={"proximal": "behavior"}))
    assert resolved(run_config(tmp_path, learner=several, correction={"preset": "tis-token"})).learner.batch_invariant


def batch(proximal: float | None = None) -> PackedBatch:
    return PackedBatch(
        token_ids=torch.tensor([1, 2]),
        offsets=torch.tensor([0, 2]),
        loss_mask=torch.tensor([False, True]),
        behavior_logprobs=torch.tensor([0.0, -1.0]),
        advantages=torch.zeros(2),
        weight_versions=torch.tensor([-1, 0], dtype=torch.int32),
        group_ids=torch.zeros(1, dtype=torch.int64),
        proximal_logprobs=None if proximal is None else torch.tensor([0.0, proximal]),
    )


def values(target: Tensor, before_update: Tensor | None = None) -> StepValues:
    none = torch.zeros(2)
    keep, counts = torch.ones(2, dtype=torch.bool), no_counts(CorrectionConfig(preset="tis-token"))
    decided = FinalDecision(keep, none, counts, before_update=before_update)
    return StepValues(target, decided, none)


def test_a_difference_stops_the_run_with_its_name_or_is_counted() -> None:
    other = torch.tensor([0.0, -1.5])
    with pytest.raises(EngineError, match=r"step 3: .*1 of 1 tokens.*by up to 0\.5 nats.*token 2 at position 1.*on_difference: correct"):
        raise_on_difference(compare_batch(batch(), values(other)), "stop", step=3)
    agreement = compare_batch(batch(), values(other))
    raise_on_difference(agreement, "correct", step=3)
    assert StepMetrics(3, metrics_of(agreement))["true_on_policy/equal_share"] == 0.0
    assert metrics_of(agreement)["true_on_policy/max_abs_difference"] == 0.5


def test_with_several_optimizer_steps_the_proximal_logprobs_are_compared() -> None:
    """Where the batch has them; else the trained ones of tokens that were in a pass before the first update: no drift is a difference."""
    drifted, later, first = torch.tensor([0.0, -1.5]), torch.tensor([False, False]), torch.tensor([True, True])
    assert compare_batch(batch(proximal=-1.0), values(drifted, before_update=later)).first is None
    assert compare_batch(batch(), values(drifted, before_update=first)).differing == 1
    assert compare_batch(batch(), values(drifted, before_update=later)).tokens == 0


def test_with_one_optimizer_step_the_training_forward_is_compared_though_another_came_before_it() -> None:
    agreement = compare_batch(batch(proximal=-1.0), values(torch.tensor([0.0, -1.5])))
    assert (agreement.tokens, agreement.differing) == (1, 1)
