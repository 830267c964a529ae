"""SGLang's protocol for new weights, step by step (pause, begin, buckets, end, continue), and what is checked on the way.

`manager` is SGLang's tokenizer manager, the owner's half of the engine. Order, deadlines, failures: engine.py. SGLang answers success for
an unknown name and dies of a wrong shape, so each bucket is checked before it is sent.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from evenkeel.correction.errors import SyncError
from evenkeel.engines.weights import WeightBucket, WeightSpec, goes_whole, packed, packed_bytes, widest_first
from evenkeel.rollout.engine_settings.engine_config import UpdateMode
from evenkeel.rollout.trajectory import SyncReceipt

T = TypeVar("T")
R = TypeVar("R")
# The most bytes that a thread copies at a time. Tensors are cut into such pieces, so that several threads share a large one. On two cores
# one thread copied 5.7 GB/s (4.8 by torch's copy_), two 10.
_PIECE_BYTES = 64 << 20


async def pause_and_begin(manager: Any, mode: UpdateMode) -> None:
    """Stop sampling. retract: what runs goes back to the queue, without its KV cache; in_place: it stays where it is.

    `pause` is sent and not answered, and the forward under way ends first. By the answer to `begin` nothing is sampled any more.
    """
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


async def send(manager: Any, payloads: Sequence[bytes], *, version: int | None, flush: bool) -> None:
    """Load one bucket.

    Args:
        payloads: of `SharedStaging`, one for each rank; each gets the whole bucket, and SGLang's loaders take its part.
        version: given with the last bucket: from here on, tokens are of this version.
        flush: drop the KV cache after loading; only with the last bucket, and after a pause that retracts.
    """
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=list(payloads), load_format="flattened_bucket", flush_cache=flush, weight_version=_text(version)
    )
    _raise_unless(await manager.update_weights_from_tensor(request, None))


class Sending:
    """Buckets on their way: the first is prepared before the engine pauses, each further one while SGLang loads the one before."""

    def __init__(
        self,
        buckets: Iterable[WeightBucket] | AsyncIterable[WeightBucket],
        staging: SharedStaging,
        admit: Callable[[WeightBucket, bool], None],
    ) -> None:
        """Args: admit: checks a bucket, given whether it is the last one, before it is prepared; raises SyncError."""

        def payloads(item: tuple[WeightBucket, bool]) -> tuple[list[bytes], bool]:
            admit(*item)
            return staging.payloads(item[0]), item[1]

        self._payloads = made_ahead(with_last(buckets), payloads)
        self._first: tuple[list[bytes], bool] | None = None

    async def prepare(self) -> None:
        """All that can be done while the engine still samples. Raises: SyncError."""
        self._first = await anext(self._payloads, None)

    async def load(self, manager: Any, version: int, *, flush: bool) -> None:
        """Load the buckets into the engine, which is paused; version and flush as for `send`."""
        following = self._first
        while following is not None:
            payloads, is_last = following
            await send(manager, payloads, version=version if is_last else None, flush=flush and is_last)
            following = await anext(self._payloads, None)

    async def close(self) -> None:
        await self._payloads.aclose()


class Receiving:
    """Buckets that rank 0 of a group broadcasts; there is nothing to prepare."""

    def __init__(self, buckets: Sequence[Sequence[WeightSpec]], group: str) -> None:
        self._buckets, self._group = buckets, group

    async def prepare(self) -> None: ...

    async def load(self, manager: Any, version: int, *, flush: bool) -> None:
        async for bucket, is_last in with_last(self._buckets):
            await receive(manager, bucket, self._group, version=version if is_last else None, flush=flush and is_last)

    async def close(self) -> None: ...


async def receive(manager: Any, bucket: Sequence[WeightSpec], group: str, *, version: int | None, flush: bool) -> None:
    """Load one bucket that rank 0 of the group broadcasts, by one collective (learner/weights/broadcast.py); otherwise as `send`."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

    specs = widest_first(bucket)
    request = UpdateWeightsFromDistributedReqInput(
        names=[spec.name for spec in specs],
        dtypes=[spec.dtype for spec in specs],
        shapes=[list(spec.shape) for spec in specs],
        group_name=group,
        load_format=None if goes_whole(specs) else "flattened_bucket",
        flush_cache=flush,
        weight_version=_text(version),
    )
    _raise_unless(await manager.update_weights_from_distributed(request, None))


class SharedStaging:
    """Shared memory through which buckets go to SGLang's processes: one half is filled while SGLang reads the other.

    It is kept from update to update, because to copy into fresh memory takes several times as long.
    """

    def __init__(self, ranks: int = 1, threads: int = 1) -> None:
        """
        Args:
            ranks: of the engine, all of which read the same memory.
            threads: that copy, at most as many as this process has CPUs. A GPU loads a bucket faster than one thread copies the next.
        """
        self._ranks = ranks
        threads = min(threads, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="weights") if threads > 1 else None
        self._halves = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._turn = 0

    def payloads(self, bucket: WeightBucket) -> list[bytes]:
        """The bucket as SGLang takes it, for each rank: a handle to shared memory can be received once."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        metadata = [
            FlattenedTensorMetadata(
                spec.name, torch.Size(spec.shape), getattr(torch, spec.dtype), start_idx=place.start, end_idx=place.stop, numel=len(place)
            )
            for spec, place in zip(bucket.specs, packed(bucket.specs), strict=True)
        ]
        content = {"flattened_tensor": self.copy(bucket), "metadata": metadata}
        return [bytes(MultiprocessingSerializer.serialize(content)) for _ in range(self._ranks)]

    def copy(self, bucket: WeightBucket) -> torch.Tensor:
        """The bucket's bytes in shared memory, whole until the next call but one. One thread at a time."""
        size = packed_bytes(bucket.specs)
        self._turn = 1 - self._turn
        if len(self._halves[self._turn]) < size:
            self._halves[self._turn] = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        half = self._halves[self._turn][:size]
        copies = WeightBucket.of_specs(bucket.specs, half).parts
        pieces = [
            (copy[start : start + _PIECE_BYTES], part[start : start + _PIECE_BYTES])
            for copy, part in zip(copies, bucket.parts, strict=True)
            for start in range(0, len(part), _PIECE_BYTES)
        ]
        deque((map if self._threads is None else self._threads.map)(_copy, pieces), maxlen=0)
        return half


