"""Every preset trains the nano recipe, each of its parts acts, and no two presets are the same.

The recipe's batch of 64 groups is cut to 16: with the whole batch, all presets would take an hour of a core.

1. Each preset trains for 20 steps with max_staleness 1 and two optimizer steps a batch, engine and learner kept in between. All numbers of
   all steps are finite.
2. One recorded run is trained again with each preset under stress: noise on the behaviour logprobs (so that rho is far from 1), a high
   learning rate and four optimizer steps a batch (so that r is). The groups are the same for all, so a difference between two results
   is the presets' own; the run has staleness 0 to 2, because A-3PO is the bypass up to 1.
3. What ACTIVE names must have happened in one of the two.
4. The updates of any two presets in that run are further apart than rounding brings two equal ones.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
from torch import Tensor

from evenkeel.correction.presets.methods import PRESETS
from lab.kept_engines import KeptEngines, RunRecord, recipe

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1800)]

NANO = Path(__file__).parents[2] / "recipes" / "nano_spell_backward.yaml"
STEPS = 20
STRESS = {"mu_noise": 0.5, "learning_rate": 3e-3, "optimizer_steps_per_batch": 4, "seed": 7}

CLIPPED = "learner/clip_share > 0"
"""The objective's clip or gate took gradients away."""
BOUNDED = "loss/bounded_share > 0"
"""The objective's coefficient was cut."""
TRUNCATED = "truncated_share > 0"
MASKED = "masked_share > 0"
WEIGHED = "importance_weight_max > 1.01"
"""Weights other than 1."""
BOTH_SIDES = ("rho_min < 0.5", "rho_max > 2")
"""Tokens beyond the lower and the upper bound."""
PENALISED = "loss/kl_loss > 0"

ACTIVE: dict[str, tuple[str, ...]] = {
    "ppo": (CLIPPED,),
    "ppo-dual-clip": (CLIPPED,),
    "grpo": (CLIPPED,),
    "dr-grpo": (CLIPPED,),
    "dapo": (CLIPPED,),
    "bandpo": (CLIPPED,),
    "gspo": (CLIPPED,),
    "luspo": (CLIPPED,),
    "gmpo": (CLIPPED,),
    "ctpo": (CLIPPED,),
    "sapo": ("learner/drift_k3 > 0.001",),
    "cispo": (BOUNDED,),
    "m2po": ("rejected_by_second_moment_token_q > 0",),
    "m2po-areal": (CLIPPED, "rejected_by_second_moment_token_rho > 0"),
    "k3-sequence": (CLIPPED, "rejected_by_k3_geometric_rho > 0"),
    # Nothing else leaves a token out.
    "clip-cov": (CLIPPED, "rejected_share > 0"),
    # |log r| has a slope where r is not 1 alone.
    "kl-cov": ("learner/drift_k3 > 0.001",),
    "opsm": (CLIPPED, "rejected_by_k1_geometric_q > 0"),
    "tis-token": (CLIPPED, TRUNCATED),
    "tis-sequence": (CLIPPED, TRUNCATED),
    # Normalised weights of a batch are above their bound where their mean before was below 1, and never all at 1.
    "tis-sequence-normalized": (CLIPPED, TRUNCATED, WEIGHED),
    "tis-geometric-normalized": (CLIPPED, WEIGHED),
    "split-tis": (CLIPPED, TRUNCATED),
    "split-mis": (CLIPPED, TRUNCATED, "rejected_by_ratio_token_mismatch > 0"),
    "mis-token": (CLIPPED, TRUNCATED, "rejected_by_ratio_token_rho > 0", *BOTH_SIDES),
    "mis-token-upper": (CLIPPED, MASKED),
    "mis-sequence": (CLIPPED, TRUNCATED, "rejected_by_ratio_sequence_rho > 0"),
    "mis-sequence-upper": (CLIPPED, MASKED),
    "mis-geometric": (CLIPPED, TRUNCATED, "rejected_by_ratio_geometric_rho > 0"),
    "mis-geometric-miles": (CLIPPED, TRUNCATED, "rejected_by_ratio_geometric_rho > 0"),
    # Normalised weights are above their bound of 2: their mean before was below 1.
    "mis-full": (CLIPPED, TRUNCATED, "rejected_by_ratio_token_rho > 0", "rejected_by_veto > 0", "importance_weight_max > 2.01"),
    "miles-baseline": (CLIPPED,),
    "miles-is": (CLIPPED, TRUNCATED),
    "miles-mis": (CLIPPED, TRUNCATED, "rejected_by_ratio_token_rho > 0", *BOTH_SIDES),
    "miles-mis-normalized": (CLIPPED, TRUNCATED, "rejected_by_ratio_token_rho > 0", "importance_weight_max > 2.01"),
    "icepop": (CLIPPED, MASKED, "rho_min < 0.5", "rho_max > 5"),
    "kpop": (CLIPPED, WEIGHED, "rejected_by_binary_kl_max_token_rho > 0"),
    "seq-mask-tis": (CLIPPED, WEIGHED, "rejected_by_ratio_geometric_rho > 0"),
    "decoupled-ppo": (CLIPPED, WEIGHED),
    "a-3po": (CLIPPED, WEIGHED),
    "bypass": (CLIPPED,),
    "pg": (),
    "pg-is": ("target_rho_max > 3",),
    "pg-tis": (BOUNDED,),
    "pg-tis-scale": (BOUNDED,),
    "pg-sequence": (TRUNCATED,),
    "pg-clip": (BOUNDED,),
    "dro": (PENALISED,),
    "mirror-descent": (PENALISED,),
    "oapl": (PENALISED,),
    # Between 0 and 1, and a half where a token is no surprise; 1 without the factor.
    "delightful": ("effective_factor_mean < 0.8",),
    "grpo-clip-higher": (CLIPPED,),
    "grpo-clip-higher-scale": (CLIPPED, BOUNDED),
    "grpo-relax-both": (CLIPPED,),
    "minimal-mask": (CLIPPED,),
    "minirl": (CLIPPED, BOUNDED),
    "minirl-untruncated": (CLIPPED, "target_rho_max > 3"),
    "minirl-tis": (CLIPPED, BOUNDED),
    "dppo-binary-tv": (CLIPPED,),
    "dppo-binary-tv-scale": (CLIPPED, BOUNDED),
    "dppo-binary-kl": (CLIPPED,),
    "dppo-binary-kl-scale": (CLIPPED, BOUNDED),
    "dppo-topk-tv": (CLIPPED, BOUNDED),
    "dppo-topk-kl": (CLIPPED, BOUNDED),
    "topr": (BOUNDED,),
    "vespo": ("target_rho_max > 3",),
    "rollout-is": ("rejected_by_ratio_token_q > 0",),
    "sao-mask": ("rejected_by_ratio_token_q > 0",),
    "prime-tv": (CLIPPED, PENALISED),
    "prime-ipo": ("rejected_by_binary_tv_token_q > 0", PENALISED),
}
"""What must act: a number of the step, and the value that it passes in at least one step."""


