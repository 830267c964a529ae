"""NCCL between processes, on one GPU: the learner's ranks, and the learner with an engine, by the run's own functions.

NCCL makes a group of several processes on one GPU since 2.30, if it is told so; torch 2.13.0 comes with 2.29.7. What is shown is that the
calls go together, end where a member dies, and give the right numbers; not their speed, as the processes take turns on the GPU.
These need a GPU and that NCCL, and are skipped without: `pip install --no-deps nvidia-nccl-cu13==2.30.7`, then `make test-gpu`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.environment import worker_environment
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.correct import defer
from evenkeel.correction.errors import SyncError
from evenkeel.engines.rendezvous import Rendezvous
from evenkeel.engines.weights import WeightBucket, WeightSpec, tensor_checksum
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.weights.broadcast import WeightBroadcaster
from evenkeel.recipe import load_config
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig, EngineDeadlines
from evenkeel.rollout.trajectory import Trajectory
from lab.ports import free_port
from tests.conftest import ROOT, BackgroundLoop
from tests.learner.learner_cases import TIS, random_batch, run_ranks, save_model, weights
from tests.learner.moe_cases import save_moe
from tests.rollout.engine_scene import is_healthy, some_tokens
from tests.rollout.hf_reference import perturbed, tiny_weights


def several_can_share_a_gpu() -> bool:
    """By the NCCL that this process has loaded; torch.cuda.nccl.version() tells the one that torch was compiled with."""
    if not torch.cuda.is_available():
        return False
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= 23000


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120, method="thread"),  # NCCL's calls can hang for good: then it says where
    pytest.mark.skipif(not several_can_share_a_gpu(), reason="needs a GPU and NCCL 2.30"),
]

CUDA = torch.device("cuda", 0)
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2}
GROUP_S = 8.0
"""For a collective of weights, seconds."""
JOIN_S = 60.0
"""For a group to be built, seconds: a process starts meanwhile."""


@pytest.fixture(scope="module", autouse=True)
def several_processes_on_a_gpu() -> Iterator[None]:
    """The variables of a run that broadcasts weights, in this process and all that it starts."""
    recipe = load_config(RunConfig, ROOT / "recipes" / "qwen3_8b_8gpu.yaml", ["weight_sync.transport=broadcast"])
    config = with_devices(recipe, has_gpu=True)
    variables = worker_environment(config) | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


# The learner's ranks.


def steps_of(folder: Path, split: dict[str, Any], rank: int = 0, ranks: int = 1, port: int = 0) -> dict[str, Any]:
    """Numbers of three steps, and the logprobs before them."""
    config = LearnerConfig(device="cuda", dtype="bfloat16", learning_rate=1e-3, tokens_per_microbatch=300, **split)
    learner = LearnerRank(config, rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    batch = random_batch(groups=8, longest=60)
    before = learner.logprobs(batch)
    found = [learner.step(defer(batch, TIS), TIS, step=step) for step in range(3)]
    exported = weights(learner)
    learner.close()
    return {"logprobs": before, "norms": [one.grad_norm for one in found], "weights": exported}


def as_a_rank(rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any]) -> dict[str, Any]:
    return steps_of(folder, split, rank, ranks, port)


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("qwen3", {"data_parallel": 2, "distributed_optimizer": True}),
    "tensor": ("qwen3", {"tensor_parallel": 2, "sequence_parallel": True}),
    "pipeline": ("qwen3", {"pipeline_parallel": 2}),
    "experts": ("moe", {"data_parallel": 2, "expert_parallel": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_by_nccl_do_what_one_does(tmp_path: Path, layout: str) -> None:
    """To bfloat16's rounding: sums are added in another order. Routers of random experts choose others for it, at some tokens."""
    kind, split = LAYOUTS[layout]
    folder = save_moe(tmp_path / "m") if kind == "moe" else save_model(tmp_path / "m", kind, **WIDE)
    (one,) = run_ranks(as_a_rank, folder, {}, ranks=1)
    both = run_ranks(as_a_rank, folder, split, ranks=2)
    off = (both[0]["logprobs"] - one["logprobs"]).abs()
    assert float(off.median()) < 0.01 and float(off.max()) < (0.5 if kind == "moe" else 0.06)
    assert both[0]["norms"] == pytest.approx(one["norms"], rel=0.05)
    assert both[0]["norms"] == both[1]["norms"]
    moved = max(float((both[0]["weights"][name].float() - tensor.float()).abs().max()) for name, tensor in one["weights"].items())
    assert moved < 0.02  # three steps of Adam at 1e-3, and bfloat16's rounding of what is exported


