"""Two and four real ranks on gloo do what one does. Ranks are processes of their own, for which rank functions stand at module level."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct, defer
from evenkeel.correction.errors import ConfigError
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.model import build
from evenkeel.learner.model_fit import check_model
from evenkeel.learner.weights import checkpoint
from evenkeel.learner.weights.checkpoint import is_complete
from tests.learner.learner_cases import (
    TIS,
    VOCAB,
    exported_by,
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


def routed(learner: LearnerRank, batch: PackedBatch) -> PackedBatch:
    """With the learner's own routing, put together from all ranks, where that is to be replayed."""
    return replace(batch, routed_experts=learner.proximal(batch).routed_experts)


def three_steps(learner: LearnerRank) -> dict[str, Any]:
    """A staged, a deferred and a tiny batch: 24, 23 and 1 sequences. Then 3 groups, of which two ranks must split one."""
    staged = correct(routed(learner, off_policy_batch(learner, seed=0)), TIS)
    results = [learner.step(staged, TIS, step=0)]
    odd = random_batch(1)
    odd = routed(learner, odd.select(range(1, odd.num_sequences)))
    results.append(learner.step(defer(odd, TIS), TIS, step=1))
    results.append(learner.step(correct(routed(learner, off_policy_batch(learner, seed=2)), TIS).select([3]), TIS, step=2))
    groups = grouped_batch([([14, 14, 9, 14], [9, 4, 6, 12]), ([20] * 4, [5, 1, 8, 7]), ([17] * 4, [6, 6, 6, 6])])
    results.append(learner.step(defer(routed(learner, groups), TIS), TIS, step=3))
    return {
        "numbers": [
            (r.loss, r.grad_norm, r.entropy, r.optimizer_steps, r.routing_agreement or 0.0, *r.metrics.values(), *r.group_norms.values())
            for r in results
        ],
        "logprobs": [r.target_logprobs for r in results],
        "microbatches": [r.microbatches for r in results],
        "weights": weights(learner),
    }


def elements(learner: LearnerRank) -> tuple[int, int]:
    """Of the weights, and of Adam's averages, on this rank."""
    parameters = [parameter for policy in learner._policies for parameter in policy.parameters()]
    states = [learner.optimizer.state_of(parameter)[1] for parameter in parameters]
    averages = sum(value.numel() for state in states for kind, value in state.items() if kind != "step")
    return sum(parameter.numel() for parameter in parameters), averages


def two_more_norms(learner: LearnerRank) -> list[float]:
    batches = ((seed, routed(learner, off_policy_batch(learner, seed=seed))) for seed in (4, 5))
    return [learner.step(correct(batch, TIS), TIS, step=seed).grad_norm for seed, batch in batches]


