"""One SGLang engine and one learner, kept alive over many short runs with different corrections.

Starting an engine takes longer than a short run; a comparison of forty presets, or of forty seeds, needs one engine for all of them.
The parts are the product's own: engine, reward processes, packing, correction, Megatron rank, weight transfer. What the service and the
controller do with actors and queues is a plain loop here, so the order of everything is fixed: with max_staleness D, the batch of step k
is sampled, while the learner trains, with the weights of version k - D (of the start, for the first ones).

    with KeptEngines.start(recipe(model_folder)) as kept:
        record = kept.run("mis-full", steps=20, seed=3)
        record.steps[-1]["k3_kl"], record.checksum
        other = kept.replay("tis-token", record)            # the same groups, bit for bit: only the correction differs
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from evenkeel.actors.config import RunConfig
from evenkeel.actors.groups.book import discard_reason
from evenkeel.actors.record.step_numbers import objective_metrics
from evenkeel.actors.settings.devices import visible_gpus
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct, defer
from evenkeel.correction.diagnostics.diagnose import diagnose
from evenkeel.correction.settings.schedule import needs_logprobs_at_sampling, needs_reference_logprobs, needs_topk
from evenkeel.correction.terms.advantages import group_advantages
from evenkeel.init_model import init_model_folder
from evenkeel.learner.kept_weights import KeptWeights
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.results import StepResult
from evenkeel.recipe import load_config
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.sampler import Sampler
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.tasks import build_task
from evenkeel.rollout.trajectory import Group, Prompt
from lab.background_loop import BackgroundLoop
from lab.weight_buckets import weight_buckets

RECIPE = Path(__file__).with_name("kept_engines.yaml")
# Prompts tried for each place in a batch before groups whose rewards are all alike are taken.
_DRAWS = 4


def recipe(model: Path, *overrides: str, path: Path = RECIPE) -> RunConfig:
    """A recipe on a model folder, which is made first if it is not there; with the devices and types of this machine."""
    config = load_config(RunConfig, path, [f"model={model}", *overrides])
    init_model_folder(config, if_missing=True, say=lambda _: None)
    return with_devices(config, has_gpu=visible_gpus() > 0)


@dataclass(frozen=True)
class RunSettings:
    """How a run trains; its correction is another setting."""

    seed: int = 0
    """Seed of the questions, the split into minibatches and the noise. Samples follow from the questions, and repeat as far as logits
    do."""
    learning_rate: float | None = None
    """None: the recipe's."""
    optimizer_steps_per_batch: int = 2
    tokens_per_microbatch: int | None = None
    """None: the recipe's. Another value changes only the rounding of sums."""
    mu_noise: float = 0.0
    """Standard deviation, nats, of Gaussian noise on the behaviour logprobs of trained tokens; none gets above 0."""
    topk: int = 0
    """Most likely tokens to keep at each position though the correction needs none: for replays by one that does."""
    detailed: bool = False
    """With the costlier diagnostics."""


