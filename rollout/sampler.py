"""A prompt becomes its group of scored trajectories: where engine, tokenizer, a task's environments or agents, and reward processes meet.

What it is not: it doesn't choose prompts (actors/driver/controller.py does), and hands nothing on (the rollout worker does).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from evenkeel.correction.errors import EngineDirty, EngineError
from evenkeel.rollout.config import WHOLE_VOCABULARY, AnswerSampling, RolloutConfig, SamplingConfig, TaskEntry, Truncation, named
from evenkeel.rollout.continuation import is_begun, is_unfinished, unsampled
from evenkeel.rollout.door.agents import AgentRollout, Agents
from evenkeel.rollout.door.door import LOOPBACK
from evenkeel.rollout.engine.engine import GroupOfRanks, RolloutEngine, in_answer_thread
from evenkeel.rollout.engine.temporary_files import files_in
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.environments.played_rollout import PlayedRollout
from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.session import Session
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Group, Prompt, Trajectory, UnfinishedGroup

log = logging.getLogger("evenkeel.rollout")
# Seconds between two looks whether there is an engine again.
_LOOK_S = 0.1
Between = Callable[[float, float], object]
"""Takes begin and end (time.monotonic()) of what lies between two turns of a rollout: its environment, or its agent, is at work."""


@dataclass(frozen=True, slots=True)
class Player:
    """How the prompts of one task are answered and scored."""

    encoder: ChatEncoder
    """Of the model; knows what ends an answer, and an answer's text."""
    rewards: RewardPool
    settings: SamplingConfig
    """Samples of a group, their temperature and length."""
    environments: EnvironmentPool | None = None
    """They answer the turns of the model."""
    agents: Agents | None = None
    """They play the rollouts; without either of the two an answer is one turn."""

    @property
    def is_played(self) -> bool:
        """Whether rollouts have turns."""
        return self.environments is not None or self.agents is not None

    @classmethod
    async def start(
        cls, entry: TaskEntry, settings: SamplingConfig, encoder: ChatEncoder, model: str, sample: Prompt | None, node: Callable[[], str]
    ) -> Player:
        """Start the processes of a task. Args, Raises: as Sampler.start. No process is left then."""
        rewards, agents = RewardPool(entry.reward, entry.task), None
        environments = None if entry.environment is None else EnvironmentPool(entry.environment)
        try:
            if entry.agent is not None:
                score = None if entry.reward.kind == "agent" else rewards.score_one
                agents = await Agents.start(entry.agent, model, encoder, score, node=node)
            await rewards.check(sample)
            if environments is not None and sample is not None:
                await environments.check(sample)
        except BaseException:
            await cls(encoder, rewards, settings, environments, agents).close()
            raise
        return cls(encoder, rewards, settings, environments, agents)

    async def close(self) -> None:
        await self.rewards.close()
        for played in (self.environments, self.agents):
            if played is not None:
                await played.close()


