"""The correction service, the driver's side of it with its book, and a learner whose logprobs are a code of the token ids."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from evenkeel.actors.carriers import Observation, PreparedBatch, Ticket
from evenkeel.actors.config import DeadlinesConfig, EarlyWarningConfig, RunConfig
from evenkeel.actors.driver.batches import BatchSource
from evenkeel.actors.driver.parts import StartingPoint
from evenkeel.actors.groups.tokens import GONE
from evenkeel.actors.service.correction_service import CorrectionService
from evenkeel.correction.batch import FinalDecision, PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.decision import no_counts
from evenkeel.correction.wide import WideFields, WidePlace
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.results import SplitLogprobs, StepResult, StepValues
from evenkeel.rollout.config import RolloutConfig
from evenkeel.rollout.trajectory import Group
from tests.actors.cases import FakeActor, OpenBook, group, prompts, stored, trajectory

GROUPS = 4
ROLLOUT = RolloutConfig.model_validate(
    {
        "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
        "reward": {"kind": "exact_match"},
        "sampling": {"max_tokens": 16},
        "engine": {"device": "cpu"},
    }
)


def code(token_ids: Tensor) -> Tensor:
    """The fake learner's logprob of a token: a different number for each token id, as far from -1 as a real one may be."""
    return -1.0 - token_ids / 10_000.0


