"""SGLang's protocol for new weights, step by step: pause, begin, buckets, end, continue.

Functions of SGLang's tokenizer manager (`manager`), the owner's half of the engine. Order, deadlines, failures: rollout.weight_update.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch

from correction.engines.weight_bucket import WeightBucket
from correction.engines.weight_spec import WeightSpec
from correction.errors import SyncError

T = TypeVar("T")
UpdateMode = Literal["retract", "in_place"]


async def pause_and_begin(manager: Any, mode: UpdateMode) -> None:
    """Stop sampling. retract: what runs goes back to the queue, without its KV cache; in_place: it stays where it is."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, PauseGenerationReqInput

    await manager.pause_generation(PauseGenerationReqInput(mode=mode))
    _raise_unless(await manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all"), None))


async def end(manager: Any) -> None:
    """SGLang post-processes the weights here (packing, scales)."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    _raise_unless(await manager.end_weight_update(EndWeightUpdateReqInput(), None))


async def resume(manager: Any) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    await manager.continue_generation(ContinueGenerationReqInput())


async def send(manager: Any, bucket: WeightBucket, *, version: int | None, flush: bool, copies: int = 1) -> None:
    """Load one bucket.

    Args:
        version: given with the last bucket: from here on, tokens are of this version.
        flush: drop the KV cache after loading; only with the last bucket, and after a pause that retracts.
        copies: schedulers of the engine; each gets the whole bucket and takes its share.
    """
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    payload = await asyncio.to_thread(_serialize, bucket)
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[payload] * copies, load_format="flattened_bucket", flush_cache=flush, weight_version=_text(version)
    )
    _raise_unless(await manager.update_weights_from_tensor(request, None))


async def receive(manager: Any, bucket: Sequence[WeightSpec], group: str, *, version: int | None, flush: bool) -> None:
    """Load one bucket that rank 0 of the group broadcasts, tensor by tensor in this order; otherwise as `send`."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    request = UpdateWeightsFromDistributedReqInput(
        names=[spec.name for spec in bucket],
        dtypes=[spec.dtype for spec in bucket],
        shapes=[list(spec.shape) for spec in bucket],
        group_name=group,
        flush_cache=flush,
        weight_version=_text(version),
    )
    _raise_unless(await manager.update_weights_from_distributed(request, None))


async def with_last(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[tuple[T, bool]]:
    """Each item, and whether it is the last: known by looking one ahead."""
    held: list[T] = []
    async for item in _iterate(items):
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True


async def _iterate(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _serialize(bucket: WeightBucket) -> bytes:
    """The bucket as SGLang takes it: its bytes are copied once, into shared memory."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(
            spec.name, torch.Size(spec.shape), getattr(torch, spec.dtype), start_idx=place.start, end_idx=place.stop, numel=len(place)
        )
        for spec, place in bucket.items()
    ]
    return bytes(MultiprocessingSerializer.serialize({"flattened_tensor": bucket.flat(), "metadata": metadata}))


def _text(version: int | None) -> str | None:
    return None if version is None else str(version)


def _raise_unless(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise SyncError(message)
