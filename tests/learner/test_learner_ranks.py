"""Two real ranks on gloo do what one does. Each test's ranks are fresh processes; rank functions stand at module level for that."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from correction.batch import PackedBatch
from correction.config import CorrectionConfig
from correction.correct import correct, defer
from correction.errors import ConfigError
from learner.checkpoint import is_complete
from learner.config import LearnerConfig
from learner.learner_rank import LearnerRank
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


def steps_on_a_rank(rank: int, ranks: int, port: int, folder: Path, split: str) -> dict[str, Any]:
    learner = LearnerRank(LearnerConfig(**{split: ranks}, **SETTINGS), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = three_steps(learner)
    learner.save_hf(folder.parent / "saved")
    learner.close()
    return found


@pytest.mark.parametrize("split", ["data_parallel", "tensor_parallel"])
def test_two_ranks_equal_one(tmp_path: Path, split: str) -> None:
    """Losses, norms and metrics to 1e-5 relative; every rank has the complete result.

    Logprobs of later steps and weights are held to 1e-4: Adam's first updates divide rounding noise by itself where a gradient is tiny.
    """
    folder = save_model(tmp_path / "m", tie=split == "data_parallel")
    with learner_on(folder, **SETTINGS) as learner:
        one = three_steps(learner)
    both = run_ranks(steps_on_a_rank, folder, split)
    for found in both:
        for ours, theirs in zip(found["numbers"], one["numbers"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        for ours, theirs in zip(found["logprobs"], one["logprobs"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        assert largest_difference(found["weights"], one["weights"]) < 1e-4
    assert both[0]["numbers"] == both[1]["numbers"]
    assert all(torch.equal(both[0]["weights"][name], both[1]["weights"][name]) for name in one["weights"])
    assert both[0]["microbatches"] == ([2, 2, 1, 1] if split == "data_parallel" else one["microbatches"])  # half each; 1 where one is blank
    with learner_on(tmp_path / "saved") as learner:
        assert all(torch.equal(tensor, both[0]["weights"][name]) for name, tensor in weights(learner).items())


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
    return {"norms": norms, "checksums": learner.weight_checksums(), "random": torch.rand(3).tolist()}


def save_and_go_on_twice(rank: int, ranks: int, port: int, folder: Path, checkpoint: Path) -> list[dict[str, Any]]:
    """Steps 2 and 3 after a save, and again after a fresh model was restored from it."""
    learner = LearnerRank(LearnerConfig(data_parallel=ranks, **RESUMED), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    steps_with_number(learner, 0, 2)
    learner.save(checkpoint)
    first = steps_with_number(learner, 2, 4)
    learner.load(folder)
    learner.restore(checkpoint)
    second = steps_with_number(learner, 2, 4)
    learner.close()
    return [first, second]


def test_resume_on_two_ranks_is_exact(tmp_path: Path) -> None:
    folder, checkpoint = save_model(tmp_path / "m"), tmp_path / "c"
    both = run_ranks(save_and_go_on_twice, folder, checkpoint)
    assert all(first == second for first, second in both)
    assert both[0][0]["norms"] == both[1][0]["norms"] and both[0][0]["checksums"] == both[1][0]["checksums"]
    with learner_on(folder, **RESUMED) as learner:  # on another number of data ranks: equal but for rounding
        learner.restore(checkpoint)
        assert steps_with_number(learner, 2, 4)["norms"] == pytest.approx(both[0][0]["norms"], rel=1e-5)


def save_and_die(rank: int, ranks: int, port: int, folder: Path, target: Path) -> None:
    """Killed by SIGKILL when the weights are written, but nothing is published."""
    import learner.checkpoint as module

    learner = LearnerRank(LearnerConfig(**SETTINGS))
    learner.load(folder)
    learner.save(target / "step-1")
    write = module._write

    def write_then_die(path: Path, content: Any) -> None:
        write(path, content)
        os.kill(os.getpid(), signal.SIGKILL)

    module._write = write_then_die
    learner.save(target / "step-2")


def test_a_kill_in_the_middle_of_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    import multiprocessing as mp

    folder = save_model(tmp_path / "m")
    process = mp.get_context("spawn").Process(target=save_and_die, args=(0, 1, 0, folder, tmp_path))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert is_complete(tmp_path / "step-1") and not (tmp_path / "step-2").exists()
    assert list(tmp_path.glob(".step-2.partial/model-*"))  # it was under way
    with learner_on(folder, **SETTINGS) as learner:
        learner.restore(tmp_path / "step-1")
        learner.save(tmp_path / "step-2")  # over the remains
    assert is_complete(tmp_path / "step-2") and not list(tmp_path.glob(".*.partial"))


def test_a_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 ranks, but 1"):
        LearnerRank(LearnerConfig(data_parallel=2))
