"""Two and four real ranks on gloo do what one does. Ranks are fresh processes, for which rank functions stand at module level."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from correction.batch import PackedBatch
from correction.config import CorrectionConfig
from correction.correct import correct, defer
from correction.errors import ConfigError, DataError
from learner import checkpoint
from learner.checkpoint import is_complete
from learner.config import LearnerConfig
from learner.learner_rank import LearnerRank
from learner.model import build
from tests.learner.learner_cases import (
    TIS,
    VOCAB,
    grouped_batch,
    largest_difference,
    learner_on,
    off_policy_batch,
    poisoned,
    random_batch,
    run_ranks,
    run_ranks_until_killed,
    save_model,
    weights,
)

SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "clip_grad": 0.5, "tokens_per_microbatch": 150}
TOPK = CorrectionConfig(preset="dppo-topk-tv", topk=4, objective={"gate": {"threshold": 0.45}})
KEPT = TIS.model_copy(update={"denominator": TIS.denominator.model_copy(update={"count": "kept"})})


def three_steps(learner: LearnerRank) -> dict[str, Any]:
    """A staged, a deferred and a tiny batch: 24, 23 and 1 sequences. Then 3 groups, of which two ranks must split one."""
    staged = correct(off_policy_batch(learner, seed=0), TIS)
    results = [learner.step(staged, TIS, step=0)]
    odd = random_batch(1)
    odd = odd.select(range(1, odd.num_sequences))
    results.append(learner.step(defer(odd, TIS), TIS, step=1))
    results.append(learner.step(correct(off_policy_batch(learner, seed=2), TIS).select([3]), TIS, step=2))
    groups = grouped_batch([([14, 14, 9, 14], [9, 4, 6, 12]), ([20] * 4, [5, 1, 8, 7]), ([17] * 4, [6, 6, 6, 6])])
    results.append(learner.step(defer(groups, TIS), TIS, step=3))
    return {
        "numbers": [(r.loss, r.grad_norm, r.entropy, r.optimizer_steps, *r.metrics.values()) for r in results],
        "logprobs": [r.target_logprobs for r in results],
        "microbatches": [r.microbatches for r in results],
        "weights": weights(learner),
    }


def elements(learner: LearnerRank) -> tuple[int, int]:
    """Of the weights, and of Adam's averages, on this rank."""
    states = [learner._require().optimizer.state_of(parameter)[1] for parameter in learner._policy.parameters()]
    averages = sum(value.numel() for state in states for kind, value in state.items() if kind != "step")
    return sum(parameter.numel() for parameter in learner._policy.parameters()), averages