def _copy(piece: tuple[Any, Any]) -> None:
    """Args: piece: target and source, numpy uint8 [bytes] each. Numpy lets other threads run meanwhile."""
    target, source = piece
    target[:] = source


async def made_ahead(items: AsyncIterator[T], make: Callable[[T], R]) -> AsyncGenerator[R, None]:
    """Yields make(item) for each item. A thread makes the next one while the caller works with this one."""
    making: asyncio.Future[R] | None = None
    try:
        async for item in items:
            made = None if making is None else [await making]
            making = asyncio.ensure_future(asyncio.to_thread(make, item))
            if made is not None:
                yield made[0]
        if making is not None:
            yield await making
    finally:
        if making is not None:  # a thread can't be stopped; what it writes to belongs to the next update
            await asyncio.wait({making})


async def with_last(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[tuple[T, bool]]:
    """Yields each item, and whether it is the last one, by reading one item ahead."""
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


def _text(version: int | None) -> str | None:
    return None if version is None else str(version)


def _raise_unless(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise SyncError(message)


# --- what is checked -------------------------------------------------------------------------------------------------


def require_checksums(buckets: Iterable[WeightBucket], expected: Mapping[str, str]) -> None:
    """Raises: SyncError naming the first tensor whose bytes are not those that the learner sent."""
    for bucket in buckets:
        for name, checksum in bucket.checksums().items():
            if checksum != expected.get(name):
                raise SyncError(f"{name} arrived with other bytes than the learner sent; the engine was not touched")


class UpdateCheck:
    """Follows one update's buckets: every tensor known, of the held shape and dtype, sent once, and none left out."""

    def __init__(self, engine_name: str, version: int, held: Mapping[str, WeightSpec]) -> None:
        self._place = f"{engine_name}: weights v{version}"
        self._held = held
        self._seen: set[str] = set()
        self._buckets = 0
        self._bytes = 0

    @property
    def is_empty(self) -> bool:
        """Nothing has been admitted."""
        return not self._seen

    def admit(self, specs: Iterable[WeightSpec]) -> None:
        """Check one bucket. Raises: SyncError that names the tensor; nothing of the bucket may be sent then."""
        specs = tuple(specs)
        names = [spec.name for spec in specs]
        for spec in specs:
            held = self._held.get(spec.name)
            if held is None:
                raise SyncError(f"{self._place}: {spec.name} ({spec}): {self._why_unknown(spec.name)}")
            if (spec.shape, spec.dtype) != (held.shape, held.dtype):
                raise SyncError(
                    f"{self._place}: {spec.name} is {spec}, the engine holds {held}. Export the weights in the engine's shapes and dtype"
                )
            if spec.name in self._seen or names.count(spec.name) > 1:
                raise SyncError(f"{self._place}: {spec.name} comes twice in one update. Send each tensor once")
        self._seen.update(names)
        self._buckets += 1
        self._bytes += sum(spec.nbytes for spec in specs)

    def finish(self) -> None:
        """Raises: SyncError if tensors are missing: an engine must not serve two versions at once."""
        missing = sorted(self._held.keys() - self._seen)
        if missing:
            raise SyncError(
                f"{self._place}: {len(missing)} of {len(self._held)} tensors were not sent, the first is {missing[0]}. "
                "An update carries the whole model"
            )

    def require_all_ranks(self, version: int, receipts: Sequence[Mapping[str, str]]) -> None:
        """SGLang's own answer is its first rank's. Args: receipts: of each rank (rollout.sglang_plugin.rank_receipts).

        Raises: SyncError naming the first rank that has not loaded every bucket.
        """
        for rank, receipt in enumerate(receipts):
            if receipt["failure"] or receipt["buckets"] != str(self._buckets) or receipt["version"] != str(version):
                raise SyncError(
                    f"rank {rank} of {len(receipts)} has loaded {receipt['buckets']} of {self._buckets} buckets and holds "
                    f"v{receipt['version']}{': ' + receipt['failure'] if receipt['failure'] else ''}; the others are of no use without it"
                )

    def receipt(self, version: int, pause_s: float) -> SyncReceipt:
        return SyncReceipt(version, self._bytes, pause_s)

    def _why_unknown(self, name: str) -> str:
        if name == "lm_head.weight":
            return "the model ties its head to the embedding, so the engine holds model.embed_tokens.weight only. Leave the head out"
        close = [held for held in self._held if held.rpartition(".")[0].endswith(name.rpartition(".")[0].rpartition(".")[2])]
        hint = f", for example {close[0]}" if close else ""
        return f"the engine holds no tensor of this name{hint}. Use the names of the model's Hugging Face folder"