def routes(token_ids: Tensor) -> Tensor:
    """[N, 1 layer, 2 experts]: likewise."""
    return torch.stack([token_ids % 100, token_ids // 100], -1)[:, None].to(torch.uint8)


class Learner:
    """Keeps what it was asked, at which version."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, PackedBatch]] = []
        self.asked_then: list[PackedBatch] = []
        """Those that it was to score at the weights that sampled them."""
        self.fetched: list[int] = []
        """Sequences of each batch whose wide fields it was to read."""
        self.lost = set[int]()
        """Groups that it will not find."""

    async def proximal(self, batch: PackedBatch, *, version: int) -> SimpleNamespace:
        self.asked.append((version, batch))
        await asyncio.sleep(0)
        bounds = itertools.pairwise(batch.offsets.tolist())
        fields = tuple(WideFields(routes(batch.token_ids[start : end - 1])) for start, end in bounds)
        places = tuple(WidePlace(((fields, i),), array("I")) for i in range(len(fields)))
        return SimpleNamespace(logprobs=code(batch.token_ids), route_places=places)

    async def fetch(self, batch: Any, correction: CorrectionConfig | None, **_: Any) -> dict[int, str]:
        """Without Ray a batch holds what it names."""
        packed = batch.batch if correction else batch
        self.fetched.append(packed.num_sequences)
        lost = sorted(set(packed.group_ids.tolist()) & self.lost)
        self.lost -= set(lost)
        return dict.fromkeys(lost, GONE)

    async def reference_logprobs(self, batch: PackedBatch, *, version: int) -> Tensor:
        return 2 * code(batch.token_ids)

    async def keep_weights(self, version: int, *, oldest: int) -> None:
        self.kept = {v for v in getattr(self, "kept", set()) if v >= oldest} | {version}

    async def forget_weights(self, *, before: int) -> None:
        self.kept = {v for v in self.kept if v >= before}

    async def at_sampling(self, batch: PackedBatch, *, version: int, oldest: int, with_now: bool) -> SplitLogprobs:
        """The engine says -1 of every token. The learner: 0.1 more at kept weights of even versions and 0.2 at odd ones; now, 0.5 more."""
        self.asked_then.append(batch)
        self.kept = getattr(self, "kept", set())
        kept = sum((batch.weight_versions == v for v in self.kept), torch.zeros_like(batch.loss_mask))
        self.kept = {v for v in self.kept if v >= oldest}
        told = torch.where(kept.bool(), -0.9 + 0.1 * (batch.weight_versions % 2), torch.nan)
        return SplitLogprobs(told, now=torch.full_like(told, -0.5) if with_now else None)


def answered(ticket: Ticket, *, rewards: Sequence[float | None] = (0.0, 1.0)) -> Group:
    """A group whose tokens say where they belong: response token j of answer a of group g has the id 100 g + 10 a + j; lengths differ."""
    lengths = [2 + (ticket.group_id + a) % 3 for a in range(len(rewards))]
    ids = [[100 * ticket.group_id + 10 * a + j for j in range(length)] for a, length in enumerate(lengths)]
    pairs = zip(ids, rewards, strict=True)
    answers = (trajectory(ticket.prompt, tokens, reward=reward, version=ticket.admitted_version) for tokens, reward in pairs)
    return replace(group(ticket), trajectories=tuple(answers))


def result_of(values: StepValues) -> StepResult:
    """A step's result of which these are the values."""
    nothing = StepResult.of_nothing(0, CorrectionConfig(), updates=1, learning_rate=0.0, loss_scale=None)
    return replace(nothing, values=values)


class ServiceScene:
    def __init__(
        self,
        *,
        steps: int = 2,
        preset: str = "decoupled-ppo",
        max_staleness: int = 1,
        monitor_state: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.learner = Learner()
        settings: dict[str, Any] = {
            "model": "none",
            "steps": 100,
            "correction": CorrectionConfig.model_validate({"preset": preset}),
            "groups_per_step": GROUPS,
            "max_staleness": max_staleness,
            "dynamic_sampling": False,
            "rollout": ROLLOUT,
            "learner": LearnerConfig(optimizer_steps_per_batch=steps),
            "deadlines": DeadlinesConfig(batch_s=5.0, step_s=2.0, checkpoint_s=1.0),
            "monitor": EarlyWarningConfig(detailed=False),
        }
        self.config = RunConfig.model_validate(settings | changes)
        self.service, self.told = CorrectionService(self.config, monitor_state), list[str]()
        recorder: Any = SimpleNamespace(event=lambda _, text: self.told.append(text), waiting=lambda notice: None, did=lambda _: None)
        self.source = BatchSource(self.config, StartingPoint(Path("none")), None, recorder)  # type: ignore[arg-type]
        self.source.service = FakeActor(self.service)
        self.books = OpenBook(groups_per_step=GROUPS, max_staleness=max_staleness)
        self.books.book, self.books.changes = self.source.book, self.source.changes

    async def admit(self, start: int, stop: int) -> list[Ticket]:
        return self.books.admit(prompts(start, stop))

    async def next_batch(self, version: int) -> PreparedBatch:
        """As the controller asks."""
        pool: Any = SimpleNamespace(last_progress=lambda: 0.0)
        return await self.source.next(version, self.learner, pool, step=version)  # type: ignore[arg-type]

    def stop(self) -> None:
        self.source.stop()

    async def batch(self, version: int) -> PreparedBatch:
        """The whole way of a batch up to the learner."""
        tickets = await self.admit(version * GROUPS, (version + 1) * GROUPS)
        waiting = asyncio.create_task(self.next_batch(version))
        await self.put(*[answered(ticket) for ticket in tickets])
        prepared = await waiting
        self.books.advance(version + 1, [g.group_id for g in prepared.groups])
        return prepared

    async def observe(
        self,
        prepared: PreparedBatch,
        *,
        gap: float = 0.1,
        decided: FinalDecision | None = None,
        step: int | None = None,
        entropies: Tensor | None = None,
    ) -> Observation:
        """After a step whose target logprobs are the behaviour's, which are -1, plus `gap`, and which dropped what `decided` says."""
        target = torch.full((prepared.corrected.batch.num_tokens,), -1.0 + gap)
        corrected = prepared.corrected
        if decided is None:
            decided = FinalDecision(corrected.keep_mask, corrected.importance_weights, no_counts(prepared.correction))
        number = prepared.version + 1 if step is None else step
        values = StepValues(target, decided, torch.full_like(target, torch.nan) if entropies is None else entropies)
        observation = await self.service.observe(number, prepared.version, result_of(values))
        assert observation is not None
        return observation

    async def put(self, *groups: Group, apart_s: float = 0.01) -> None:
        for finished in groups:
            self.books.put(*stored(finished))
            await asyncio.sleep(apart_s)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))  # type: ignore[arg-type]


def no_decision(prepared: PreparedBatch) -> FinalDecision:
    return FinalDecision(prepared.corrected.keep_mask, prepared.corrected.importance_weights, no_counts(prepared.correction))
