"""What weights an engine holds, and how new ones come in while requests run: order, deadlines, checks, and what happens when one fails.

The steps themselves are SGLang's (weight_transfer.py). SGLang answers success for an unknown name and dies of a wrong shape, so each
bucket is checked before it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from correction.engines.processor import Processor
from correction.engines.weight_bucket import WeightBucket
from correction.engines.weight_spec import WeightSpec
from correction.errors import DeadlineExceeded, EngineError, EvenkeelError, SyncError
from rollout.engine import weight_transfer
from rollout.engine.engine_process import CONTROLLER, EngineProcess
from rollout.engine.heartbeat import SchedulerProbe, kernels_are_compiled, processor_seconds, until_engine_lost
from rollout.engine.weight_transfer import Receiving, Sending
from rollout.engine_settings.engine_config import EngineConfig, UpdateMode
from rollout.sglang_plugin.hooks import CHECKSUMS, FAILURE, PROCESSOR, RECEIPT, SPECS
from rollout.sglang_plugin.weight_parts import RankParts
from rollout.trajectory import SyncReceipt


class UpdatableEngine:
    """States: clean (serves `version`) -> updating (requests wait) -> clean; or dirty, when an update failed half-way; or lost, when its
    processes ended or gave no answer to an update in time.

    A dirty engine has weights of no version until a whole update succeeds. A lost engine answers every call with an EngineError: shut it
    down and start another. All methods belong to the event loop that started the engine.
    """

    def __init__(self, name: str, config: EngineConfig, process: EngineProcess, version: int) -> None:
        self.name = name
        self.config = config
        self._process = process
        self._version = version
        self._dirty: str | None = None
        """Why the engine is dirty; None if it isn't."""
        self._no_update = asyncio.Event()
        """Cleared while the engine is paused for new weights: requests that come now wait."""
        self._no_update.set()
        self._failed_updates = 0
        self._updating = asyncio.Lock()
        self._specs: dict[str, WeightSpec] | None = None
        self._parts: RankParts | None = None
        """What each rank holds, if there are several; known after `weight_specs`."""
        self._staging = weight_transfer.SharedStaging(config.tensor_parallel, config.copy_threads)
        self.silent_s = 0.0
        """Seconds of heartbeat_s that the engine had used up without a sign of life at its last probe."""
        self._ended_tokens = self._seen_tokens = 0
        """Response tokens of requests that have ended; and the most known to have been sampled so far."""
        self._interruptions = 0
        """Number of calls under way in which the scheduler waits for others or is busy for long. Each has a deadline of its own, and the
        heartbeat isn't checked meanwhile."""

    def watch_heartbeat(self) -> None:
        """From now on the engine is lost as soon as it misses its heartbeat."""
        process, limit_s = self._process, self.config.deadlines.heartbeat_s

        def silent(seconds: float) -> None:
            self.silent_s = seconds

        process.watch_heartbeat(
            until_engine_lost(
                SchedulerProbe(self._manager, is_paused=self._updating.locked),
                lambda: processor_seconds(pid for role, pid in process.pids.items() if role != CONTROLLER),
                limit_s=limit_s,
                is_excused=lambda: self._interruptions > 0,
                compiles=kernels_are_compiled if self.config.resolved_device == "cuda" else lambda: False,
                silent=silent,
            )
        )

    def raise_if_lost(self) -> None:
        """Raises: EngineError."""
        self._process.raise_if_lost()

    @property
    def version(self) -> int:
        """Version of the weights that the next request is sampled with."""
        return self._version

    async def weight_specs(self) -> dict[str, WeightSpec]:
        """Every tensor that the engine holds, by Hugging Face name, whole; asked once, they don't change."""
        if self._specs is None:
            answers = await self._inspect(SPECS)
            if self.config.tensor_parallel > 1:
                self._parts = RankParts.parse(answers, self.name)
                self._specs = dict(self._parts.specs)
            else:
                self._specs = {name: WeightSpec.parse(name, text) for name, text in answers[0].items()}
        return self._specs

    async def weight_checksums(
        self, sent: Sequence[WeightBucket] = (), verified: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, str]:
        """HF name -> correction.engines.checksum.tensor_checksum of what the engine holds now, in its dtype.

        Args:
            sent: the weights that it should hold. An engine of several ranks has no whole tensor: each rank's parts are compared with
                those of `sent`, whose checksums are returned if all agree.
            verified: checksums of tensors in `sent` that have been compared with it already; they are not computed again.
        Raises: SyncError naming the first tensor and rank that differ.
        """
        held = await self._inspect(CHECKSUMS)
        if self._parts is None:
            return held[0]
        return await asyncio.to_thread(self._parts.require_parts, sent, held, self.name, verified)

    async def processor(self) -> Processor:
        """What the scheduler process computes with; for true on-policy it has to be what the learner computes with.

        Raises: EngineError if its products depend on the number of rows there.
        """
        return Processor(**(await self._inspect(PROCESSOR))[0])

    async def update_weights(
        self,
        version: int,
        buckets: Iterable[WeightBucket] | AsyncIterable[WeightBucket],
        *,
        mode: UpdateMode | None = None,
    ) -> SyncReceipt:
        """Replace all weights while requests run: pause, begin, buckets, flush (retract), end, continue. No request is aborted.

        The engine is paused when the first bucket is ready to be loaded. Cancelling the caller does not stop an update that has begun.
        Args:
            version: of the new weights.
            buckets: together the whole model. Each is checked before it is sent: a list or tuple as a whole, before the engine is paused;
                an iterator bucket by bucket, and the engine stands still while it waits for the second and later ones.
            mode: overrides rollout.engine.weight_update_mode.
        Raises: SyncError, EngineError, DeadlineExceeded. If anything had been sent before, the engine is dirty, or lost.
        """
        self._process.raise_if_lost()
        held = await self.weight_specs()
        if isinstance(buckets, (list, tuple)):
            rehearsal = UpdateCheck(self.name, version, held)
            for bucket in buckets:
                rehearsal.admit(bucket.specs)
            rehearsal.finish()
        check = UpdateCheck(self.name, version, held)

        def admit(bucket: WeightBucket, is_last: bool) -> None:
            check.admit(bucket.specs)
            if is_last:
                check.finish()

        return await self._update(version, check, Sending(buckets, self._staging, admit), mode or self.config.weight_update_mode)

    async def receive_weights(self, version: int, buckets: Sequence[Sequence[WeightSpec]], *, group: str) -> SyncReceipt:
        """As update_weights, but rank 0 of the group broadcasts the buckets, each at once, in this order.

        Args:
            buckets: what will be broadcast; checked as a whole before the engine is paused. One bucket at a time takes memory: SGLang takes
                twice its bytes while it receives.
        """
        self._process.raise_if_lost()
        check = UpdateCheck(self.name, version, await self.weight_specs())
        for bucket in buckets:
            check.admit(bucket)
        check.finish()

        return await self._update(version, check, Receiving(buckets, group), self.config.weight_update_mode)

    async def join_weight_group(self, address: str, port: int, rank: int, world_size: int, name: str) -> None:
        """Join the learner's torch.distributed group for receive_weights; returns when all members are there. Rank 0 is the learner.

        The scheduler samples nothing while it waits for the others.
        """
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address=address,
            master_port=port,
            rank_offset=rank,
            world_size=world_size,
            group_name=name,
            backend=self.config.resolved_group_backend,
        )
        phase = f"join weight group {name} as rank {rank} of {world_size}"
        await self._control(self._manager.init_weights_update_group(request, None), phase)

    async def leave_weight_group(self, name: str) -> None:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=name)
        await self._control(self._manager.destroy_weights_update_group(request, None), f"leave weight group {name}")

    async def _update(self, version: int, check: UpdateCheck, transfer: Sending | Receiving, mode: UpdateMode) -> SyncReceipt:
        """The update as a task of its own: it runs to its end even if the caller is cancelled."""
        return await asyncio.shield(asyncio.ensure_future(self._update_in_turn(version, check, transfer, mode)))

    async def _update_in_turn(self, version: int, check: UpdateCheck, transfer: Sending | Receiving, mode: UpdateMode) -> SyncReceipt:
        waits = self._interrupted() if isinstance(transfer, Receiving) else contextlib.nullcontext()
        async with self._updating:
            self._process.raise_if_lost()
            if self._dirty is not None and self.config.tensor_parallel > 1:
                mode = "retract"                                    # its ranks may differ in what they have cached: that goes
            phase = f"weight update v{self._version} -> v{version}, {mode}"
            try:
                await self._prepare(transfer, check, phase)
                self._no_update.clear()
                with waits:
                    pause_s = await self._replace_weights(version, mode, transfer, check, phase)
                self._version = version
                self._dirty = None
                return check.receipt(version, pause_s)
            finally:
                self._no_update.set()
                await transfer.close()

    async def _prepare(self, transfer: Sending | Receiving, check: UpdateCheck, phase: str) -> None:
        """What fails here leaves the engine as it was: it samples on."""
        deadline_s = self.config.deadlines.update_s
        try:
            await asyncio.wait_for(transfer.prepare(), deadline_s)
            if check.is_empty:
                check.finish()                                      # an iterator without a single bucket
        except TimeoutError as error:
            said = f"{self.name}: {phase}: the weights were not there in {deadline_s:g} s; {self._state}"
            raise DeadlineExceeded(said, what=f"{self.name}: {phase}", seconds=deadline_s) from error
        except Exception as error:
            raise SyncError(f"{self.name}: {phase}: {error}. {self._state}") from error

    async def _replace_weights(
        self, version: int, mode: UpdateMode, transfer: Sending | Receiving, check: UpdateCheck, phase: str
    ) -> float:
        """Returns: lower bound of the pause, seconds, from the engine's answer to `begin` until it is told to continue. Two message delays
        are not included.

        SGLang doesn't answer `pause`: its scheduler reads it after the forward under way, and `begin` after that, so the tokens of that
        forward come before the pause.
        """
        deadline_s = self.config.deadlines.update_s

        async def steps() -> float:
            await weight_transfer.pause_and_begin(self._manager, mode)
            stopped = time.perf_counter()
            self._dirty = f"an update to v{version} has begun"
            await transfer.load(self._manager, version, flush=mode == "retract")
            receipts = await self._inspect(RECEIPT, deadline_s)
            check.require_all_ranks(version, receipts)
            copies = self.config.tensor_parallel // self.config.attention_data_parallel
            self._seen_tokens = max(self._seen_tokens, self._ended_tokens + sum(int(r["unfinished"]) for r in receipts) // copies)
            await weight_transfer.end(self._manager)
            await weight_transfer.resume(self._manager)
            return time.perf_counter() - stopped

        replacing = asyncio.ensure_future(steps())
        try:
            return await self._process.wait(replacing, deadline_s, phase, keep=True)
        except BaseException as error:
            if not replacing.done():  # its weights are here, and a broadcast ends by weight_group_timeout_s: the engine's own fault
                self._process.declare_lost(f"{phase}: {error}")
                raise
            await self._give_up(version, error)
            raise SyncError(f"{self.name}: {phase}: {error}. {self._state}") from error

    @property
    def _state(self) -> str:
        return "The engine is dirty until a whole update succeeds" if self._dirty else "The engine still serves its old weights"

    async def _give_up(self, version: int, error: BaseException) -> None:
        """After a failed update nobody hangs: SGLang's session is closed and sampling resumes, without what ran on half-new weights."""
        if self._dirty is not None:
            self._failed_updates += 1
            self._dirty = f"the update to v{version} failed ({type(error).__name__}: {error})"
            self._manager.abort_request(abort_all=True)
        for step in (weight_transfer.end, weight_transfer.resume):
            try:
                await self._process.wait(step(self._manager), self.config.deadlines.control_s, "close a failed weight update", keep=True)
            except SyncError:
                continue                                            # no session was open: the update failed before it began
            except EvenkeelError as second:
                self._process.declare_lost(f"a weight update failed ({error}), and so did closing it ({second})")
                raise

    async def _inspect(self, action: str, deadline_s: float | None = None) -> list[dict[str, str]]:
        """The answer of each rank. Raises: EngineError naming the first that has none."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        self._process.raise_if_lost()
        call = self._manager.check_weights(CheckWeightsReqInput(action=action, selector="target"), None)
        with self._interrupted():
            success, message, ranks, _ = await self._process.wait(call, deadline_s or self.config.deadlines.control_s, action, keep=True)
        if not success:
            raise EngineError(f"{self.name}: {action}: {message}. Is evenkeel installed where SGLang runs, with its entry points?")
        answers = [dict(rank["checksums"]) for rank in ranks[: self.config.tensor_parallel]]  # each group answers for all ranks
        for rank, answer in enumerate(answers):
            if FAILURE in answer:
                raise EngineError(f"{self.name}: {action} failed in rank {rank} of {len(answers)}: {answer[FAILURE]}. Its log says where")
        return answers

    async def _control(self, call: Coroutine[Any, Any, tuple[bool, str]], phase: str) -> None:
        with self._interrupted():
            success, message = await self._process.wait(call, self.config.deadlines.update_s, phase, keep=True)
        if not success:
            raise SyncError(f"{self.name}: {phase}: {message}")

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        self._interruptions += 1
        try:
            yield
        finally:
            self._interruptions -= 1

    @property
    def _manager(self) -> Any:
        """SGLang's tokenizer manager: the owner's half of the engine."""
        self._process.raise_if_lost()
        return self._process.engine.tokenizer_manager


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