@dataclass
class RunRecord:
    """The record of a run."""

    correction: CorrectionConfig
    first_version: int
    """The learner's version at its first step."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """For each step: correction.diagnostics by their names; the loss's numbers as a run names them; reward_mean (of all sampled groups),
    reward_trained_mean, entropy, grad_norm, learning_rate, optimizer_steps, skipped_steps, groups, sampled_groups, tokens,
    trained_tokens, and the seconds of generate_s, train_s, sync_s, step_s."""
    batches: list[list[Group]] = field(default_factory=list)
    """The groups of each step, as they were sampled."""
    checksum: str = ""
    """Checksum of all weights after the last step."""
    weights: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False)
    """[parameters] float32: all weights after the last step, in a row."""

    def series(self, name: str) -> list[float]:
        """The values of one number, step by step; NaN for a step without it."""
        return [step.get(name, float("nan")) for step in self.steps]


class KeptEngines:
    """Use `start`, and as a context manager. One run at a time."""

    def __init__(self, config: RunConfig, loop: BackgroundLoop, sampler: Sampler) -> None:
        self.config, self.engine = config, sampler.engine
        self.loop, self._sampler = loop, sampler
        self._task = build_task(config.rollout.task, ChatEncoder.of_folder(config.model, config.rollout.task))
        self._learner: LearnerRank | None = None
        self._next_group = 0

    @classmethod
    def start(cls, config: RunConfig) -> KeptEngines:
        """Start the engine and the reward processes (seconds to a minute on a CPU); the learner of a run starts with the run."""
        loop = BackgroundLoop()
        return cls(config, loop, loop.run(Sampler.start(config.model, config.rollout, name="kept engine")))

    def __enter__(self) -> KeptEngines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.loop.run(self._sampler.close())
        self.loop.stop()
        if self._learner is not None:
            self._learner.close()

    def run(self, correction: CorrectionConfig | str, *, steps: int, max_staleness: int = 1, **settings: Any) -> RunRecord:
        """Train from the start weights and a fresh optimizer.

        Args:
            correction: settings, or a preset's name.
            max_staleness: versions by which a batch trails the learner; 0 samples with the newest weights.
            settings: of RunSettings.
        """
        run = self._begin(correction, self.engine.version + 1, RunSettings(**settings))
        self._sync(run)
        position = run.settings.seed * 1_000_003  # each seed has questions of its own
        waiting: deque[tuple[list[Group], dict[str, float]]] = deque()
        for _ in range(max_staleness):
            waiting.append(self.loop.run(self._sample(position, run)))
            position += self.config.groups_per_step * _DRAWS
        for step in range(steps):
            began = time.monotonic()
            sampling = self.loop.start(self._sample(position, run))
            position += self.config.groups_per_step * _DRAWS
            if max_staleness == 0:
                waiting.append(sampling.result())
            groups, sampled = waiting.popleft()
            numbers = run.step(step, groups)
            if max_staleness > 0:
                waiting.append(sampling.result())
            synced = self._sync(run)
            run.record.steps.append(numbers | sampled | {"sync_s": synced, "step_s": time.monotonic() - began})
        return run.finish()

    def replay(self, correction: CorrectionConfig | str, of: RunRecord, *, steps: int | None = None, **settings: Any) -> RunRecord:
        """Train on the groups of another run, weight versions included, without the engine.

        Two replays with equal settings end alike, bit for bit: where they don't, the correction made the difference.
        """
        run = self._begin(correction, of.first_version, RunSettings(**settings))
        for step, groups in enumerate(of.batches[:steps]):
            began = time.monotonic()
            run.record.steps.append(run.step(step, groups) | {"step_s": time.monotonic() - began})
        return run.finish()

    def rescore(self, of: RunRecord, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Train once more as a run with max_staleness 1 did, and score its batches on the way.

        The repeated learner is the kept copy of each version's weights: before step k it holds what sampled the batch of step k + 1.
        Args:
            settings: those of the run.
        Returns: [T] logprobs of the trained tokens of staleness 1: by the engine that sampled them, by the learner at the weights that
            sampled them, by the learner at the weights that train on them.
        Raises: AssertionError if the repetition ends with other weights than the run did.
        """
        run = self._begin(of.correction, of.first_version, RunSettings(**settings))
        found: list[Tensor] = []
        at_sampling: Tensor | None = None
        for step, groups in enumerate(of.batches):
            batch = run.packed(groups)
            if at_sampling is not None:
                rows = torch.stack([batch.behavior_logprobs, at_sampling, run.learner.logprobs(batch)])
                found.append(rows[:, batch.loss_mask & (batch.weight_versions == run.version - 1)])
            if step + 1 < len(of.batches):
                at_sampling = run.learner.logprobs(run.packed(of.batches[step + 1]))
            run.step(step, groups)
        assert run.finish().checksum == of.checksum, "the repetition of a run has to be the run"
        behavior, sampling, target = torch.cat(found, 1)
        return behavior, sampling, target

    def _begin(self, correction: CorrectionConfig | str, version: int, settings: RunSettings) -> KeptRun:
        parts = CorrectionConfig(preset=correction) if isinstance(correction, str) else correction
        config = self.config.learner.model_copy(
            update={
                "optimizer_steps_per_batch": settings.optimizer_steps_per_batch,
                "seed": self.config.learner.seed + settings.seed,
                "learning_rate": settings.learning_rate or self.config.learner.learning_rate,
                "tokens_per_microbatch": settings.tokens_per_microbatch or self.config.learner.tokens_per_microbatch,
            }
        )
        self._learner = LearnerRank(config)
        self._learner.load(self.config.model)
        if needs_reference_logprobs(parts):
            self._learner.load_reference(self.config.model)
        return KeptRun(self.config, self._learner, parts, version, settings)

    def _sync(self, run: KeptRun) -> float:
        """Send the learner's weights to the engine; returns the seconds that it took."""
        began = time.monotonic()
        self.loop.run(self.engine.update_weights(run.version, list(weight_buckets(run.learner))))
        return time.monotonic() - began

    async def _sample(self, position: int, run: KeptRun) -> tuple[list[Group], dict[str, float]]:
        """Scored groups for one batch, at the engine's present weights, and what sampling them was like."""
        began = time.monotonic()
        version, topk = self.engine.version, max(needs_topk(run.record.correction), run.settings.topk)
        wanted = self.config.groups_per_step
        sampled: list[Group] = []
        kept: list[Group] = []
        spare: list[Group] = []
        for draw in range(_DRAWS if self.config.dynamic_sampling else 1):
            places = range(position + draw * wanted, position + draw * wanted + wanted - len(kept))
            groups = await asyncio.gather(*(self._group(self._task.train_prompt(place), version, topk) for place in places))
            sampled += groups
            for group in groups:
                is_useless = discard_reason(group.facts, dynamic_sampling=self.config.dynamic_sampling)
                (spare if is_useless else kept).append(group)
            if len(kept) == wanted:
                break
        rewards = [t.reward for group in sampled for t in group.valid if t.reward is not None]
        kept = (kept + [group for group in spare if group.is_trainable])[:wanted]
        return kept, {"reward_mean": statistics.fmean(rewards), "sampled_groups": len(sampled), "generate_s": time.monotonic() - began}

    async def _group(self, prompt: Prompt, version: int, topk: int) -> Group:
        self._next_group += 1
        return await self._sampler.group(prompt, group_id=self._next_group, admitted_version=version, topk=topk)


