"""The numbers of benchmarks/real_mismatch.py, against closed forms, and its ways into engine and learner as far as they need neither."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.mismatch_numbers import Interval, Sampled, Treatment, answers_alone, without_normalisation
from benchmarks.mismatch_operators import OPERATORS, PartlyAlignedRank
from benchmarks.real_mismatch import Text, engine_config, of_engine, of_learner, packed, per_answer, sampled, subsets
from benchmarks.switched_engines import switched_engines
from benchmarks.workloads import lengths_of_groups, random_batch, save_model
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.engine.engine import RolloutEngine

HALF, TENTH = math.log(0.5), math.log(0.1)


def two_answers(reward: float = 0.0) -> list[Text]:
    """Of one prompt of two tokens, with three tokens and one."""
    return [Text("sums", 0, 1.0, 0, (7, 8), (1, 2, 3), reward), Text("sums", 0, 1.0, 0, (7, 8), (4,))]


def test_k3_of_a_doubled_and_a_halved_probability():
    """rho - 1 - log rho is 1 - log 2 at 2, and log 2 - 1/2 at 1/2."""
    found = Sampled.of([[HALF, TENTH]], [[0.0, TENTH - math.log(2)]])
    assert found.k3 == pytest.approx((1 - math.log(2) + math.log(2) - 0.5) / 2)
    assert found.ratio == pytest.approx(1.25) and found.largest == pytest.approx(math.log(2))
    assert found.distance == pytest.approx((0.5 + 0.05) / 2)


def test_every_token_is_in_one_bucket():
    """Bounds belong to the bucket above them, probability 1 to the last."""
    found = Sampled.of([[math.log(p) for p in (0.001, 0.01, 0.1, 0.3, 0.9)] + [0.0]], [[0.0] * 6])
    assert torch.stack(found.buckets()).long().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_shares_that_masks_on_single_tokens_leave_out():
    """A rare token at six times its probability is outside icepop's band and inside kpop's bound, one of 0.5 at 0.9 the other way round."""
    rare, likely = Sampled.of([[math.log(0.001)]], [[math.log(0.006)]]), Sampled.of([[HALF]], [[math.log(0.9)]])
    assert (rare.outside_band, rare.outside_kl) == (1.0, 0.0) and (likely.outside_band, likely.outside_kl) == (0.0, 1.0)


def test_an_interval_is_the_batches_extremes_and_all_of_their_tokens():
    """A batch of three tokens weighs three times as much as one of one."""
    batches = [Sampled.of([[0.0] * 3], [[-0.1] * 3]), Sampled.of([[0.0]], [[-0.5]])]
    found = Interval.over(batches, lambda one: float(one.log_ratio.abs().mean()))
    assert (found.low, found.high) == pytest.approx((0.1, 0.5)) and found.whole == pytest.approx((3 * 0.1 + 0.5) / 4)


def test_values_come_back_to_their_answers():
    """What `packed` lays end to end `per_answer` takes apart; prompts have no logprobs."""
    values = [[-1.0, -2.0, -3.0], [-4.0]]
    batch = packed(two_answers(), values)
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, False, True]
    assert per_answer(batch, batch.behavior_logprobs) == values


def test_the_advantage_of_a_sum_is_against_its_group():
    """One right answer of two: +1/2 and -1/2."""
    batch = packed(two_answers(reward=1.0), [[-1.0] * 3, [-1.0]])
    assert batch.advantages.tolist() == [0.5] * 5 + [-0.5] * 3


def test_what_a_truncated_weight_multiplies_a_step_with():
    """tis-token: ratios of 4 and 1/2 count as 2 and 1/2, of 1 as 1; one weight of four is cut. Normalised, their mean is 1."""
    mu, pi = [[-3.0, -3.0, -3.0], [-3.0]], [[-3.0 + math.log(4), -3.0 + HALF, -3.0], [-3.0]]
    batch = answers_alone(packed(two_answers(), mu, pi))
    found = Treatment.of(batch, "tis-token")
    assert found.weight == pytest.approx((2 + 0.5 + 1 + 1) / 4) and found.cut == pytest.approx(1 / 4) and found.dropped == 0.0
    assert without_normalisation(batch, "tis-token") == pytest.approx((4.5 / 4, 1.0))


def test_what_a_mask_drops():
    """icepop keeps ratios from 0.5 to 5: of 6, 1, 1, 1 one token of four."""
    batch = answers_alone(packed(two_answers(), [[-3.0] * 3, [-3.0]], [[-3.0 + math.log(6), -3.0, -3.0], [-3.0]]))
    assert Treatment.of(batch, "icepop").dropped == pytest.approx(1 / 4)


def test_each_operator_is_taken_alone_and_left_out_once():
    sets = subsets()
    assert sets[0] == () and OPERATORS in sets and len(set(map(frozenset, sets))) == len(sets) == 2 + 2 * len(OPERATORS)
    # What one side ships with anyway is no switch of it.
    assert of_engine(("logprobs",)) == of_learner(("norms",)) == frozenset()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "3M", 512, initializer_range=0.1, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def partly(model):
    rank = PartlyAlignedRank(LearnerConfig(device="cpu", dtype="bfloat16"))
    rank.load(model)
    yield rank
    rank.close()


BATCH = random_batch(lengths_of_groups(2, 2, (5, 9), (6, 12)), 2, 512)


@pytest.mark.parametrize(("operators", "is_exact"), [((), False), (OPERATORS, True)], ids=["none", "all"])
def test_no_operator_is_the_usual_learner_and_all_are_true_on_policys(model, partly, operators, is_exact):
    """To the last bit; the two learners differ from each other."""
    other = LearnerRank(LearnerConfig(device="cpu", dtype="bfloat16", batch_invariant=is_exact))
    other.load(model)
    with partly.aligned(operators):
        found = partly.logprobs(BATCH)
    assert torch.equal(found, other.logprobs(BATCH))
    assert torch.equal(found, partly.logprobs(BATCH)) == (not is_exact)


@pytest.mark.parametrize("operator", ["projections", "attention", "head"])
def test_an_operator_alone_changes_what_the_learner_computes(partly, operator):
    """And only for as long as it is asked for."""
    usual = partly.logprobs(BATCH)
    with partly.aligned([operator]):
        is_same = torch.equal(partly.logprobs(BATCH), usual)
    assert torch.equal(partly.logprobs(BATCH), usual)
    if is_same and operator == "projections":
        pytest.skip("this processor's usual products have the bits of the aligned ones")
    assert not is_same


@pytest.mark.asyncio
@pytest.mark.engine
@pytest.mark.slow
async def test_an_engine_samples_what_it_is_told_with_the_operators_it_is_told(model):
    """Answers that no sampling would find; with other norms their logprobs are others, and with the usual ones again the first ones."""
    texts = [Text("English", 0, 1.0, number, (3 + number, 7), tuple(range(100 + number, 110 + number))) for number in range(2)]
    with switched_engines() as switch:
        engine = await RolloutEngine.start(model, engine_config("bfloat16"))
        try:
            usual = await sampled(engine, switch, texts)
            assert await sampled(engine, switch, texts, ("norms",)) != usual
            assert await sampled(engine, switch, texts) == usual
        finally:
            await engine.shutdown()
    assert max(max(row) for row in usual) < math.log(0.1)