def steps_on_a_rank(rank: int, ranks: int, port: int, folder: Path, split: dict[str, int]) -> dict[str, Any]:
    learner = LearnerRank(LearnerConfig(**split, **SETTINGS), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = three_steps(learner)
    learner.save_hf(folder.parent / "saved")
    held = elements(learner)
    learner.close()
    return found | {"held": held}


SEQUENCE_PARALLEL = {"tensor_parallel": 2, "sequence_parallel": True}
DISTRIBUTED_OPTIMIZER = {"data_parallel": 2, "distributed_optimizer": True}
STEPPED: list[tuple[dict[str, int], bool]] = [
    ({"data_parallel": 2}, True),
    (DISTRIBUTED_OPTIMIZER, True),
    ({"tensor_parallel": 2}, False),
    (SEQUENCE_PARALLEL, True),
    ({"pipeline_parallel": 2}, True),
    ({"pipeline_parallel": 2}, False),
]
STEPPED_BY_FOUR: list[tuple[dict[str, int], bool]] = [
    ({"data_parallel": 2, "tensor_parallel": 2}, True),
    (DISTRIBUTED_OPTIMIZER | {"pipeline_parallel": 2}, True),
    (SEQUENCE_PARALLEL | {"pipeline_parallel": 2}, True),
]


@pytest.mark.parametrize(("split", "tie"), [*STEPPED, *(pytest.param(*one, marks=pytest.mark.slow) for one in STEPPED_BY_FOUR)], ids=str)
def test_several_ranks_equal_one(tmp_path: Path, split: dict[str, int], tie: bool) -> None:
    """Losses, norms and metrics to 1e-5 relative; every rank has the complete result.

    Logprobs of later steps and weights are held to 1e-4: Adam's first updates divide rounding noise by itself where a gradient is tiny.
    A tied embedding has two copies in a pipeline; a row count is odd and has to be filled up for sequence parallelism.
    """
    folder = save_model(tmp_path / "m", tie=tie)
    with learner_on(folder, **SETTINGS) as learner:
        one = three_steps(learner)
        weights_of_one, averages_of_one = elements(learner)
    every = run_ranks(steps_on_a_rank, folder, split, ranks=LearnerConfig(**split).world_size)
    for found in every:
        for ours, theirs in zip(found["numbers"], one["numbers"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        for ours, theirs in zip(found["logprobs"], one["logprobs"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        assert largest_difference(found["weights"], one["weights"]) < 1e-4
        assert found["numbers"] == every[0]["numbers"]
        assert all(torch.equal(found["weights"][name], every[0]["weights"][name]) for name in one["weights"])
        halves = [2, 2, 1, 1]  # 1 where one rank's is blank
        assert found["microbatches"] == (halves if "data_parallel" in split else one["microbatches"])
        held, averages = found["held"]
        assert (held == weights_of_one) if split.keys() <= {"data_parallel", "distributed_optimizer"} else (held < 0.8 * weights_of_one)
        assert averages == 2 * held or ("distributed_optimizer" in split and averages < 0.6 * averages_of_one)
    with learner_on(tmp_path / "saved") as learner:
        assert all(torch.equal(tensor, every[0]["weights"][name]) for name, tensor in weights(learner).items())


def topk_batch(learner: LearnerRank) -> PackedBatch:
    """K = 4 random ids, every other time with the sampled token among them, and random probabilities of up to 1/4 for them."""
    batch = off_policy_batch(learner)
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in range(batch.num_tokens)])
    ids[::2, 0] = batch.token_ids[::2]
    logprobs = (torch.rand(ids.shape, generator=generator) / 4).log()
    return replace(batch, proximal_logprobs=None, topk_ids=ids, topk_logprobs=logprobs)


def topk_step(learner: LearnerRank) -> dict[str, Any]:
    batch = topk_batch(learner)
    result = learner.step(correct(batch, TOPK), TOPK, step=0)
    return {"loss": result.loss, "norm": result.grad_norm, "clipped": result.metrics["clip_fraction"], "weights": weights(learner)}


def topk_on_a_rank(rank: int, ranks: int, port: int, folder: Path, split: str) -> dict[str, Any]:
    learner = LearnerRank(LearnerConfig(**{split: ranks}, **SETTINGS), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = topk_step(learner)
    learner.close()
    return found


def test_top_k_lookup_split_over_the_vocabulary(tmp_path: Path) -> None:
    """The ids of one token lie on both ranks; which tokens the trust region blocks depends on all of them."""
    folder = save_model(tmp_path / "m", tie=False)
    with learner_on(folder, **SETTINGS) as learner:
        one = topk_step(learner)
    assert 0.02 < one["clipped"] < 0.9, "the gate must block some tokens and not all"
    for found in run_ranks(topk_on_a_rank, folder, "tensor_parallel"):
        for name in ("loss", "norm", "clipped"):
            assert found[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7)
        assert largest_difference(found["weights"], one["weights"]) < 1e-4


def poisoned_step(rank: int, ranks: int, port: int, folder: Path) -> tuple[int, bool]:
    learner = LearnerRank(LearnerConfig(data_parallel=ranks, **SETTINGS), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    before = weights(learner)
    result = learner.step(poisoned(correct(off_policy_batch(learner), TIS), float("inf")), TIS, step=0)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())
    learner.close()
    return result.skipped_steps, unchanged


def test_ranks_skip_together(tmp_path: Path) -> None:
    """The poisoned token is on one rank; neither moves."""
    assert run_ranks(poisoned_step, save_model(tmp_path / "m")) == [(1, True), (1, True)]


RESUMED: dict[str, Any] = {"warmup_steps": 8, **SETTINGS}


def steps_with_number(learner: LearnerRank, first: int, last: int) -> dict[str, Any]:
    norms = [learner.step(correct(off_policy_batch(learner, seed=step), TIS), TIS, step=step).grad_norm for step in range(first, last)]
    return {"norms": norms, "checksums": learner.weight_checksums(), "random": [torch.rand(3).tolist(), random.random()]}


def ten_steps_then_killed(rank: int, ranks: int, port: int, folder: Path, split: dict[str, int]) -> None:
    """A save is begun after five steps, and written beside the others. A second one is in the middle of its writing when SIGKILL comes."""
    learner = LearnerRank(LearnerConfig(**split, **RESUMED, seed=rank + 1), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    steps_with_number(learner, 0, 5)
    learner.begin_save(folder.parent / "five")
    torch.save(steps_with_number(learner, 5, 10), folder.parent / f"found-{rank}.pt")
    assert learner.is_saved(wait=True)

    def write_half(path: Path, fill: Any) -> None:
        path.with_name(f".{path.name}.partial").write_bytes(b"half")
        threading.Event().wait()

    checkpoint._write = write_half
    learner.begin_save(folder.parent / "ten")
    steps_with_number(learner, 10, 11)
    assert not learner.is_saved()
    learner.placement.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def five_more_steps(rank: int, ranks: int, port: int, folder: Path, split: dict[str, int]) -> dict[str, Any]:
    learner = LearnerRank(LearnerConfig(**split, **RESUMED), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    learner.restore(folder.parent / "five")
    found = steps_with_number(learner, 5, 10)
    learner.save(folder.parent / "ten")  # over what the kill has left
    learner.close()
    return found


@pytest.mark.parametrize("split", [DISTRIBUTED_OPTIMIZER, SEQUENCE_PARALLEL], ids=str)
def test_ten_steps_are_five_a_kill_and_five(tmp_path: Path, split: dict[str, int]) -> None:
    """Bit for bit, the generators of every rank included; and the kill in the middle of a save leaves the earlier checkpoint loadable."""
    folder = save_model(tmp_path / "m")
    run_ranks_until_killed(ten_steps_then_killed, folder, split)
    assert is_complete(tmp_path / "five") and not is_complete(tmp_path / "ten")
    assert len(list((tmp_path / "ten").glob(".rank-*.partial"))) == 2  # it was under way
    both = run_ranks(five_more_steps, folder, split)
    assert both == [torch.load(tmp_path / f"found-{rank}.pt") for rank in range(2)]
    assert both[0]["random"] != both[1]["random"]
    assert is_complete(tmp_path / "ten") and not list((tmp_path / "ten").glob(".*"))


def save_again(rank: int, ranks: int, port: int, folder: Path, source: Path, target: Path, split: dict[str, int]) -> list[float]:
    learner = LearnerRank(LearnerConfig(**split, **RESUMED), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    learner.restore(source)
    learner.save(target)
    norms: list[float] = steps_with_number(learner, 3, 5)["norms"]
    learner.close()
    return norms


PIPELINE_AND_TENSOR = pytest.param({"tensor_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "split", [{"tensor_parallel": 2}, {"data_parallel": 2}, DISTRIBUTED_OPTIMIZER, {"pipeline_parallel": 2}, PIPELINE_AND_TENSOR], ids=str
)
def test_a_checkpoint_goes_over_to_another_layout_and_back(tmp_path: Path, split: dict[str, int]) -> None:
    """Saved by one rank, by several and by one again, every tensor is the same; a vocabulary of 97 is padded in between.

    In each layout training goes on alike.
    """
    folder = save_model(tmp_path / "m", tie=False, vocab_size=VOCAB + 1)
    with learner_on(folder, **RESUMED) as learner:
        steps_with_number(learner, 0, 3)
        learner.save(tmp_path / "one")
        norms = steps_with_number(learner, 3, 5)["norms"]
    for found in run_ranks(save_again, folder, tmp_path / "one", tmp_path / "other", split, ranks=LearnerConfig(**split).world_size):
        assert found == pytest.approx(norms, rel=1e-5)
    with learner_on(folder, **RESUMED) as learner:
        learner.restore(tmp_path / "other")
        learner.save(tmp_path / "back")
        assert steps_with_number(learner, 3, 5)["norms"] == norms
    one, back = (load_file(tmp_path / name / "rank-0.safetensors") for name in ("one", "back"))
    assert {name.split("/")[0] for name in one} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert one.keys() == back.keys() and all(torch.equal(one[name], back[name]) for name in one)


def test_a_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 ranks, but 1"):
        LearnerRank(LearnerConfig(data_parallel=2))


def test_layouts_that_are_not_built_are_refused_by_name(tmp_path: Path) -> None:
    assert LearnerConfig.model_validate({"context_parallel": 1, "virtual_pipeline": None}) == LearnerConfig()
    for name, reason in (("context_parallel", "packed sequences"), ("virtual_pipeline", "interleaved")):
        with pytest.raises(ValidationError, match=f"{name} = 2: .*{reason}"):
            LearnerConfig.model_validate({name: 2})
    with pytest.raises(ValidationError, match="tensor_parallel = 1"):
        LearnerConfig(sequence_parallel=True)
    with learner_on(save_model(tmp_path / "m")) as learner:
        stages = replace(learner.placement, pipeline_parallel=3)
        with pytest.raises(DataError, match="2 layers can't be cut"):
            build(learner._require().hf_config, learner.config, stages)
