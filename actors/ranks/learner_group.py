"""The learner as Ray actors, one a rank, and the handle that drives them together.

In a collective call every rank waits for the others. If the calls of two callers reached the ranks in different orders, the ranks would
deadlock, or reduce tensors of different calls together. So there is one `LearnerGroup`, in the controller's process, and it makes one
collective call at a time (collective_calls.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import RayTaskError

from evenkeel.actors.carriers import ActorInfo, ExportPlan, LaneReport, WaitNotice, WeightChecksums, WeightSnapshot
from evenkeel.actors.cluster.placement import RankPlaces
from evenkeel.actors.groups.tokens import checksums_of, disregard
from evenkeel.actors.processes.part_heartbeat import sequential_actor
from evenkeel.actors.processes.supervision import USUAL_START, argument_gone, call_with_retries, kill, lost_if_late, wait_for
from evenkeel.actors.ranks.collective_calls import CollectiveCaller, all_of
from evenkeel.actors.ranks.learner_rank_actor import ABORTABLE, LearnerRankActor
from evenkeel.actors.settings.deadlines import wide_fields_call_s
from evenkeel.correction.errors import ConfigError, StepAborted

if TYPE_CHECKING:  # torch and Megatron are imported in the ranks' own processes
    from evenkeel.correction.config import CorrectionConfig
    from evenkeel.learner.results import StepResult


# Seconds between two checks whether a checkpoint is written: a fifth of the time that it has taken so far, within these bounds.
_LEAST_POLL_S, _MOST_POLL_S = 0.2, 1.0
# Most ranks that a notice or an error names.
_NAMED = 4


def refuse_a_mixture(infos: Sequence[ActorInfo]) -> None:
    """Raises: ConfigError if the ranks' layers aren't of one kind: `auto` goes by what is installed where a rank is, and the parts of one
    model would round in different ways."""
    if len(chosen := sorted({info.layers for info in infos})) == 1:
        return
    found = []
    for layers in chosen:
        ranks = [info for info in infos if info.layers == layers]
        names = ", ".join(info.name for info in ranks[:_NAMED]) + f" and {len(ranks) - _NAMED} more" * (len(ranks) > _NAMED)
        hosts = ", ".join(sorted({info.host for info in ranks}))
        found.append(f"{layers} on rank{'s' * (len(ranks) > 1)} {names} ({hosts})")
    raise ConfigError(
        f"learner.layers = auto: the ranks have chosen {' and '.join(found)}, by what is installed on their nodes, and a model has "
        "layers of one kind",
        remedy="Install the same packages on all nodes, or set learner.layers: local",
    )


class LearnerGroup:
    """All ranks of the learner, driven together: the one caller of their collective calls. It stays in the process that made it."""

    def __init__(self, ranks: list[Any], *, version: int, step_s: float) -> None:
        self._ranks, self.step_s = ranks, step_s
        self._collective = CollectiveCaller({f"rank {number}": rank for number, rank in enumerate(ranks)})
        self._version = version
        self.start_took_s = 0.0
        self.told: Callable[[LaneReport], None] = lambda _: None
        """Takes what each rank has done, with its answer to a step."""
        self._is_pipelined = False

    @classmethod
    async def start(
        cls,
        places: RankPlaces,
        model: Path,
        *,
        version: int,
        bind: str,
        start_s: float,
        step_s: float,
        made: Callable[[LearnerGroup], None] = lambda _: None,
    ) -> tuple[LearnerGroup, list[ActorInfo]]:
        """Start the ranks and load the model.

        Args: made: is given the group before its ranks have started, so that ranks that never come up can be killed.
        Returns: the group, and for each rank its process id and metrics endpoint.
        Raises: ActorLost also past `start_s`: a rank that was stopped may answer again a moment later, but its start's answer is lost.
            ConfigError if ranks have chosen different layers.
        """
        config, world_size, actor = places.config, places.config.world_size, sequential_actor(LearnerRankActor)
        ranks: list[Any] = [actor.options(**places.options(rank)).remote(config, rank, bind=bind) for rank in range(world_size)]
        group, began = cls(ranks, version=version, step_s=step_s), time.monotonic()
        group._is_pipelined = config.pipeline_parallel > 1
        made(group)
        in_time = partial(wait_for, deadline_s=start_s, usual_s=USUAL_START * start_s)
        master = await lost_if_late(in_time(ranks[0].address.remote(), "process of learner rank 0 <- Ray"))
        starts = [r.start.remote(world_size, master, model, version) for r in ranks]
        infos = await lost_if_late(all_of(in_time(s, f"learner start <- rank {i}") for i, s in enumerate(starts)))
        refuse_a_mixture(infos)
        group.start_took_s = time.monotonic() - began
        return group, infos

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LearnerGroup stays in its process: calls from a second one would reach the ranks in another order")

    @property
    def rank_zero(self) -> Any:
        """Rank 0, for calls that concern no other rank."""
        return self._ranks[0]

    @property
    def version(self) -> int:
        """Version of the weights after all calls made so far."""
        return self._version

    async def fetch(
        self, batch: Any, correction: CorrectionConfig | None, *, step: int, limit_s: float, everything: bool = False
    ) -> dict[int, str]:
        """Have every rank read the wide fields of the sequences that it computes with in the next call on this batch: a forward pass, or
        training if `correction` is given.

        Args:
            batch: reference to a PackedBatch, or to the CorrectedBatch that will be trained in `step`.
            limit_s: for a rank to read them.
            everything: every rank reads those of all sequences.
        Returns: why groups can't be read (all of it or a part), by group id.
        Raises: ActorLost also past the deadline: fields that can't be read are reported before it, so the batch itself did not come.
        """
        asks = (partial(rank.fetch.remote, batch, correction, step, limit_s, everything=everything) for rank in self._ranks)
        what, deadline_s = "wide fields of a batch", wide_fields_call_s(limit_s, self.step_s)
        reading = all_of(call_with_retries(ask, f"{what} <- rank {i}", deadline_s=deadline_s) for i, ask in enumerate(asks))
        lost = await lost_if_late(reading)
        return {group: why for of_rank in lost for group, why in sorted(of_rank.items())}

    async def step(self, corrected: Any, correction: CorrectionConfig, *, step: int, rate_scale: float = 1.0) -> StepResult:
        """Train on a batch; the version grows by one.

        Args: corrected: reference to a CorrectedBatch; rate_scale: factor on the learning rate of its optimizer steps.
        Returns: the result with a reference to its values.
        Raises: StepAborted after `abort`, and an error of which `argument_gone` is true if the batch is gone before a rank has begun with
            it; the version is as it was.
        """
        self._version += 1
        what = f"learner step {step}"
        try:
            answers = await self._ask("step", corrected, correction, step, rate_scale, what=what, results=2)
        except (StepAborted, RayTaskError) as error:
            if isinstance(error, StepAborted) or argument_gone(error):
                self._version -= 1
            raise
        for answer, _ in answers:
            self.told(answer.told)
        (first, values), *_ = answers
        whole: StepResult = replace(first.result, values=values)
        return whole

    async def abort(self) -> None:
        """End the step or the forward pass under way before its next micro-batch, and begin no further one: there is no time for it.

        A step of which a rank is through with all micro-batches goes on to its end, as does all that is under way on pipeline stages.
        """
        self._collective.refuse(ABORTABLE)
        if not self._is_pipelined:
            await self._collective.abort()

    async def proximal(self, batch: Any, *, version: int) -> Any:
        """log pi of the batch's tokens at the weights of `version`, and where they were sent if training is to follow.

        Args:
            batch: reference to a PackedBatch.
        Returns: reference to a Proximal.
        """
        return await self._found("proximal", batch, version, what=f"proximal logprobs v{version}")

    async def load_reference(self, model: Path) -> None:
        await self._ask("load_reference", model, what="reference policy")

    async def reference_logprobs(self, batch: Any, *, version: int) -> Any:
        """Reference to log pi of the batch's tokens under the reference policy's weights, [N] float32; arguments as of `proximal`."""
        return await self._found("reference_logprobs", batch, version, what=f"reference logprobs v{version}")

    async def keep_weights(self, version: int, *, oldest: int) -> None:
        """Every rank keeps a copy of its weights, which are those of `version`, and frees copies older than `oldest`."""
        await self._ask("keep_weights", version, oldest, what=f"copy of the weights v{version} to keep")

    async def forget_weights(self, *, before: int) -> None:
        """Every rank frees its copies of weights older than `before`."""
        await self._ask("forget_weights", before, what=f"freeing kept weights before v{before}")

    async def at_sampling(self, batch: Any, *, version: int, oldest: int, with_now: bool) -> Any:
        """Reference to SplitLogprobs. Arguments as of `proximal`; copies of weights older than `oldest` are freed."""
        return await self._found("at_sampling", batch, version, oldest, with_now, what=f"logprobs at the weights that sampled, v{version}")

    async def export(self, plan: ExportPlan, *, deadline_s: float | None = None) -> WeightSnapshot:
        """Gather the present weights and store or broadcast them as the plan says, in one pass."""
        what = f"copy of the weights v{self._version}"
        (snapshot,), *_ = await self._ask("export", self._version, plan, what=what, deadline_s=deadline_s)
        weights: WeightSnapshot = snapshot
        return weights

    async def checksums(self, buckets: Sequence[Any], *, deadline_s: float) -> WeightChecksums:
        """Checksums of weights in the object store, computed in a Ray task, not by a rank.

        Args:
            buckets: references to WeightBuckets.
        """
        by_name, digest = ray.remote(num_cpus=0, num_returns=2)(checksums_of).remote(*buckets)
        disregard(digest, by_name)
        return WeightChecksums(by_name, await wait_for(digest, "checksums of the weights", deadline_s=deadline_s))

    async def settled(self) -> None:
        """Wait until the ranks have run all collective calls. Raises: ActorLost if one of them has missed one."""
        await self._collective.settled(deadline_s=self.step_s)

    async def begin_save(self, folder: Path, hf_folder: Path, *, deadline_s: float) -> None:
        """Have every rank copy its part of a checkpoint; the ranks write it to disk during their next steps."""
        await self._ask("begin_save", folder, hf_folder, what="copy for a checkpoint", deadline_s=deadline_s)

    async def checkpoint_bytes(self, *, deadline_s: float) -> int:
        """Bytes of a checkpoint of the present state."""
        return sum(await self._each("checkpoint_bytes", "size of a checkpoint", deadline_s))

    async def saved(self, *, deadline_s: float, what: str = "checkpoint", notice: Callable[[WaitNotice], None] | None = None) -> None:
        """Wait until every rank has written what it copied.

        Args: what: is written, in words, for messages. notice: as wait_for.
        Raises: DataError if a rank could not; DeadlineExceeded, which names those that haven't.
        """
        are_written = [False for _ in self._ranks]

        async def ask(number: int, rank: Any) -> None:  # its own answer counts at once: another rank may give none
            are_written[number] = await call_with_retries(rank.is_saved.remote, f"{what} <- rank {number}", deadline_s=deadline_s)

        async def until_written() -> None:
            clock = asyncio.get_running_loop().time
            began = clock()
            while True:
                await all_of(ask(number, rank) for number, rank in enumerate(self._ranks))
                if all(are_written):
                    return
                await asyncio.sleep(min(max(_LEAST_POLL_S, (clock() - began) / 5), _MOST_POLL_S))

        async def missing() -> str:
            late = [f"rank {number}" for number, is_written in enumerate(are_written) if not is_written]
            return f"not written by {', '.join(late[:_NAMED])}" + (f" and {len(late) - _NAMED} more" if len(late) > _NAMED else "")

        await wait_for(until_written(), f"{what} <- learner", deadline_s=deadline_s, notice=notice, detail=missing)

    async def restore(self, folder: Path, version: int, *, deadline_s: float) -> None:
        """Load a checkpoint, whose weights have this version, in all ranks. Calls under way are given up."""
        self._collective.begin_anew()
        self._version = version
        await self._ask("restore", folder, version, what=f"restoring {folder}", deadline_s=deadline_s)

    @property
    def ranks(self) -> dict[str, Any]:
        """The actors of all ranks, by their names in messages."""
        return {f"learner rank {number}": rank for number, rank in enumerate(self._ranks)}

    def kill(self) -> None:
        kill(*self._ranks)

    async def _ask(self, method: str, *arguments: Any, what: str, deadline_s: float | None = None, results: int = 1) -> list[list[Any]]:
        return await self._collective.ask(method, *arguments, what=what, deadline_s=deadline_s or self.step_s, results=results)

    async def _found(self, method: str, *arguments: Any, what: str) -> Any:
        """Reference to rank 0's second result, when all ranks are done."""
        (_, found), *_ = await self._ask(method, *arguments, what=what, results=2)
        return found

    async def _each(self, method: str, what: str, deadline_s: float) -> list[Any]:
        """All ranks' answers to a call that is not collective, and may be repeated."""
        asks = (getattr(rank, method).remote for rank in self._ranks)
        return await all_of(call_with_retries(ask, f"{what} <- rank {i}", deadline_s=deadline_s) for i, ask in enumerate(asks))