class Trained:
    """The runs of each preset, made when first asked for."""

    def __init__(self, kept: KeptEngines, records: Path) -> None:
        self.kept, self._records = kept, records
        self._stress: dict[str, RunRecord] = {}

    def train(self, preset: str) -> RunRecord:
        return self._written(preset, "train", self.kept.run(preset, steps=STEPS))

    @cached_property
    def base(self) -> RunRecord:
        """The recorded run, with top-K logprobs for those that need them."""
        return self.kept.run("tis-token", steps=8, max_staleness=2, topk=20)

    def stress(self, preset: str) -> RunRecord:
        if preset not in self._stress:
            self._stress[preset] = self._written(preset, "stress", self.kept.replay(preset, self.base, **STRESS))
        return self._stress[preset]

    def rounded(self, preset: str) -> RunRecord:
        """The stress run again, in micro-batches of another size."""
        return self.kept.replay(preset, self.base, tokens_per_microbatch=400, **STRESS)

    @cached_property
    def start(self) -> Tensor:
        """[parameters]: the weights from which all runs begin."""
        return self.kept.replay("pg", self.base, steps=0).weights

    def _written(self, preset: str, kind: str, record: RunRecord) -> RunRecord:
        (self._records / f"{preset}-{kind}.json").write_text(json.dumps(record.steps))
        return record


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("presets")
    with KeptEngines.start(recipe(folder / "model", "groups_per_step=16", path=NANO)) as kept:
        yield Trained(kept, folder)


def holds(condition: str, steps: list[dict[str, float]]) -> bool:
    """Whether a condition like "rho_max > 2" holds in some step."""
    name, comparison, bound = condition.split()
    compare = {">": operator.gt, "<": operator.lt}[comparison]
    return any(compare(step[name], float(bound)) for step in steps if name in step)


def not_finite(record: RunRecord) -> list[str]:
    return sorted({name for step in record.steps for name, value in step.items() if not math.isfinite(value)})


def test_every_preset_has_its_row() -> None:
    assert list(ACTIVE) == list(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_trains_and_all_its_parts_act(trained: Trained, preset: str) -> None:
    run, stress = trained.train(preset), trained.stress(preset)
    assert len(run.steps) == STEPS
    assert not_finite(run) == [] == not_finite(stress)
    for step, numbers in enumerate(run.steps):
        assert numbers["staleness_max"] == min(step, 1)
        assert numbers["optimizer_steps"] + numbers["skipped_steps"] == 2
        assert {"k3_kl", "target_k3_kl", "ess_token", "kept_share"} <= numbers.keys()
        # The narrow geometric bands drop nearly every stale sequence at the recipe's learning rate: whole batches are without a gradient.
        assert (numbers["grad_norm"] > 0 and numbers["skipped_steps"] < 2) or numbers["kept_share"] < 0.02
        assert numbers["skipped_steps"] == 0 or numbers["kept_share"] < 0.2  # one half may lose all, and the other not
    assert run.steps[0]["grad_norm"] > 0
    idle = [condition for condition in ACTIVE[preset] if not holds(condition, run.steps + stress.steps)]
    assert idle == []


def test_no_two_presets_give_the_same_weights(trained: Trained) -> None:
    """Distances between updates, relative to their length.

    A checksum alone would also tell apart what differs by rounding: other micro-batches show how far rounding goes, and every pair must
    be three times as far apart (0.03 at most and 0.2 at least, when this was written).
    """
    ends = {preset: trained.stress(preset).weights for preset in PRESETS}
    rounding = max(distance(trained, ends[name], trained.rounded(name).weights) for name in ("ppo", "mis-full", "pg-is"))
    close = {
        (one, other): apart
        for one, other in itertools.combinations(PRESETS, 2)
        if (apart := distance(trained, ends[one], ends[other])) < 3 * rounding
    }
    assert close == {}, f"rounding alone: {rounding}"


def distance(trained: Trained, one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / (one - trained.start).norm())
