"""Tokens from a part of the vocabulary, sampled by the real SGLang and trained by the real Megatron: no ratio is biased.

Fast: at equal weights, with the kept sets and without, and where the engine rounds to bfloat16. Slow: a run whose tokens all come from kept
sets learns, and goes on after it was stopped.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct
from evenkeel.correction.diagnostics.diagnose import diagnose
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.config import WHOLE_VOCABULARY, EnvironmentConfig, EnvironmentReward, SamplingConfig, TrainOverlong, Truncation
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Group, Prompt, UnfinishedGroup
from tests.conftest import BackgroundLoop
from tests.e2e.launch import ROOT, Run, evenkeel
from tests.e2e.on_policy_cases import Sampled, as_batch
from tests.rollout.engine_scene import prompts

pytestmark = pytest.mark.engine
TOPK = CorrectionConfig(preset="dppo-topk-kl", topk=5)
HALF = 20
"""Steps after which the run is stopped, of 40."""


@pytest.fixture(scope="module")
def learner(tiny_model: Path) -> Iterator[LearnerRank]:
    learner = LearnerRank(LearnerConfig(device="cpu", learning_rate=1e-3))
    learner.load(tiny_model)
    yield learner
    learner.close()


def sampled_by(engine: RolloutEngine, loop: BackgroundLoop, truncation: Truncation) -> PackedBatch:
    """60 answers of 60 tokens."""
    asked = prompts(4, 9, seed=2)
    ask = {"max_tokens": 60, "temperature": 0.5, "samples": 15, "seeds": range(15), "topk": TOPK.topk, "ignore_stop": True}
    answers = [(ids, loop.run(engine.generate(ids, truncation=truncation, **ask))) for ids in asked]  # type: ignore[arg-type]
    found = [Sampled(tuple(ids), one) for ids, of_prompt in answers for one in of_prompt]
    batch = as_batch(found, temperature=0.5, version=engine.version)
    mask = batch.loss_mask
    ids, logprobs = torch.zeros(batch.num_tokens, TOPK.topk, dtype=torch.int64), torch.zeros(batch.num_tokens, TOPK.topk)
    tops = [one.completion.top_logprobs for one in found]
    ids[mask] = torch.tensor([token for top in tops if top for token in top.ids]).view(-1, TOPK.topk)
    logprobs[mask] = torch.tensor([value for top in tops if top for value in top.logprobs]).view(-1, TOPK.topk)
    return replace(batch, topk_ids=ids, topk_logprobs=logprobs).validate()


def numbers_of(batch: PackedBatch, proximal: Tensor) -> dict[str, float]:
    corrected = correct(replace(batch, proximal_logprobs=proximal), CorrectionConfig())
    return diagnose(corrected.batch, corrected, proximal)


def test_mean_rho_is_1_and_k3_is_rounding_at_equal_weights(
    shared_engine: RolloutEngine, engine_loop: BackgroundLoop, learner: LearnerRank
) -> None:
    """At top-p 0.8 and top-k 20, with sets of less than a twentieth of 512 tokens on average; without the sets, mean rho is their mean
    probability, far from 1."""
    whole = sampled_by(shared_engine, engine_loop, WHOLE_VOCABULARY)
    cut = sampled_by(shared_engine, engine_loop, Truncation(top_p=0.8, top_k=20))
    assert cut.kept_counts is not None
    assert 5 < float(cut.kept_counts[cut.loss_mask].float().mean()) < 0.05 * 512
    k3_of = {}
    for name, batch in (("whole", whole), ("cut", cut)):
        found = numbers_of(batch, learner.logprobs(batch))
        assert abs(found["rho_mean"] - 1) < max(3 * found["rho_mean_error"], 1e-6)
        k3_of[name] = found["k3_kl"]
    assert 0 < k3_of["cut"] < 2 * k3_of["whole"] < 1e-10
    biased = numbers_of(cut, learner.logprobs(replace(cut, kept_counts=None, kept_ids=None)))
    assert biased["rho_mean"] < 0.9 and biased["rho_mean_deviation"] > 5


@pytest.mark.slow
def test_mean_rho_is_1_within_its_error_where_the_engine_rounds_to_bfloat16(
    tiny_model: Path, engine_loop: BackgroundLoop, learner: LearnerRank
) -> None:
    """A mismatch as real runs have it: k3 is some 1e-4, and no larger from kept sets than from the whole vocabulary. It needs an engine of
    its own; the fast suite has float32's, above."""
    config = EngineConfig(device="cpu", dtype="bfloat16", max_total_tokens=65_536, max_running_requests=64)
    engine = engine_loop.run(RolloutEngine.start(tiny_model, config, name="bfloat16 engine"))
    try:
        whole, cut = (sampled_by(engine, engine_loop, one) for one in (WHOLE_VOCABULARY, Truncation(top_p=0.8, top_k=20)))
    finally:
        engine_loop.run(engine.shutdown())
    of_whole, of_cut = (numbers_of(batch, learner.logprobs(batch)) for batch in (whole, cut))
    biased = numbers_of(cut, learner.logprobs(replace(cut, kept_counts=None, kept_ids=None)))
    for found in (of_whole, of_cut):
        assert abs(found["rho_mean"] - 1) < 3 * found["rho_mean_error"] < 3e-3
    assert 1e-4 < of_cut["k3_kl"] < 1.5 * of_whole["k3_kl"] < 3e-3
    assert biased["rho_mean"] < 0.8 and 1 - biased["rho_mean"] > 100 * biased["rho_mean_error"]