# The learner and an engine.


@pytest.fixture(scope="module")
def engine(tiny_model: Path, engine_loop: BackgroundLoop) -> Iterator[RolloutEngine]:
    """Of the learner's type, on its GPU. The last test kills it."""
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        max_running_requests=8,
        max_total_tokens=8192,
        deadlines=EngineDeadlines(heartbeat_s=30.0),
        weight_group_timeout_s=GROUP_S,
    )
    engine = engine_loop.run(RolloutEngine.start(tiny_model, config, name="an engine beside the learner"))
    yield engine
    engine_loop.run(engine.shutdown())


def on_gpu(model: Path, seed: int) -> dict[str, Tensor]:
    return {name: tensor.to(CUDA, torch.bfloat16) for name, tensor in perturbed(tiny_weights(model), seed=seed).items()}


def specs_of(buckets: list[dict[str, Tensor]]) -> list[list[WeightSpec]]:
    return [[WeightSpec.of(name, tensor) for name, tensor in bucket.items()] for bucket in buckets]


async def both_join(engine: RolloutEngine, name: str) -> WeightBroadcaster:
    port = free_port()
    joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, 2, name))
    learner = await asyncio.to_thread(WeightBroadcaster, "127.0.0.1", port, 2, name, JOIN_S, CUDA, bucket_s=GROUP_S)
    await joining
    return learner


async def send(engine: RolloutEngine, learner: WeightBroadcaster, held: dict[str, Tensor], version: int, group: str) -> list[Trajectory]:
    """Weights in three buckets, while an answer is sampled."""
    names = list(held)
    buckets = [{name: held[name] for name in names[start::3]} for start in range(3)]
    sampling = asyncio.ensure_future(engine.generate([5, 6, 7, 8], max_tokens=400, ignore_stop=True))
    await some_tokens(engine)
    began = time.monotonic()
    receiving = asyncio.ensure_future(engine.receive_weights(version, specs_of(buckets), group=group))
    for bucket in buckets:
        await asyncio.to_thread(learner.send, bucket)
    receipt = await receiving
    print(f"version {version} of {receipt.bytes} bytes by NCCL in {time.monotonic() - began:.3f} s")
    assert receipt.version == version and receipt.bytes == sum(tensor.nbytes for tensor in held.values())
    assert await engine.weight_checksums() == {name: tensor_checksum(tensor) for name, tensor in held.items()}
    return await sampling


def test_weights_by_nccl_while_requests_run(engine: RolloutEngine, tiny_model: Path, engine_loop: BackgroundLoop) -> None:
    """Three versions, of which the last goes through another group, as after a join."""

    async def run() -> None:
        before = engine.version
        for group, versions in (("weights-1", (1, 2)), ("weights-2", (3,))):
            began = time.monotonic()
            learner = await both_join(engine, group)
            print(f"both joined {group} in {time.monotonic() - began:.2f} s")
            for version in versions:
                (answer,) = await send(engine, learner, on_gpu(tiny_model, version), before + version, group)
                assert [span.version for span in answer.version_spans] == [before + version - 1, before + version]
            await engine.leave_weight_group(group)
            learner.close()

    engine_loop.run(run())
    assert is_healthy(engine)


def test_a_broadcast_that_never_comes_ends_in_the_engine(engine: RolloutEngine, tiny_model: Path, engine_loop: BackgroundLoop) -> None:
    """It is free after the group's time-out; the next version comes as tensors, and one more by another group."""
    held, version = on_gpu(tiny_model, 4), engine.version

    async def run() -> None:
        learner = await both_join(engine, "weights-3")
        began = time.monotonic()
        with pytest.raises(SyncError, match="dirty"):
            await engine.receive_weights(version + 1, specs_of([held]), group="weights-3")
        print(f"the engine was free after {time.monotonic() - began:.1f} s")
        learner.close()
        await engine.leave_weight_group("weights-3")
        await engine.update_weights(version + 1, [WeightBucket.of({name: tensor.cpu() for name, tensor in held.items()})])
        learner = await both_join(engine, "weights-4")
        await send(engine, learner, on_gpu(tiny_model, 5), version + 2, "weights-4")
        await engine.leave_weight_group("weights-4")
        learner.close()

    engine_loop.run(run())
    assert is_healthy(engine)


