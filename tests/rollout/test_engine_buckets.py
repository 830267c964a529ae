"""Buckets of weights as SGLang itself reads them, and by broadcast to the real engine on a CPU."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evenkeel.engines.weights import WeightBucket, WeightSpec, tensor_checksum
from evenkeel.learner.weights.broadcast import WeightBroadcaster, end_to_end
from evenkeel.rollout.engine import weight_transfer
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.trajectory import Trajectory
from lab.ports import free_port
from tests.conftest import BackgroundLoop
from tests.rollout.engine_scene import buckets_of, some_tokens
from tests.rollout.hf_reference import perturbed, tiny_weights

pytestmark = pytest.mark.engine


def test_sglang_reads_a_bucket_of_many_types(engine: RolloutEngine) -> None:
    """By SGLang's own reader: tensors begin at multiples of 16 bytes, and there are gaps between them that it has to leave out."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    types = (torch.bfloat16, torch.float32, torch.uint8, torch.float16)
    tensors = {str(dtype): torch.arange(6, dtype=dtype).reshape(2, 3).T for dtype in types}
    payload = MultiprocessingSerializer.deserialize(weight_transfer.SharedStaging().payloads(WeightBucket.of(tensors))[0])
    read = FlattenedTensorBucket(flattened_tensor=payload["flattened_tensor"], metadata=payload["metadata"]).reconstruct_tensors()
    assert [name for name, _ in read] == list(tensors)
    assert all(torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype for name, tensor in read)


def test_a_bucket_is_broadcast_as_bytes_and_read_bit_for_bit_whatever_types_it_has(engine: RolloutEngine) -> None:
    """By SGLang's flattened bucket, as its receiving half fills it. That leaves no gaps: after 15 bytes there is no place for a float32."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    generator = torch.Generator().manual_seed(0)
    shapes = {"values": ((3, 5), torch.float8_e4m3fn), "scales": ((1, 3), torch.float32), "odd": ((7,), torch.bfloat16)}
    weights = {
        name: torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
        for name, (shape, dtype) in (shapes | {"one": ((), torch.float32)}).items()
    }
    specs, received = [WeightSpec.of(name, tensor) for name, tensor in weights.items()], dict[str, torch.Tensor]()

    async def asked(request: Any, _: None) -> tuple[bool, str]:
        assert request.load_format == "flattened_bucket"
        named = zip(request.names, request.dtypes, request.shapes, strict=True)
        bucket = FlattenedTensorBucket([(name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in named])
        flat = bucket.get_flattened_tensor()
        flat.copy_(end_to_end(weights))  # where SGLang has its one broadcast
        received.update(bucket.reconstruct_tensors())
        return True, ""

    manager: Any = SimpleNamespace(update_weights_from_distributed=asked)
    asyncio.run(weight_transfer.receive(manager, specs, "weights", version=1, flush=False))
    assert [WeightSpec.of(name, received[name]) for name in weights] == specs
    assert sum(tensor.nbytes for tensor in received.values()) == 15 + 12 + 14 + 4
    for name, tensor in weights.items():
        assert torch.equal(received[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_weights_by_broadcast_while_requests_run(
    engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is one collective: of bytes, and of the tensor itself where it is the only one, so that it isn't held twice."""
    version, weights = engine.version, perturbed(tiny_weights(tiny_model), seed=6)
    largest = max(weights, key=lambda name: weights[name].nbytes)
    others = {name: tensor for name, tensor in weights.items() if name != largest}
    buckets = [WeightBucket.of({largest: weights[largest]}), *buckets_of(others, 2)]
    specs = [bucket.specs for bucket in buckets]
    calls, broadcast = [], dist.broadcast

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((tensor.dtype, tensor.nbytes))
        return broadcast(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "broadcast", counted)

    async def run() -> Trajectory:
        port = free_port()
        joining = asyncio.ensure_future(engine.join_weight_group("127.0.0.1", port, 1, 2, "weights-1"))
        learner = await asyncio.to_thread(WeightBroadcaster, "127.0.0.1", port, 2, "weights-1", 20.0, torch.device("cpu"))
        await joining
        sampling = asyncio.ensure_future(engine.generate([5, 6, 7, 8], max_tokens=400, ignore_stop=True))
        await some_tokens(engine)
        receiving = asyncio.ensure_future(engine.receive_weights(version + 1, specs, group="weights-1"))
        for bucket in buckets:
            await asyncio.to_thread(learner.send, bucket.tensors())
        receipt = await receiving
        assert (receipt.version, receipt.bytes) == (version + 1, sum(bucket.nbytes for bucket in buckets)) and len(buckets) == 3
        await engine.leave_weight_group("weights-1")
        learner.close()
        return (await sampling)[0]

    completion = engine_loop.run(run())
    assert [span.version for span in completion.version_spans] == [version, version + 1]
    assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    assert [size for _, size in calls] == [bucket.nbytes for bucket in buckets] and len(weights) > 2 * len(calls)
    assert [dtype for dtype, _ in calls] == [torch.float32, torch.uint8, torch.uint8]


@pytest.mark.parametrize("load_format", ["flattened_bucket", None])
def test_a_bucket_that_the_gpu_never_gets_is_a_failed_update_to_sglang(
    load_format: str | None, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own functions, hooked, as on a GPU: nothing is loaded, and the version stays. Torch's meta device stands for a GPU's, whose
    event comes after an abort, too."""
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from torch._C._distributed_c10d import ErrorType

    work = SimpleNamespace(wait=lambda: None)  # NCCL's `wait` returns at once, too
    monkeypatch.setattr(dist, "broadcast", lambda *_, async_op=False, **__: work if async_op else None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True))
    aborted = threading.Event()
    backend = SimpleNamespace(get_error=lambda: ErrorType.TIMEOUT)
    unused = dict.fromkeys(("model_config", "get_model", "update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    updater = WeightUpdater(tp_rank=0, device="meta", gpu_id=0, custom_weight_loaders={}, **unused)
    updater._model_update_group["weights-1"] = SimpleNamespace(_get_backend=lambda _: backend, abort=aborted.set)
    runner = SimpleNamespace(weight_updater=updater)
    manager: Any = weight_updater.SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=runner, weight_update_runners=lambda: pytest.fail("about to be loaded")),
        **dict.fromkeys(("draft_worker", "tp_cpu_group", "memory_saver_adapter", "flush_cache", "is_fully_idle", "scheduler")),
    )
    manager._session = weight_updater._WeightUpdateSession(selector="all")
    request = SimpleNamespace(
        names=["a"], dtypes=["float32"], shapes=[[2]], group_name="weights-1", load_format=load_format, selector="all"
    )
    answer = manager.update_weights_from_distributed(request)
    said = "weight group weights-1: a bucket was not received: NCCL's communicator has failed (TIMEOUT)"
    assert (answer.success, answer.message) == (False, f"Failed to receive weights: {said}")
    assert aborted.wait(10)
