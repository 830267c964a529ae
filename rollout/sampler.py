"""A prompt becomes its group of scored trajectories: where engine, tokenizer and reward processes meet.

What it is not: it doesn't choose prompts (actors/driver/controller.py does), and hands nothing on (the rollout worker does).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evenkeel.correction.errors import EngineError
from evenkeel.rollout.config import AnswerSampling, RolloutConfig, SamplingConfig
from evenkeel.rollout.continuation import is_begun
from evenkeel.rollout.engine.engine import RolloutEngine, in_answer_thread
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Group, Prompt, Trajectory, UnfinishedGroup


class Sampler:
    """One engine with its tokenizer and its scorer. Calls overlap; all belong to the event loop that started the engine."""

    def __init__(
        self, engine: RolloutEngine, encoder: ChatEncoder, rewards: RewardPool, settings: SamplingConfig, *, seed: int = 0
    ) -> None:
        """
        Args:
            encoder: of the model; knows what ends an answer, and an answer's text.
            settings: samples of a group, their temperature and length.
            seed: of the run's samples, see sample_seed.
        """
        self.engine = engine
        self._encoder, self._rewards, self._settings, self._seed = encoder, rewards, settings, seed
        self._busy = _BusyClock()

    @classmethod
    async def start(
        cls,
        model: Path,
        config: RolloutConfig,
        *,
        sample: Prompt | None = None,
        version: int = 0,
        name: str = "engine",
        seed: int = 0,
        topk: int = 0,
        has_weights: bool = True,
    ) -> Sampler:
        """Start the reward processes and the engine (seconds to a minute on a CPU).

        Args:
            sample: the reward function is tried on it first, so that its mistakes show now.
            version: weight version of the model folder.
            topk: the most that `group` will be asked for.
            has_weights: see RolloutEngine.start.
        Raises: RewardError for a reward function that fails on the sample; as RolloutEngine.start. No process is left then.
        """
        rewards = RewardPool(config.reward, config.task)
        await rewards.check(sample)
        try:
            engine = await RolloutEngine.start(model, config.engine, version=version, name=name, has_weights=has_weights)
        except BaseException:
            await rewards.close()
            raise
        sampler = cls(engine, ChatEncoder.of_folder(model, config.task), rewards, config.sampling, seed=seed)
        try:
            engine.check_topk(topk)
        except BaseException:
            await sampler.close()
            raise
        return sampler

    async def close(self) -> None:
        await self.engine.shutdown()
        await self._rewards.close()

    async def group(
        self, prompt: Prompt, *, group_id: int, admitted_version: int, topk: int = 0, begun: UnfinishedGroup | None = None
    ) -> Group | UnfinishedGroup:
        """Sample the G trajectories of a prompt, and score them.

        Args:
            topk: most likely tokens to keep with each sampled one, for corrections that look at them.
            begun: what another worker has handed back of this group.
        Returns: trajectories in the order of their seeds; one that was aborted, or that could not be scored, carries an error. After
            `hand_back` what there is of the group, unless all of its answers are whole.
        Raises: as RolloutEngine.generate.
        """
        began = time.monotonic()
        settings = self._settings
        sampled = await self._sample(
            prompt,
            samples=settings.samples_per_group,
            temperature=settings.temperature,
            topk=topk,
            begun=begun.answers if begun is not None else (),
        )
        sampled_at = time.monotonic()
        generate_s = sampled_at - began + (begun.generate_s if begun is not None else 0.0)
        if self.engine.is_leaving and any(map(is_begun, sampled)):
            return UnfinishedGroup(group_id, tuple(sampled), generate_s)
        return Group(
            group_id=group_id,
            prompt=prompt,
            trajectories=await self._rewards.score(await self._with_texts(sampled), prompt),
            admitted_version=admitted_version,
            generate_s=generate_s,
            reward_s=time.monotonic() - sampled_at,
        )

    async def answer(self, prompt: Prompt, how: AnswerSampling) -> tuple[Trajectory, ...]:
        """Scored answers that nothing is trained on, in the order of their seeds; without routed experts, most of an answer's bytes.

        Raises: as RolloutEngine.generate; EngineError after `hand_back`, unless all answers are whole.
        """
        sampled = await self._sample(prompt, samples=how.samples, temperature=how.temperature, top_p=how.top_p, has_routes=False)
        if self.engine.is_leaving and any(map(is_begun, sampled)):
            raise EngineError(f"{self.engine.name} is shutting down: ask another worker")
        return await self._rewards.score(await self._with_texts(sampled), prompt)

    async def _sample(
        self,
        prompt: Prompt,
        *,
        samples: int,
        temperature: float,
        top_p: float = 1.0,
        topk: int = 0,
        has_routes: bool = True,
        begun: Sequence[Trajectory] = (),
    ) -> list[Trajectory]:
        with self._busy:
            return await self.engine.generate(
                prompt.token_ids,
                prompt_id=prompt.prompt_id,
                max_tokens=self._settings.max_tokens,
                temperature=temperature,
                top_p=top_p,
                samples=samples,
                seeds=[sample_seed(self._seed, prompt.prompt_id, index) for index in range(samples)],
                topk=topk,
                has_routes=has_routes,
                stop_ids=self._encoder.ends.ids,
                begun=begun,
            )

    async def _with_texts(self, trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """The trajectories with their texts, for the scorer and for people. Tokens and logprobs stay as they were sampled."""
        texts = await in_answer_thread(lambda: [self._encoder.text_of(one.response_ids) for one in trajectories])
        return tuple(replace(one, text=text) for one, text in zip(trajectories, texts, strict=True))

    @property
    def generated_tokens(self) -> int:
        """Sampled so far, those of failed trajectories and of answers under way included."""
        return self.engine.sampled_tokens

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request in the engine, weight updates included."""
        return self._busy.busy_s

    @property
    def up_s(self) -> float:
        """Seconds since the engine was up."""
        return self._busy.up_s


def sample_seed(run_seed: int, prompt_id: str, index: int) -> int:
    """Seed of the index-th sample of a prompt, in [0, 2^63). The id includes the epoch, so that a prompt has another seed in each."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _BusyClock:
    """Counts the time in which at least one request is under way."""

    def __init__(self) -> None:
        self._depth = 0
        self._busy_s, self._since = 0.0, 0.0
        self._born = time.monotonic()

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since = time.monotonic()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._busy_s += time.monotonic() - self._since

    @property
    def busy_s(self) -> float:
        return self._busy_s + (time.monotonic() - self._since if self._depth else 0.0)

    @property
    def up_s(self) -> float:
        return time.monotonic() - self._born