def test_top_k_divergences_are_of_the_kept_sets(shared_engine: RolloutEngine, engine_loop: BackgroundLoop, learner: LearnerRank) -> None:
    """On equal weights all of them are 0, also where a set has fewer tokens than K; so a tight gate blocks nothing."""
    batch = sampled_by(shared_engine, engine_loop, Truncation(top_p=0.3))
    assert batch.kept_counts is not None and int((batch.kept_counts[batch.loss_mask] < TOPK.topk).sum()) > 100
    tight = CorrectionConfig(preset="dppo-topk-kl", topk=5, objective={"gate": {"threshold": 1e-4}})
    corrected = correct(batch, tight)
    result = learner.step(corrected, tight, step=0)
    assert result.metrics["clip_share"] == 0.0 and result.grad_norm > 0
    without = replace(corrected, batch=replace(batch, kept_counts=None, kept_ids=None))
    assert learner.step(without, tight, step=1).metrics["clip_share"] > 0.2


TWO_TURNS = """
class Two:
    async def reset(self, task): return task["prompt"]
    async def step(self, turn): return f"{len(turn.token_ids)} + 1 = ", float(turn.number), turn.number == 1
"""


def test_kept_sets_of_two_turns_reach_the_learner(
    shared_engine: RolloutEngine,
    engine_loop: BackgroundLoop,
    learner: LearnerRank,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of groups played in an environment at top-p 0.9: each token of either turn has the set that it was drawn from, with itself in it, and
    what was read between has none. Mean rho is 1 in both turns; without the sets in neither."""
    learner.load(tiny_model)  # another test has had it take a step
    (tmp_path / "two_turns.py").write_text(TWO_TURNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    broken = [token for token in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])]
    encoder = ChatEncoder(tokenizer, configured={"generation_config.json": broken[::2]})  # so that turns are short
    settings = SamplingConfig(samples_per_group=8, max_tokens=600, top_p=0.9)

    async def play() -> list[Group | UnfinishedGroup]:
        pool = EnvironmentPool(EnvironmentConfig(path="two_turns:Two", processes=1))
        sampler = Sampler(shared_engine, {"": Player(encoder, RewardPool(EnvironmentReward()), settings, environments=pool)}, seed=7)
        asked = [Prompt(f"train/0/{number}", f"{number} + 4 = ", (1,), "") for number in range(8)]
        try:
            return await asyncio.gather(*(sampler.group(p, group_id=i, admitted_version=0) for i, p in enumerate(asked)))
        finally:
            await pool.close()

    groups = [group for group in engine_loop.run(play()) if isinstance(group, Group)]
    answers = [one for group in groups for one in group.trajectories if one.is_valid]
    assert len(answers) == 64 and all(one.turns == 2 for one in answers)
    version, longest = shared_engine.version, {"": settings.max_tokens}
    batch = pack_groups(
        groups, learner_version=version, advantage=lambda rewards, _: rewards, overlong=TrainOverlong(), max_tokens=longest
    ).batch
    assert batch.kept_counts is not None and batch.kept_ids is not None and batch.turn_ids is not None
    assert int(batch.kept_counts[~batch.loss_mask].abs().sum()) == 0 < int(batch.kept_counts[batch.loss_mask].min())
    sets = batch.kept_ids.split(batch.kept_counts.tolist())
    assert all(int(batch.token_ids[place]) in sets[place].tolist() for place in batch.loss_mask.nonzero()[:, 0].tolist())
    without = replace(batch, kept_counts=None, kept_ids=None)
    found, biased = (numbers_of(one, learner.logprobs(one)) for one in (batch, without))
    assert abs(found["rho_mean"] - 1) < max(3 * found["rho_mean_error"], 1e-6) and found["k3_kl"] < 1e-10
    assert biased["rho_mean"] < 0.98 and biased["rho_mean_deviation"] > 5
    rho, rho_without = ((learner.logprobs(one) - one.behavior_logprobs).exp() for one in (batch, without))
    for turn in (0, 1):
        of_turn = batch.loss_mask & (batch.turn_ids == turn)
        assert int(of_turn.sum()) > 100
        assert float(rho[of_turn].mean()) == pytest.approx(1, abs=1e-5) and float(rho_without[of_turn].mean()) < 0.98


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_under_top_p_learns(tmp_path: Path) -> None:
    """The recipe of `make train` on smaller batches, with tokens from sets of a few of its 273 characters: more answers become right, and
    every batch's mean rho is 1 within 5 standard errors, at any staleness. After half of the steps it is stopped; what it goes on with was
    sampled before, and has its sets."""
    recipe, folder = str(ROOT / "recipes/nano_spell_backward.yaml"), tmp_path / "run"
    evenkeel("init-model", recipe, model := f"model={tmp_path / 'nano'}", timeout_s=1200)
    settings = [model, "rollout.sampling.top_p=0.9", "correction.preset=decoupled-ppo", "steps=40", "groups_per_step=48"]
    runs = [Run(folder, recipe, *settings, f"run_dir={folder}")]
    try:
        runs[0].wait_until(lambda: len(runs[0].metrics()) >= HALF, f"{HALF} steps", 1200)
        runs[0].interrupt()
        assert runs[0].wait(300) == 0, runs[0].output()[-4000:]
        checkpoint = RunFolder.view(folder).checkpoints()[-1]
        waiting = [answer for group in TrainingState.load(checkpoint.state).book.finished for answer in group.sequences]
        runs.append(Run(folder, "--resume", str(folder)))
        assert runs[1].wait(1800) == 0, runs[1].output()[-4000:]
        lines = runs[1].metrics()
    finally:
        for run in runs:
            run.close()
    assert waiting and all(answer.kept_tokens is not None and min(answer.kept_tokens.counts) > 0 for answer in waiting)
    assert [line["step"] for line in lines] == list(range(1, 41)) and HALF <= checkpoint.step < 40
    accuracy, kept = ([line[name] for line in lines] for name in ("reward/accuracy", "length/kept_set_tokens"))
    assert statistics.fmean(accuracy[-5:]) > statistics.fmean(accuracy[:5]) + 0.1
    assert min(kept) >= 1 and statistics.fmean(kept[-10:]) < 0.05 * 273
    for of_part in (lines[: checkpoint.step], lines[checkpoint.step :]):
        deviations = [line["correction/rho_mean_deviation"] for line in of_part if "correction/rho_mean_deviation" in line]
        assert len(deviations) >= len(of_part) // 2 and max(deviations) < 5
