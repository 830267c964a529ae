"""A rank on a GPU, in the type and by the kernels that a run has there: numbers against float32 on a CPU, memory against the plan.

These need a GPU, and are skipped without one: `python -m pytest -m slow tests/on_a_gpu`.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.correction.batch import CorrectedBatch
from evenkeel.correction.correct import defer
from evenkeel.engines.weights import tensor_checksum
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.weights.export import Staging
from evenkeel.plan.memory import rank_memory
from evenkeel.plan.shape import ModelShape
from tests.learner.learner_cases import TIS, gradients, grouped_batch, hf_model, hf_values, learner_on, random_batch, save_model
from tests.learner.moe_cases import save_moe
from tests.learner.test_learner_checkpoint import SETTINGS, train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE: Literal["cuda", "cpu"] = "cuda"
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2}
MIB = 2**20


def save(folder: Path, family: str) -> Path:
    return save_model(folder, family, **WIDE)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2", "glm4"])
def test_half_precision_is_near_float32_of_transformers(tmp_path: Path, family: str, dtype: str) -> None:
    """Logprobs within the probe's limits; the gradient of the mean cross-entropy within a twentieth of its length. (Routers of random
    experts choose others in half precision, on a CPU as well.)"""
    folder, batch = save(tmp_path / "m", family), random_batch(groups=8, longest=60)
    reference = hf_model(folder)
    exact, _ = hf_values(reference, batch)
    (-exact.sum() / batch.loss_mask.sum()).backward()
    limits = {"bfloat16": ProbeLimits(0.5, 0.02), "float16": ProbeLimits(0.0625, 0.0025)}[dtype]
    with learner_on(folder, device=DEVICE, dtype=dtype, learning_rate=0.0, clip_grad=0.0, initial_loss_scale=1.0) as learner:
        assert learner.placement.device.type == DEVICE
        off = (learner.logprobs(batch) - exact.detach())[batch.loss_mask].abs()
        learner.supervised_step(batch.token_ids, batch.offsets, batch.loss_mask)
        found = {name: gradient.double().cpu() for name, gradient in gradients(learner).items()}
    assert float(off.max()) < limits.largest and float(off.median()) < limits.median
    named = dict(reference.named_parameters())
    pairs = [(found[name], parameter.grad.double()) for name, parameter in named.items() if name in found]
    assert len(pairs) > 10
    difference = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs) ** 0.5
    length = sum(float(theirs.square().sum()) for _, theirs in pairs) ** 0.5
    assert difference < 0.05 * length


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_restored_rank_goes_on_as_before(tmp_path: Path, dtype: str) -> None:
    """Weights, optimizer and its step are the checkpoint's; later losses are those without a break but for the order of sums."""
    folder = save(tmp_path / "m", "qwen3")
    with learner_on(folder, device=DEVICE, dtype=dtype, **SETTINGS) as learner:
        train(learner, 0, 3)
        learner.save(tmp_path / "c")
        held = learner.weight_checksums()
        without_break = train(learner, 3, 6)
    with learner_on(folder, device=DEVICE, dtype=dtype, seed=999, **SETTINGS) as learner:
        learner.restore(tmp_path / "c")
        assert learner.weight_checksums() == held and learner.optimizer.steps == 3
        assert train(learner, 3, 6) == pytest.approx(without_break, rel=1e-3)


def test_exported_weights_are_the_rank_s_in_page_locked_memory(tmp_path: Path) -> None:
    """What leaves the GPU, also in a second export that uses the same memory again; its sums are those that the rank tells."""
    folder = save(tmp_path / "m", "qwen3")
    staging = Staging()
    with learner_on(folder, device=DEVICE, dtype="bfloat16", **SETTINGS) as learner:
        for step in range(2):
            train(learner, step, step + 1)
            told, sums = learner.weight_checksums(), dict[str, str]()
            for piece in learner.weights(bucket_bytes=100_000):
                sent = staging.bucket(piece).tensors()
                assert all(tensor.is_pinned() for tensor in sent.values()), "page-locked memory of the host, never the GPU's"
                sums |= {name: tensor_checksum(tensor) for name, tensor in sent.items()}
            assert sums == told


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_step_takes_the_memory_that_a_plan_says(tmp_path: Path, family: str, recompute: bool) -> None:
    """Bytes of torch's allocator on the GPU: state and peak of a step within 3 % of the plan's, kernels' workspaces not counted in it."""
    tokens, longest = 8192, 1024
    sizes: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes |= {"num_hidden_layers": 8, "max_position_embeddings": 2048, "vocab_size": 32_000}
    if family == "qwen3":
        folder = save_model(tmp_path / "m", **sizes, intermediate_size=3072)
    else:
        folder = save_moe(tmp_path / "m", **sizes, intermediate_size=3072, moe_intermediate_size=512)
    settings: dict[str, Any] = {"device": DEVICE, "dtype": "bfloat16", "tokens_per_microbatch": tokens, "recompute_activations": recompute}
    before = torch.cuda.memory_allocated()
    with learner_on(folder, **settings) as learner:
        planned = rank_memory(ModelShape.read(folder), LearnerConfig(**settings).on_this_machine(), longest=longest)
        for step in range(2):
            torch.cuda.reset_peak_memory_stats()
            learner.step(whole_passes(tokens, longest), TIS, step=step)
        peak, state = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    print(f"{family}, recompute {recompute}: state {state / MIB:.0f} MiB, planned {planned.state / MIB:.0f}; "
          f"peak {peak / MIB:.0f} MiB, planned {planned.total / MIB:.0f}")  # fmt: skip
    assert state == pytest.approx(planned.state, rel=0.03)
    assert peak == pytest.approx(planned.total, rel=0.03)


def whole_passes(tokens: int, longest: int) -> CorrectedBatch:
    """Sequences of the same length that fill a micro-batch, with all tokens but the first of each in the loss, as a plan takes it."""
    count = tokens // longest
    batch = grouped_batch([([1] * count, [longest - 1] * count)])
    is_first = torch.zeros_like(batch.loss_mask).index_fill(0, batch.offsets[:-1], True)
    return defer(replace(batch, loss_mask=~is_first), TIS)


def takes_up_to_its_share(folder: Path, share: float) -> None:
    learner = LearnerRank(LearnerConfig(device=DEVICE, dtype="bfloat16", gpus_per_rank=share))
    learner.load(folder)
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(total * (share + 0.02)), dtype=torch.uint8, device=DEVICE)
    torch.empty(int(total * (share - 0.02)), dtype=torch.uint8, device=DEVICE)


def test_a_share_of_the_gpu_is_kept(tmp_path: Path) -> None:
    """A rank with a tenth of the GPU can't take more, its CUDA context included: torch's allocator refuses what goes beyond. It has a
    process of its own, because the limit is set when its group is made."""
    process = mp.get_context("spawn").Process(target=takes_up_to_its_share, args=(save(tmp_path / "m", "qwen3"), 0.1))
    process.start()
    process.join(200)
    assert process.exitcode == 0