def all_on_a_rank(rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any]) -> dict[str, Any]:
    """Some steps from the folder; then some from the one rank's checkpoint, which is saved again by these ranks."""
    learner = LearnerRank(LearnerConfig(**split, **SETTINGS), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = three_steps(learner)
    learner.save_hf(folder.parent / "saved")
    found["held"] = elements(learner)
    learner.load(folder)
    learner.restore(folder.parent / "one")
    learner.save(folder.parent / "other")
    found["norms"] = two_more_norms(learner)
    learner.close()
    return found


SEQUENCE_PARALLEL: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
DISTRIBUTED_OPTIMIZER: dict[str, Any] = {"data_parallel": 2, "distributed_optimizer": True}
PIPELINE: dict[str, Any] = {"pipeline_parallel": 2}
EXPERTS: dict[str, Any] = {"data_parallel": 2, "expert_parallel": 2, "routing_replay": "recompute"}
"""Of a mixture of experts."""
INTERLEAVED: dict[str, Any] = {"pipeline_parallel": 2, "virtual_pipeline": 2}
WHOLE_EXPERTS: dict[str, Any] = SEQUENCE_PARALLEL | {"expert_parallel": 1, "routing_replay": "recompute"}
"""Of a mixture whose tensor-parallel ranks each have all experts, and rows of their own for them."""
LAYOUTS: list[tuple[dict[str, Any], bool]] = [
    (DISTRIBUTED_OPTIMIZER, True),
    (SEQUENCE_PARALLEL, False),
    (INTERLEAVED, True),
    (EXPERTS, False),
    (WHOLE_EXPERTS, False),
]
SLOW_LAYOUTS: list[tuple[dict[str, Any], bool]] = [
    ({"data_parallel": 2}, True),
    ({"tensor_parallel": 2}, True),
    (PIPELINE, True),
    (PIPELINE, False),
    ({"data_parallel": 2, "tensor_parallel": 2}, True),
    (DISTRIBUTED_OPTIMIZER | EXPERTS, False),
    (EXPERTS | {"data_parallel": 4}, False),
    (DISTRIBUTED_OPTIMIZER | PIPELINE, True),
    (SEQUENCE_PARALLEL | PIPELINE, True),
    (DISTRIBUTED_OPTIMIZER | PIPELINE | {"dtype": "bfloat16"}, True),
    (DISTRIBUTED_OPTIMIZER | PIPELINE | {"dtype": "float16"}, True),
    ({"tensor_parallel": 2, "dtype": "float16"}, True),
    (DISTRIBUTED_OPTIMIZER | INTERLEAVED, False),
    ({"pipeline_parallel": 4, "virtual_pipeline": 2}, True),
    (SEQUENCE_PARALLEL | {"expert_parallel": 2, "routing_replay": "recompute"}, False),
    (SEQUENCE_PARALLEL | DISTRIBUTED_OPTIMIZER | EXPERTS, False),
    (PIPELINE | EXPERTS, False),
    (WHOLE_EXPERTS | {"distributed_optimizer": True}, False),
    (WHOLE_EXPERTS | DISTRIBUTED_OPTIMIZER, False),
    (INTERLEAVED | DISTRIBUTED_OPTIMIZER | EXPERTS | {"recompute_activations": True}, False),
]


def alone(split: dict[str, Any]) -> dict[str, Any]:
    """What of a layout's settings one rank has, too."""
    return {name: split[name] for name in ("dtype", "routing_replay") if name in split}


@dataclass(frozen=True, slots=True)
class Compared:
    """What one rank found, and what several did."""

    folder: Path
    split: dict[str, Any]
    one: dict[str, Any]
    every: list[dict[str, Any]]


@pytest.fixture(scope="module", params=[*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW_LAYOUTS)], ids=str)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """Of a model whose vocabulary of 97 has to be padded for two tensor-parallel ranks."""
    (split, tie), place = request.param, tmp_path_factory.mktemp("ranks")
    family = "qwen3_moe" if "expert_parallel" in split else "qwen3"
    layers = split.get("virtual_pipeline", 1) * split.get("pipeline_parallel", 2)
    folder = save_model(place / "m", family, tie=tie, vocab_size=VOCAB + 1, num_hidden_layers=layers)
    with learner_on(folder, **alone(split), **SETTINGS) as learner:
        one = three_steps(learner)
        one["held"] = elements(learner)
        learner.save(place / "one")
        one["norms"] = two_more_norms(learner)
    return Compared(place, split, one, run_ranks(all_on_a_rank, folder, split, ranks=LearnerConfig(**split).world_size))


