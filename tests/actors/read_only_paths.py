"""Run by service/test_read_only_batches.py in a process of its own: the ways of a batch, with every preset, where what another process made
may only be read.

So it lies in Ray's object store. A write ends this process by SIGSEGV, which a child shows first; what has gone well is said, a line each.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from torch import Tensor

from evenkeel.actors.carriers import PreparedBatch
from evenkeel.actors.config import EarlyWarningConfig
from evenkeel.correction.batch import CorrectedBatch, FinalDecision, PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct, defer
from evenkeel.correction.decision import no_counts
from evenkeel.correction.diagnostics.diagnose import clipped_tokens, diagnose
from evenkeel.correction.early_warning.monitor import Monitor
from evenkeel.correction.presets.methods import PRESETS
from evenkeel.correction.settings.schedule import needs_proximal_forward, needs_topk
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.kept_weights import KeptWeights
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.results import SplitLogprobs, StepValues
from evenkeel.rollout.engine.weight_transfer import require_checksums
from evenkeel.rollout.trajectory import Group, TopLogprobs
from lab.weight_buckets import weight_buckets
from tests.actors.read_only_memory import read_only
from tests.actors.service.service_scene import GROUPS, Learner, ServiceScene, answered, play, result_of
from tests.learner.learner_cases import VOCAB, grouped_batch, learner_on, off_policy_batch
from tests.learner.moe_cases import random_routes

SHARED = [([9, 9, 9], [3, 8, 2]), ([6, 6], [9, 4]), ([5, 5], [0, 7])]
"""Prompts and answers of groups whose prompts are read once."""


# The correction service


class FarLearner(Learner):
    """Its answers come through the store."""

    async def proximal(self, batch: PackedBatch, *, version: int) -> SimpleNamespace:
        found = await super().proximal(batch, version=version)
        return SimpleNamespace(logprobs=read_only(found.logprobs), route_places=found.route_places)

    async def reference_logprobs(self, batch: PackedBatch, *, version: int) -> Tensor:
        return read_only(await super().reference_logprobs(batch, version=version))

    async def at_sampling(self, batch: PackedBatch, *, version: int, oldest: int, with_now: bool) -> SplitLogprobs:
        return read_only(await super().at_sampling(batch, version=version, oldest=oldest, with_now=with_now))


def with_topk(group: Group, k: int) -> Group:
    """Its answers with the K most likely tokens at each position, if there are to be any."""
    if not k:
        return group
    rows = [[(-1.0 - i, i) for i in range(k)]]
    answers = (replace(one, top_logprobs=TopLogprobs.of(k, rows * len(one.response_ids))) for one in group.trajectories)
    return replace(group, trajectories=tuple(answers))


def values_of(prepared: PreparedBatch) -> StepValues:
    """What a learner says that dropped nothing."""
    corrected: Any = prepared.corrected
    target = torch.where(corrected.batch.loss_mask, corrected.batch.behavior_logprobs + 0.1, 0.0)
    decided = FinalDecision(corrected.keep_mask.clone(), corrected.importance_weights.clone(), no_counts(prepared.correction))
    return StepValues(target, decided, torch.ones_like(target))


def serve(preset: str, steps: int) -> None:
    """Two batches from the queue to their diagnosis; what the service hands over, it hands over in such memory."""

    async def scenario() -> None:
        correction = CorrectionConfig.model_validate({"preset": preset, "kl": {"coefficient": 0.1}})
        learner, monitor = LearnerConfig(optimizer_steps_per_batch=steps), EarlyWarningConfig(split_every=1)
        scene = ServiceScene(correction=correction, learner=learner, monitor=monitor)
        scene.learner = FarLearner()
        k = needs_topk(correction)
        for version in range(2):
            tickets = await scene.admit(version * GROUPS, (version + 1) * GROUPS)
            waiting = asyncio.create_task(scene.next_batch(version))
            await scene.put(*[with_topk(answered(ticket), k) for ticket in tickets], apart_s=0.0)
            prepared = await waiting
            values = read_only(values_of(prepared))
            assert await scene.service.observe(version + 1, version, result_of(values)) is not None
            scene.books.advance(version + 1, [group.group_id for group in prepared.groups])
        assert await scene.service.scatter() is not None
        scene.stop()

    play(scenario)


# The learner


def far_batch(learner: LearnerRank, config: CorrectionConfig, *, is_deferred: bool) -> PackedBatch:
    """One with all that this correction looks at, two versions old."""
    batch = off_policy_batch(learner, seed=3)
    k, draw = needs_topk(config), torch.Generator().manual_seed(0)
    if k:
        found = torch.randn(batch.num_tokens, VOCAB, generator=draw).log_softmax(-1).topk(k)
        batch = replace(batch, topk_ids=found.indices, topk_logprobs=found.values)
    proximal = None if is_deferred else batch.proximal_logprobs
    reference = batch.behavior_logprobs - 0.1
    batch = replace(batch, proximal_logprobs=proximal, reference_logprobs=reference, at_sampling_logprobs=batch.behavior_logprobs - 0.05)
    return read_only(replace(batch, learner_version=2, advantages_by="own"))


def train(learner: LearnerRank, preset: str) -> None:
    """A step on a batch that came from the service, and the diagnosis of what the learner said of it."""
    config, steps = CorrectionConfig(preset=preset), learner.config.optimizer_steps_per_batch
    is_deferred = steps == 1 and not needs_proximal_forward(config, steps)
    batch = far_batch(learner, config, is_deferred=is_deferred)
    corrected: CorrectedBatch = read_only((defer if is_deferred else correct)(batch, config))
    result = learner.step(corrected, config, step=1)
    assert result.optimizer_steps + result.skipped_steps == steps
    values = read_only(result.values)
    numbers = diagnose(batch, corrected, values.target_logprobs, decided=values.decided, entropy=values.entropies, detailed=True)
    clipped_tokens(batch, values.decided)
    Monitor().update(1, numbers)


def ask(folder: Path) -> None:
    """What else the learner is asked about a batch: logprobs of three policies, routes to replay, shared prompts; and its weights."""
    tis = CorrectionConfig(preset="tis-token")
    with learner_on(folder / "dense") as learner:
        batch = read_only(grouped_batch(SHARED))
        kept = KeptWeights(learner)
        kept.keep(0, oldest=0)
        learner.load_reference(folder / "dense")
        for found in (kept.at_sampling(batch, oldest=0), learner.reference_logprobs(batch), learner.proximal(batch).logprobs):
            assert bool(found[batch.loss_mask].isfinite().all())
        assert learner.step(read_only(defer(batch, tis)), tis, step=1).optimizer_steps == 1
        for bucket in map(read_only, weight_buckets(learner)):
            require_checksums([bucket], {name: bucket.checksums()[name] for name in bucket.tensors()})
    for replay in ("rollout", "recompute"):
        with learner_on(folder / "moe", routing_replay=replay, optimizer_steps_per_batch=2) as learner:
            batch = grouped_batch(SHARED)
            batch = read_only(replace(batch, routed_experts=random_routes(batch)) if replay == "rollout" else batch)
            said = read_only(learner.proximal(batch))
            routes = said.routed_experts if said.routed_experts is not None else batch.routed_experts
            batch = read_only(replace(batch, proximal_logprobs=said.logprobs, routed_experts=routes))
            assert learner.step(read_only(correct(batch, tis)), tis, step=1).optimizer_steps == 2


def signal_of_a_write() -> int:
    """By which a child of this process ends that writes to such a batch; it has nothing to import."""
    if not (child := os.fork()):
        read_only(grouped_batch(SHARED)).advantages.mul_(2.0)
        os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path) -> None:
    """Args: folder: of two models, "dense" and "moe". Whoever makes them imports for seconds."""
    print("a write:", signal.Signals(signal_of_a_write()).name, flush=True)
    faulthandler.enable()
    ray.put = read_only
    ask(folder)
    print("asked", flush=True)
    for steps in (1, 2):
        with learner_on(folder / "dense", optimizer_steps_per_batch=steps) as learner:
            for preset in PRESETS:
                serve(preset, steps)
                train(learner, preset)
                print(preset, steps, flush=True)


def play_into(folder: Path, out: Path, complaints: Path) -> None:
    """`main` in a process whose two outputs are these files."""
    for number, path in ((1, out), (2, complaints)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    main(folder)