class Sampler:
    """One engine with its tokenizer and the scorers of a run's tasks. Calls overlap; all belong to the event loop that started the
    engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        players: Mapping[str, Player],
        *,
        seed: int = 0,
        places: int = 10**6,
        another: Callable[[], Awaitable[RolloutEngine]] | None = None,
    ) -> None:
        """
        Args:
            players: by the name of their task; that of a run's only task has an empty one.
            seed: of the run's samples, see sample_seed.
            places: most turns of sessions in the engine at a time; a session has one while its turn is sampled.
            another: starts an engine without weights in the place of one that was lost, if programs of agents wait; None: nothing does. Its
                temporary files go where this process has its own as the sampler is made.
        """
        self.engine = engine
        self._another = another
        # Of the engine's temporary files, and of those of one that takes its place.
        self._folder = Path(tempfile.gettempdir())
        self._starting: asyncio.Task[None] | None = None  # of the engine that takes the place
        # Whether a group was finished since an engine was last lost, and why that one was.
        self._has_worked, self._lost_of = True, ""
        # Sampled by engines that were lost.
        self._lost_tokens = 0
        # Counts the time in which programs wait for an engine.
        self._outage = _BusyClock()
        self._players, self._seed = players, seed
        self._places = asyncio.Semaphore(places)
        self._rollouts = set[PlayedRollout | AgentRollout]()
        self._under_way = dict[int, _PlayedGroup]()  # groups whose rollouts have turns, by id
        self._turned = asyncio.Event()
        self._busy = _BusyClock()

    @classmethod
    async def start(
        cls,
        model: Path,
        config: RolloutConfig,
        *,
        samples: Sequence[Prompt] = (),
        version: int = 0,
        name: str = "engine",
        seed: int = 0,
        topk: int = 0,
        has_weights: bool = True,
        node: Callable[[], str] = lambda: LOOPBACK,
    ) -> Sampler:
        """Start the processes for rewards, environments and agents, and the engine (seconds to a minute on a CPU).

        Args:
            samples: reward function and environment of a task are tried on its first one here, so that their mistakes show now.
            version: weight version of the model folder.
            topk: the most that `group` will be asked for.
            has_weights: see RolloutEngine.start. False: they come from a learner, for an engine too that takes the place of a lost one.
            node: finds the address of this node, for agents' doors that are to listen there.
        Raises: RewardError for a reward function that fails on the sample; ConfigError for such an environment, and for an agent whose
            program isn't there; as RolloutEngine.start. No process is left then.
        """
        first = {task_of(sample.prompt_id): sample for sample in reversed(samples)}
        encoders = ChatEncoder.of_entries(model, config)
        async with AsyncExitStack() as started:
            players = {}
            for entry in config.entries:
                with named(entry):
                    settings, encoder = config.sampling_of(entry.name), encoders[entry.name]
                    player = await Player.start(entry, settings, encoder, model.name, first.get(entry.name), node)
                players[entry.name] = player
                started.push_async_callback(player.close)
            start = partial(RolloutEngine.start, model, config.engine, version=version, name=name)
            engine = await start(has_weights=has_weights)
            started.push_async_callback(engine.shutdown)
            engine.check_topk(topk)
            started.pop_all()
        another = None if has_weights else partial(start, has_weights=False)
        return cls(engine, players, seed=seed, places=config.slots_per_worker * config.sampling.samples_per_group, another=another)

    async def close(self) -> None:
        self.have_no_successor()
        await self.succeeded()
        await self.engine.shutdown()
        for player in self._players.values():
            await player.close()

    def _player(self, prompt: Prompt) -> Player:
        return self._players[task_of(prompt.prompt_id)]

    async def hand_back(self) -> None:
        """Sample nothing more; `group` returns what there is. Returns when no request is in flight."""
        self.engine.is_leaving = True
        self.have_no_successor()
        for rollout in self._rollouts:
            rollout.stop()
        await self.engine.hand_back()

    async def group(
        self,
        prompt: Prompt,
        *,
        group_id: int,
        admitted_version: int,
        topk: int = 0,
        begun: UnfinishedGroup | None = None,
        between: Between | None = None,
    ) -> Group | UnfinishedGroup:
        """Sample the G trajectories of a prompt, and score them.

        Args:
            topk: most likely tokens to keep with each sampled one, for corrections that look at them.
            begun: what another worker has handed back of this group.
            between: is told what lies between turns, as it ends.
        Returns: trajectories in the order of their seeds; one that was aborted, or that could not be scored, carries an error. After
            `hand_back` what there is of the group, unless all of its answers are whole; also, with the error, where an engine that fails
            leaves more of rollouts of several turns than it was given.
        Raises: as RolloutEngine.generate.
        """
        began = time.monotonic()
        player = self._player(prompt)
        settings, answers = player.settings, begun.answers if begun is not None else ()
        how: dict[str, Any] = {"temperature": settings.temperature, "truncation": settings, "topk": topk}
        spent_s = begun.generate_s if begun is not None else 0.0
        failed: EngineError | None = None
        lost_tokens = begun.lost_tokens if begun is not None else 0
        if player.is_played:
            rollouts = [self._rollout(prompt, i, one, **how) for i, one in enumerate(answers or [None] * settings.samples_per_group)]
            there = self._under_way[group_id] = _PlayedGroup(group_id, rollouts, began - spent_s, begun)
            try:
                sampled = await self._played(prompt, rollouts, between, there.sessions, **how)
            except EngineError as error:
                sampled, failed = [one.trajectory for one in rollouts], error
                if there.tokens <= sum(one.response_tokens for one in answers):
                    raise
            finally:
                if self._under_way.get(group_id) is there:
                    del self._under_way[group_id]
            lost_tokens = there.lost_tokens
        else:
            sampled = await self._sample(prompt, range(settings.samples_per_group), begun=answers, **how)
        sampled_at = time.monotonic()
        generate_s = sampled_at - began + spent_s
        if failed is not None or self._leaves(player, sampled):
            return UnfinishedGroup(group_id, tuple(sampled), generate_s, failed, lost_tokens)
        self._has_worked = True
        return Group(
            group_id=group_id,
            prompt=prompt,
            trajectories=await player.rewards.score(await self._with_texts(sampled, player), prompt),
            admitted_version=admitted_version,
            generate_s=generate_s,
            reward_s=time.monotonic() - sampled_at,
            lost_tokens=lost_tokens,
        )

    async def answer(self, prompt: Prompt, how: AnswerSampling) -> tuple[Trajectory, ...]:
        """Scored answers that nothing is trained on, in the order of their seeds; without what a learner alone reads, most of its bytes.

        Raises: as RolloutEngine.generate; EngineError after `hand_back`, unless all answers are whole.
        """
        asked: dict[str, Any] = {"temperature": how.temperature, "truncation": how, "is_trained": False}
        player = self._player(prompt)
        if player.is_played:
            sampled = await self._played(prompt, [self._rollout(prompt, i, None, **asked) for i in range(how.samples)], None, [], **asked)
        else:
            sampled = await self._sample(prompt, range(how.samples), **asked)
        if self._leaves(player, sampled):
            raise EngineError(f"{self.engine.name} is shutting down: ask another worker")
        return await player.rewards.score(await self._with_texts(sampled, player), prompt)

    def _leaves(self, player: Player, answers: Sequence[Trajectory]) -> bool:
        """Whether the engine leaves some that another one has to go on with."""
        return self.engine.is_leaving and any(map(is_unfinished if player.is_played else is_begun, answers))

    async def turned(self) -> None:
        """Returns once a rollout has had a turn since the last time. For one caller."""
        await self._turned.wait()
        self._turned.clear()

    def so_far(self, groups: Iterable[int]) -> dict[int, UnfinishedGroup]:
        """What there is of those of these groups whose rollouts have turns, and have had one, by id. Another engine can go on from it."""
        found = {group_id: self._under_way[group_id] for group_id in groups if group_id in self._under_way}
        return {group_id: one.so_far for group_id, one in found.items() if one.tokens}

    async def _played(
        self,
        prompt: Prompt,
        rollouts: Sequence[PlayedRollout | AgentRollout],
        between: Between | None,
        sessions: list[Session],
        **how: Any,
    ) -> list[Trajectory]:
        """Rollouts in environments, or by agents.

        Args:
            sessions: takes each that is opened.
            how: see _sample.
        Raises: as RolloutEngine.generate, but DataError.
        """
        shared: dict[bytes, asyncio.Task[None]] = {}

        async def session(number: int, so_far: Trajectory, line: int) -> Session:
            key = so_far.prompt_ids.tobytes()
            if not so_far.response_ids and len(rollouts) > 1 and line == 0:
                if key not in shared:
                    shared[key] = asyncio.create_task(self.engine.read(so_far.prompt_ids))
                with contextlib.suppress(EngineError):  # of one that is lost the first turn will say so, too
                    await asyncio.shield(shared[key])
            sessions.append(self.session(prompt, number, so_far, between, line=line, **how))
            return sessions[-1]

        self._rollouts.update(rollouts)
        tasks = [asyncio.create_task(one.play(partial(session, number))) for number, one in enumerate(rollouts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            self._rollouts.difference_update(rollouts)
            await _ended([*tasks, *shared.values()])

    def _rollout(
        self, prompt: Prompt, number: int, begun: Trajectory | None, *, temperature: float, truncation: Truncation, **_: Any
    ) -> PlayedRollout | AgentRollout:
        player = self._player(prompt)
        if player.agents is not None:
            how = AnswerSampling(temperature=temperature, **truncation.model_dump(include=set(Truncation.model_fields)))
            return player.agents.rollout(prompt, begun, how, lambda: self._outage.busy_s)
        assert player.environments is not None
        seed = sample_seed(self._seed, prompt.prompt_id, number)
        return PlayedRollout(prompt, seed, begun, player.environments, player.encoder)

    def session(
        self, prompt: Prompt, number: int, begun: Trajectory | None = None, between: Between | None = None, *, line: int = 0, **how: Any
    ) -> Session:
        """A sequence of a rollout that is sampled turn by turn.

        Args:
            number: of this rollout among the prompt's.
            begun: what there is of it, perhaps from another engine, perhaps with another prompt than the task gave it; None: nothing.
            between: as of `group`.
            line: number of the sequence among the rollout's: each has other seeds.
            how: as of `_sample`, where it isn't a training sample's.
        """
        begun = unsampled(prompt.token_ids, prompt.prompt_id) if begun is None else begun
        asked = replace(prompt, token_ids=tuple(begun.prompt_ids))
        settings = self._player(prompt).settings
        asks: dict[str, Any] = {"temperature": settings.temperature, "truncation": settings, "session": GroupOfRanks()} | how

        turn_ended: float | None = None

        async def go_on(answer: Trajectory, max_tokens: int) -> Trajectory:
            nonlocal turn_ended
            if between is not None and turn_ended is not None:
                between(turn_ended, time.monotonic())
            found = await self._turn(lambda: self._sample(asked, [number], line=line, max_tokens=max_tokens, begun=[answer], **asks))
            turn_ended = time.monotonic()
            self._turned.set()
            return found

        return Session(begun, go_on, max_tokens=settings.max_tokens, lengths=self.engine.lengths)

    # -- an engine that is lost --------------------------------------------------------------------------------------

    async def _turn(self, sample: Callable[[], Awaitable[list[Trajectory]]]) -> Trajectory:
        """A turn; sampled once more from its beginning where its engine is lost and has a successor. Raises: as RolloutEngine.generate."""
        losses = 0
        while True:
            engine = self.engine
            try:
                async with self._places:
                    return (await sample())[0]
            except EngineError as error:
                losses += engine.is_lost
                if losses > 1 or not (engine.is_lost or isinstance(error, EngineDirty)):  # it may be this turn that ends them
                    raise
                with self._outage:
                    while (goes_on := self._goes_on()) and (self.engine.is_lost or self.engine.is_dirty):
                        await asyncio.sleep(_LOOK_S)
                if not goes_on:
                    raise

    def _goes_on(self) -> bool:
        """Whether programs of agents wait for a dirty or lost engine, and not in vain: they would end with this worker, so a lost one has a
        successor, which is started here. It is dirty until its first weights come."""
        if self._another is None or self._starting is not None:
            return self._another is not None
        has_programs = any(isinstance(one, AgentRollout) for one in self._rollouts)
        if not self.engine.is_lost or not has_programs or not self._has_worked:
            return has_programs and not self.engine.is_lost
        try:
            self.engine.raise_if_lost()
        except EngineError as error:
            self._lost_of = f"{error}. Programs of agents are under way, so another one takes its place"
        self._starting = asyncio.create_task(self._start_another(self._another))
        return True

    async def _start_another(self, start: Callable[[], Awaitable[RolloutEngine]]) -> None:
        lost, self._has_worked = self.engine, False
        log.warning("%s", self._lost_of)
        try:
            await lost.shutdown()
            with files_in(self._folder):
                self.engine = await start()
            self._lost_tokens += lost.sampled_tokens
        except Exception:
            log.exception("%s: nothing takes the place of an engine that was lost", lost.name)
            self._another = None
        finally:
            self._starting = None

    def has_its_weights(self) -> None:
        """Called when the engine holds what was sent, compared: in whosever place it is, from now on it is like any other."""
        self._lost_of = ""

    def have_no_successor(self) -> None:
        """From now on an engine that is lost is the end of its worker."""
        self._another = None
        if self._starting is not None:
            self._starting.cancel()

    async def succeeded(self) -> None:
        """Returns when no engine is being started in the place of another one."""
        if self._starting is not None:
            await asyncio.wait({self._starting})

    @property
    def lost_of(self) -> str:
        """Why the engine has no weights, if it takes the place of a lost one, or is about to; else empty."""
        is_away = self.engine.is_dirty if not self.engine.is_lost else self._goes_on()
        return self._lost_of if is_away else ""

    async def _sample(
        self,
        prompt: Prompt,
        numbers: Sequence[int],
        *,
        temperature: float,
        truncation: Truncation = WHOLE_VOCABULARY,
        topk: int = 0,
        is_trained: bool = True,
        begun: Sequence[Trajectory] = (),
        max_tokens: int | None = None,
        line: int = 0,
        session: GroupOfRanks | None = None,
    ) -> list[Trajectory]:
        """Args: numbers: of these samples among the prompt's. max_tokens: None: those of the settings. line: see `session`. session: as of
        RolloutEngine.generate."""
        player = self._player(prompt)
        with self._busy:
            return await self.engine.generate(
                prompt.token_ids,
                prompt_id=prompt.prompt_id,
                max_tokens=player.settings.max_tokens if max_tokens is None else max_tokens,
                temperature=temperature,
                truncation=truncation,
                samples=len(numbers),
                seeds=[sample_seed(self._seed, prompt.prompt_id, number, line) for number in numbers],
                topk=topk,
                is_trained=is_trained,
                stop_ids=player.encoder.ends.ids,
                begun=begun,
                session=session,
            )

    async def _with_texts(self, trajectories: Sequence[Trajectory], player: Player) -> tuple[Trajectory, ...]:
        """The trajectories with their texts, for the scorer and for people. Tokens and logprobs stay as they were sampled."""
        texts = await in_answer_thread(lambda: [player.encoder.text_of(one.answer_ids) for one in trajectories])
        return tuple(replace(one, text=text) for one, text in zip(trajectories, texts, strict=True))

    @property
    def generated_tokens(self) -> int:
        """Sampled so far, those of failed trajectories and of answers under way included."""
        return self._lost_tokens + self.engine.sampled_tokens

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request in the engine, weight updates included."""
        return self._busy.busy_s

    @property
    def up_s(self) -> float:
        """Seconds since the engine was up."""
        return self._busy.up_s