class KeptRun:
    """The learner's side of one run."""

    def __init__(self, config: RunConfig, learner: LearnerRank, correction: CorrectionConfig, version: int, settings: RunSettings) -> None:
        self.learner, self.version, self.settings = learner, version, settings
        self.record = RunRecord(correction, version)
        self._config = config
        self._noise = torch.Generator().manual_seed(settings.seed)
        self._needs_forward, self._defers = learner.config.needs_proximal_forward(correction), learner.config.defers(correction)
        self._earlier = KeptWeights(learner) if needs_logprobs_at_sampling(correction) else None

    def step(self, step: int, groups: list[Group]) -> dict[str, float]:
        """Pack, correct, train, diagnose, as the service and the learner do; the version grows by one."""
        began = time.monotonic()
        correction = self.record.correction
        batch = self._with_forwards(self._noisy(self.packed(groups)))
        corrected = (defer if self._defers else correct)(batch, correction)
        result = self.learner.step(corrected, correction, step=step)
        numbers = diagnose(corrected.batch, corrected, result.target_logprobs, decided=result.decided, detailed=self.settings.detailed)
        self.version += 1
        self.record.batches.append(groups)
        return dict(numbers) | _learner_numbers(result) | _batch_numbers(groups) | {"train_s": time.monotonic() - began}

    def finish(self) -> RunRecord:
        checksums = sorted(self.learner.weight_checksums().items())
        weights = (tensor for bucket in weight_buckets(self.learner) for tensor in bucket.tensors().values())
        self.record.weights = torch.cat([tensor.flatten().float() for tensor in weights])
        self.record.checksum = hashlib.blake2b(repr(checksums).encode(), digest_size=16).hexdigest()
        return self.record

    def packed(self, groups: list[Group]) -> PackedBatch:
        """The groups as a batch for the learner at its present version."""
        part, sampling = self.record.correction.advantage, self._config.rollout.sampling
        batch = pack_groups(
            groups,
            learner_version=self.version,
            advantage=partial(group_advantages, **part.of_group),
            overlong=self._config.rollout.overlong,
            max_tokens={"": sampling.max_tokens},
            temperature=sampling.temperature,
        ).batch
        if needs_topk(self.record.correction) == 0:
            batch = replace(batch, topk_ids=None, topk_logprobs=None)
        return batch

    def _noisy(self, batch: PackedBatch) -> PackedBatch:
        if self.settings.mu_noise == 0:
            return batch
        noise = torch.randn(batch.num_tokens, generator=self._noise) * self.settings.mu_noise
        behavior: Tensor = torch.where(batch.loss_mask, (batch.behavior_logprobs + noise).clamp(max=0), batch.behavior_logprobs)
        if batch.topk_ids is None or batch.topk_logprobs is None:
            return replace(batch, behavior_logprobs=behavior)
        is_sampled = (batch.topk_ids == batch.token_ids[:, None]) & batch.loss_mask[:, None]
        listed = torch.where(is_sampled, behavior[:, None], batch.topk_logprobs)
        return replace(batch, behavior_logprobs=behavior, topk_logprobs=listed)

    def _with_forwards(self, batch: PackedBatch) -> PackedBatch:
        proximal = self.learner.logprobs(batch) if self._needs_forward else None
        reference = self.learner.reference_logprobs(batch) if needs_reference_logprobs(self.record.correction) else None
        at_sampling = None
        if self._earlier is not None:
            oldest = min(batch.weight_versions[batch.loss_mask].tolist(), default=0)  # no later batch has older tokens
            at_sampling = self._earlier.at_sampling(batch, oldest=oldest)
            self._earlier.keep(self.version, oldest=oldest)
        return replace(batch, proximal_logprobs=proximal, reference_logprobs=reference, at_sampling_logprobs=at_sampling)


def _learner_numbers(result: StepResult) -> dict[str, float]:
    numbers = {
        "loss": result.loss,
        "learning_rate": result.learning_rate,
        "optimizer_steps": result.optimizer_steps,
        "skipped_steps": result.skipped_steps,
        "tokens": result.tokens,
        "trained_tokens": result.trained_tokens,
    }
    if result.grad_norm is not None:
        numbers["grad_norm"] = result.grad_norm
    if result.entropy is not None:
        numbers["entropy"] = result.entropy
    return numbers | objective_metrics(result)


def _batch_numbers(groups: list[Group]) -> dict[str, float]:
    rewards = [t.reward for group in groups for t in group.valid if t.reward is not None]
    return {"reward_trained_mean": statistics.fmean(rewards), "groups": len(groups)}