def test_several_ranks_equal_one(compared: Compared) -> None:
    """Losses, norms and metrics to 1e-5 relative; every rank has the complete result.

    Logprobs of later steps and weights are held to 1e-4: Adam's first updates divide rounding noise by itself where a gradient is tiny.
    Micro-batches of an odd number of rows are filled up for sequence parallelism; a tied embedding has two copies in a pipeline.
    """
    one, split, every = compared.one, compared.split, compared.every
    is_half = "dtype" in split  # of which only the bits are compared between ranks
    for rank, found in enumerate(every):
        for ours, theirs in zip(found["numbers"], one["numbers"], strict=True):
            assert is_half or ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        for ours, theirs in zip(found["logprobs"], one["logprobs"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0.2 if is_half else 1e-4)
        own = {name: one["weights"][name] for name in exported_by(rank, one["weights"], split)}
        assert found["weights"].keys() == own.keys() and (is_half or largest_difference(found["weights"], own) < 1e-4)
        assert found["numbers"] == every[0]["numbers"]
        assert all(torch.equal(found["weights"][name], every[0]["weights"][name]) for name in own)
        halves = [1, 1, 1, 1] if split.get("data_parallel") == 4 else [2, 2, 1, 1]  # 1 where one rank's is blank
        passes = halves if "data_parallel" in split else one["microbatches"]
        multiple = split["pipeline_parallel"] if "virtual_pipeline" in split else 1
        assert found["microbatches"] == [count + -count % multiple for count in passes]
        assert multiple == 1 or any(count % multiple for count in passes), "none had to be filled up"
    with learner_on(compared.folder / "saved", **alone(split)) as learner:
        assert all(torch.equal(tensor, every[0]["weights"][name]) for name, tensor in weights(learner).items())


def test_no_rank_holds_all(compared: Compared) -> None:
    """Parts of the model do not add up to more than it, but for norms on tensor-parallel ranks, a tied embedding's copy, and experts that
    each rank has: five in seven of a mixture's weights, whose optimizer is divided over all of its ranks."""
    (model, averages), split = compared.one["held"], compared.split
    has_whole_experts = split.get("expert_parallel") == 1
    parts = split.get("tensor_parallel", 1) * split.get("pipeline_parallel", 1)
    for found in compared.every:
        assert found["held"][0] < (0.9 * model if has_whole_experts else 1.3 * model / parts)
    shared = parts * (split.get("data_parallel", 1) if "distributed_optimizer" in split else 1)
    if has_whole_experts and "distributed_optimizer" not in split:
        shared = 1
    assert max(found["held"][1] for found in compared.every) < 1.3 * averages / shared


def test_a_checkpoint_goes_over_to_another_layout_and_back(compared: Compared) -> None:
    """Saved by one rank, by several and by one again, every tensor is the same; and several ranks go on as one does."""
    place, half = compared.folder, "dtype" in compared.split
    for found in compared.every:
        assert found["norms"] == pytest.approx(compared.one["norms"], rel=0.05 if half else 1e-5)
    with learner_on(place / "m", **alone(compared.split), **SETTINGS) as learner:
        learner.restore(place / "other")
        learner.save(place / "back")
        assert two_more_norms(learner) == compared.one["norms"]
    one, back = (load_file(place / name / "rank-0.safetensors") for name in ("one", "back"))
    assert {name.split("/")[0] for name in one} == {"weight", "exp_avg", "exp_avg_sq", "step", *(["master"] if half else [])}
    assert one.keys() == back.keys() and all(torch.equal(one[name], back[name]) for name in one)


def balanced_norm(learner: LearnerRank) -> float:
    """Of a batch with an even number of rows, so that none has to be filled up."""
    batch = grouped_batch([([20] * 4, [5, 2, 8, 7])])
    batch = replace(batch, behavior_logprobs=learner.logprobs(batch), proximal_logprobs=learner.logprobs(batch))
    return learner.step(correct(batch, TIS), TIS, step=0).grad_norm


def balanced_on_a_rank(rank: int, ranks: int, port: int, folder: Path, settings: dict[str, Any]) -> float:
    learner = LearnerRank(LearnerConfig(**SEQUENCE_PARALLEL, expert_parallel=2, **settings), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    norm = balanced_norm(learner)
    learner.close()
    return norm


def test_balancing_loss_where_tensor_ranks_share_rows(tmp_path: Path) -> None:
    """Megatron multiplies it by the rows of a router, of which each of two ranks has half: its weight must not halve with them."""
    folder = save_model(tmp_path / "m", "qwen3_moe")
    norms = {}
    for coefficient in (0.0, 0.3):
        with learner_on(folder, moe_aux_loss_coefficient=coefficient, **SETTINGS) as learner:
            norms[coefficient] = balanced_norm(learner)
    assert norms[0.3] > 1.05 * norms[0.0]
    found = run_ranks(balanced_on_a_rank, folder, {"moe_aux_loss_coefficient": 0.3, **SETTINGS})
    assert found == pytest.approx([norms[0.3]] * 2, rel=1e-5)


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
    return {"loss": result.loss, "norm": result.grad_norm, "clipped": result.metrics["clip_share"], "weights": weights(learner)}


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


def ten_steps_then_killed(rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any]) -> None:
    """A save is begun after five steps, and written during the others. A second one is in the middle of its writing when SIGKILL comes."""
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


def five_more_steps(rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any]) -> dict[str, Any]:
    learner = LearnerRank(LearnerConfig(**split, **RESUMED), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    learner.restore(folder.parent / "five")
    found = steps_with_number(learner, 5, 10)
    learner.save(folder.parent / "ten")  # over what the kill has left
    learner.close()
    return found


@pytest.mark.parametrize("split", [DISTRIBUTED_OPTIMIZER, pytest.param(SEQUENCE_PARALLEL, marks=pytest.mark.slow)], ids=str)
def test_ten_steps_are_five_a_kill_and_five(tmp_path: Path, split: dict[str, Any]) -> None:
    """Bit for bit, the generators of every rank included; and the kill in the middle of a save leaves the earlier checkpoint loadable."""
    folder = save_model(tmp_path / "m")
    run_ranks_until_killed(ten_steps_then_killed, folder, split)
    assert is_complete(tmp_path / "five") and not is_complete(tmp_path / "ten")
    assert len(list((tmp_path / "ten").glob(".rank-*.partial"))) == 2  # it was under way
    both = run_ranks(five_more_steps, folder, split)
    assert both == [torch.load(tmp_path / f"found-{rank}.pt") for rank in range(2)]
    assert both[0]["random"] != both[1]["random"]
    assert is_complete(tmp_path / "ten") and not list((tmp_path / "ten").glob(".*"))


def test_a_learner_that_is_closed_leaves_no_threads(tmp_path: Path) -> None:
    """Each of Megatron's groups has some of gloo's, which poll: a hundred learners' would take a core."""
    folder, threads = save_model(tmp_path / "m"), []
    for _ in range(4):
        learner = LearnerRank(LearnerConfig())
        learner.load(folder)
        learner.close()
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[3] <= threads[1], threads  # the first one may find a group that is still in use


def test_a_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 ranks, but 1"):
        LearnerRank(LearnerConfig(data_parallel=2))


def test_layouts_that_are_not_built_are_refused_by_name(tmp_path: Path) -> None:
    assert LearnerConfig.model_validate({"context_parallel": 1}) == LearnerConfig()
    for settings, reason in (
        ({"context_parallel": 2}, "context_parallel = 2: .*packed sequences"),
        ({"sequence_parallel": True}, "tensor_parallel = 1"),
        ({"virtual_pipeline": 2}, "virtual_pipeline = 2 with pipeline_parallel = 1"),
        ({"expert_parallel": 2, "pipeline_parallel": 2}, "expert_parallel = 2 must divide data_parallel x tensor_parallel = 1 x 1"),
    ):
        with pytest.raises(ValidationError, match=reason):
            LearnerConfig.model_validate(settings)
    with learner_on(save_model(tmp_path / "m")) as learner:
        state, two = learner._require(), replace(learner.placement, pipeline_parallel=2)
        with pytest.raises(ConfigError, match=r"pipeline_parallel x virtual_pipeline = 4 doesn't divide the model's 2 layers"):
            build(state.hf_config, LearnerConfig(dtype="float32", pipeline_parallel=2, virtual_pipeline=2), two)
        for batch_invariant in (True, False):  # 4 query heads over 2 key heads, intermediate size 48
            with pytest.raises(ConfigError, match=r"tensor_parallel = 3: num_attention_heads = 4, num_key_value_heads = 2 in .* divisor"):
                three = LearnerConfig(dtype="float32", tensor_parallel=3, batch_invariant=batch_invariant)
                build(state.hf_config, three, replace(two, tensor_parallel=3))
        with pytest.raises(ConfigError, match=r"tensor_parallel = 2: intermediate_size = 49 in"):
            check_model(LearnerConfig(tensor_parallel=2), SimpleNamespace(**state.hf_config.to_dict() | {"intermediate_size": 49}))
        check_model(LearnerConfig(tensor_parallel=2), SimpleNamespace(num_attention_heads=4))  # another family, refused as that
    with learner_on(save_model(tmp_path / "moe", "qwen3_moe")) as learner:
        halves = replace(learner.placement, tensor_parallel=2)
        with pytest.raises(ConfigError, match=r"tensor_parallel = 2 without sequence_parallel: qwen3_moe has 8 experts"):
            build(learner._require().hf_config, LearnerConfig(dtype="float32", tensor_parallel=2), halves)