@pytest.mark.parametrize("when", ["before all are there", "before it connects"])
def test_a_member_that_dies_in_the_join_costs_the_others_a_moment(engine: RolloutEngine, engine_loop: BackgroundLoop, when: str) -> None:
    """The engine samples again long before the group's time-out, and both make a group with each other then."""
    port, given_up, name = free_port(), threading.Event(), f"weights-5-{when[-2:]}"
    other = mp.get_context("spawn").Process(target=comes_and_dies, args=(port, name, when == "before it connects"), daemon=True)

    async def run() -> None:
        joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, 3, name))
        told = ("127.0.0.1", port, 3, name, JOIN_S, CUDA)
        leading = asyncio.ensure_future(asyncio.to_thread(WeightBroadcaster, *told, bucket_s=GROUP_S, given_up=given_up))
        other.start()
        await asyncio.to_thread(other.join)
        began = time.monotonic()
        given_up.set()
        with pytest.raises(SyncError, match="the learner has left it meanwhile"):
            await leading
        with pytest.raises(SyncError, match=r"given up|has left the group"):
            await joining
        assert len((await engine.generate([5, 6, 7], max_tokens=4, ignore_stop=True))[0].response_ids) == 4
        print(f"the engine has sampled {time.monotonic() - began:.1f} s after the death")
        learner = await both_join(engine, name + "-again")
        await engine.leave_weight_group(name + "-again")
        learner.close()

    engine_loop.run(run())
    assert is_healthy(engine)


def comes_and_dies(port: int, name: str, waits: bool) -> None:
    """A member of a weight group. Args: waits: until all are there."""
    meeting = Rendezvous("127.0.0.1", port, name, timeout=timedelta(seconds=JOIN_S))
    if waits:
        meeting.arrive()
        while not meeting.has_begun():
            time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_engine_that_is_killed_in_a_broadcast_costs_the_learner_a_deadline(
    engine: RolloutEngine, tiny_model: Path, engine_loop: BackgroundLoop
) -> None:
    """This process, which is the learner, lives, computes on its GPU, and makes a group with the next member."""
    held = on_gpu(tiny_model, 6)

    async def run() -> None:
        learner = await both_join(engine, "weights-6")
        os.kill(engine.process_ids["scheduler"], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(SyncError, match="weights-6: broadcast failed"):
            await asyncio.to_thread(learner.send, held)
        print(f"the learner was free after {time.monotonic() - began:.1f} s")
        learner.close()

    engine_loop.run(run())
    computed = torch.ones(512, 512, device=CUDA) @ torch.ones(512, 512, device=CUDA)
    waiting = threading.Thread(target=torch.cuda.synchronize, daemon=True)
    waiting.start()
    waiting.join(30.0)
    assert not waiting.is_alive(), "the aborted broadcast keeps the GPU busy"
    assert float(computed[0, 0]) == 512
    port = free_port()
    context = mp.get_context("spawn")
    heard = context.Queue()
    other = context.Process(target=member, args=(port, "weights-7", heard), daemon=True)
    other.start()
    learner = WeightBroadcaster("127.0.0.1", port, 2, "weights-7", JOIN_S, CUDA, bucket_s=GROUP_S)
    learner.send({"all": torch.arange(1000, device=CUDA, dtype=torch.float32)})
    assert heard.get(timeout=JOIN_S) == 499_500.0
    other.join(JOIN_S)
    learner.close()


def member(port: int, name: str, heard: Any) -> None:
    """A member of a group of two, as SGLang is one; it puts the sum of 1,000 float32 numbers into the queue."""
    from sglang.srt.utils import init_custom_process_group

    meeting = Rendezvous("127.0.0.1", port, name, timeout=timedelta(seconds=JOIN_S))
    meeting.arrive()
    while not meeting.has_begun():
        time.sleep(0.01)
    group = init_custom_process_group(backend="nccl", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=1, group_name=name)
    for values in (torch.zeros(1, dtype=torch.uint8, device=CUDA), torch.zeros(1000, device=CUDA)):
        torch.distributed.broadcast(values, src=0, group=group)
    torch.cuda.synchronize()
    heard.put(float(values.sum()))
    time.sleep(1.0)  # the queue's thread sends it