@dataclass(frozen=True, slots=True)
class _PlayedGroup:
    """A group under way whose rollouts have turns."""

    group_id: int
    rollouts: Sequence[PlayedRollout | AgentRollout]
    began: float
    """time.monotonic(), less what other engines have spent on it."""
    begun: UnfinishedGroup | None
    """What there was of it."""
    sessions: list[Session] = field(default_factory=list)
    """All that were opened for it, those that were given up included."""

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return sum(one.trajectory.response_tokens for one in self.rollouts)

    @property
    def so_far(self) -> UnfinishedGroup:
        answers = tuple(one.trajectory for one in self.rollouts)
        return UnfinishedGroup(self.group_id, answers, time.monotonic() - self.began, lost_tokens=self.lost_tokens)

    @property
    def lost_tokens(self) -> int:
        """Sampled so far, and in no answer."""
        before = self.begun.tokens + self.begun.lost_tokens if self.begun is not None else 0
        return before + sum(one.sampled_tokens for one in self.sessions) - self.tokens


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def sample_seed(run_seed: int, prompt_id: str, index: int, line: int = 0) -> int:
    """Seed of the index-th sample of a prompt, in [0, 2^63). The id includes the epoch, so that a prompt has another seed in each.

    Args: line: number of the sequence among those of the sample: two that have one prompt are to differ.
    """
    named = f"{run_seed}/{prompt_id}/{index}" + (f"/{line}" if line else "")
    digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
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
