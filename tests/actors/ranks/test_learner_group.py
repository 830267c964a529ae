"""The one caller of the learner's ranks, with ranks that are played: what becomes of calls that a bad network swallows.

A played rank is the real side of a rank, whose calls come one after the other; in a collective call it waits for the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from evenkeel.actors.carriers import ActorInfo, LaneReport, RankStep, WaitNotice
from evenkeel.actors.cluster.placement import RankPlaces
from evenkeel.actors.ranks import learner_group
from evenkeel.actors.ranks.collective_calls import NumberedRank, collective
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import ActorLost, ActorUnavailable, ConfigError, DeadlineExceeded, EngineError, StepAborted
from evenkeel.learner.config import LearnerConfig
from tests.actors.cases import FakeActor
from tests.actors.simulated_time import simulate

LOST = ray.exceptions.ActorUnavailableError("the connection was lost", b"1" * 16)
MODEL, TIS = Path("model"), CorrectionConfig()
STEP_S = 100.0


@dataclass(slots=True)
class Result:
    """Of a step."""

    step: int
    values: Any = None


class Work(NumberedRank):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.done: list[str] = []

    @collective
    def load_reference(self, number: int, model: Path) -> None:
        self._in_order(number, "load")
        self.done.append(f"{number} load")

    @collective
    def step(self, number: int, corrected: Any, correction: Any, step: int, rate_scale: float) -> tuple[RankStep, list[int]]:
        self._in_order(number, "step")
        self.done.append(f"{number} step")
        if corrected == "breaks":
            raise EngineError("the step breaks")
        if corrected == "aborted":
            raise StepAborted("before its update")
        return RankStep(Result(step), LaneReport(self.name, 0.0, ())), [step]  # type: ignore[arg-type]

    @collective
    def restore(self, number: int, folder: Path, version: int) -> None:
        self._go_on_from(number)
        self.done.append(f"{number} restore")

    def checkpoint_bytes(self) -> int:
        return 1

    def is_saved(self) -> bool:
        return True

    def fetch(self, batch: Any, correction: Any, step: int, limit_s: float, *, everything: bool) -> dict[int, str]:
        return {step: "late"}


class Rank:
    """Its handle. Calls come in their order, one after the other, and take a second."""

    def __init__(self, number: int, meetings: dict[int, set[int]]) -> None:
        self.work, self._number, self._meetings = Work(f"learner rank {number}"), number, meetings
        self.fate: list[str] = []
        """Of its next calls: "", or what is lost: the "call", the "reply", or the "arguments", which Ray fetches for good."""
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    def __getattr__(self, method: str) -> Any:
        def called(*arguments: Any, results: int = 1, **named: Any) -> Any:
            ends = [asyncio.get_running_loop().create_future() for _ in range(results)]
            task = asyncio.ensure_future(self._run(ends, method, arguments, named, self.fate.pop(0) if self.fate else ""))
            self._running.add(task)
            return ends[0] if results == 1 else ends

        def options(*, num_returns: int) -> Any:
            return SimpleNamespace(remote=lambda *arguments: called(*arguments, results=num_returns))

        return SimpleNamespace(remote=called, options=options)

    async def _run(
        self, ends: list[asyncio.Future[Any]], method: str, arguments: tuple[Any, ...], named: dict[str, Any], fate: str
    ) -> None:
        error: Exception | None = LOST if fate else None
        found: Any = None
        if fate == "arguments":
            await asyncio.get_running_loop().create_future()
        try:
            if method == "begun":  # in a thread of its own
                found = self.work.begun()
            elif fate != "call":
                async with self._turn:
                    await asyncio.sleep(1.0)
                    found = await self._together(method, arguments, named)
        except Exception as raised:
            error = error or raised
        for end, value in zip(ends, found if len(ends) > 1 and found is not None else [found] * len(ends), strict=True):
            if end.cancelled():
                continue
            end.set_exception(error) if error is not None else end.set_result(value)
            end.exception()

    async def _together(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        before = len(self.work.done)
        found = getattr(self.work, method)(*arguments, **named)
        if len(self.work.done) > before:  # it has not only told again what it had found
            there = self._meetings.setdefault(arguments[0], set())
            there.add(self._number)
            while len(there) < 2:
                await asyncio.sleep(0.1)
        return found


class Starting:
    """A rank that says which layers it has when it comes up."""

    def __init__(self, info: ActorInfo) -> None:
        self._info = info

    async def address(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    async def start(self, world_size: int, master: tuple[str, int], model: Path, version: int) -> ActorInfo:
        return self._info


async def started(monkeypatch: pytest.MonkeyPatch, infos: list[ActorInfo]) -> list[LearnerGroup]:
    """The group as it was when its ranks were made, whose start has come to its end or has raised."""
    made: list[LearnerGroup] = []
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda config, rank, bind: FakeActor(Starting(infos[rank]))))
    monkeypatch.setattr(learner_group, "sequential_actor", lambda _: actor)
    places = RankPlaces(LearnerConfig(data_parallel=len(infos), device="cpu"), {})
    await LearnerGroup.start(places, MODEL, version=0, bind="127.0.0.1", start_s=10.0, step_s=STEP_S, made=made.append)
    return made


def info(rank: int, layers: str, host: str) -> ActorInfo:
    return ActorInfo("learner", str(rank), 1, "127.0.0.1:1", host=host, layers=layers)


def test_ranks_with_layers_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine is installed on one node and not on the other; parts of one model would round in different ways."""
    alike = [info(rank, "local", f"10.0.0.{1 + rank // 8}") for rank in range(16)]
    (group,) = asyncio.run(started(monkeypatch, alike))
    assert group.version == 0
    mixed = [replace(one, layers="transformer_engine") if one.host == "10.0.0.1" else one for one in alike[:9]]
    with pytest.raises(ConfigError) as raised:
        asyncio.run(started(monkeypatch, mixed))
    assert str(raised.value) == (
        "learner.layers = auto: the ranks have chosen local on rank 8 (10.0.0.2) and transformer_engine on ranks 0, 1, 2, 3 and 4 more "
        "(10.0.0.1), by what is installed on their nodes, and a model has layers of one kind. Install the same packages on all nodes, "
        "or set learner.layers: local"
    )


def played(scenario: Any) -> list[Rank]:
    """Two ranks and their group."""
    ranks: list[Rank] = []

    async def play() -> None:
        meetings: dict[int, set[int]] = {}
        ranks.extend(Rank(number, meetings) for number in range(2))
        await scenario(LearnerGroup(ranks, version=0, step_s=STEP_S), *ranks)

    simulate(play)
    return ranks


@pytest.mark.parametrize("lost", ["call", "reply"])
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("who", [0, 1])
def test_a_lost_call_is_made_again_and_a_lost_reply_told_again(lost: str, times: int, who: int) -> None:
    """Each rank does each call once, in one order, though the next one is asked for while the first is on its way."""

    async def scenario(group: LearnerGroup, *ranks: Rank) -> None:
        ranks[who].fate = [lost] * times
        steps = [asyncio.ensure_future(group.step("batch", TIS, step=step)) for step in range(2)]
        for number, result in enumerate(await asyncio.gather(*steps)):
            assert (result.step, await result.values) == (number, [number])
        await group.load_reference(MODEL)
        assert group.version == 2

    assert [rank.work.done for rank in played(scenario)] == [["1 step", "2 step", "3 load"]] * 2


def test_who_is_cancelled_leaves_no_rank_behind() -> None:
    """Ctrl-C while a forward is asked for again: what is saved then has to find all ranks at the same call."""

    async def scenario(group: LearnerGroup, first: Rank, second: Rank) -> None:
        second.fate = ["call", "call"]
        asking = asyncio.ensure_future(group.load_reference(MODEL))
        await asyncio.sleep(0.5)
        asking.cancel()
        await group.load_reference(MODEL)

    assert [rank.work.done for rank in played(scenario)] == [["1 load", "2 load"]] * 2


def test_an_error_whose_reply_is_lost_is_told_again() -> None:
    async def scenario(group: LearnerGroup, first: Rank, second: Rank) -> None:
        for rank in (first, second):
            rank.fate = ["reply"]
        with pytest.raises(EngineError, match="the step breaks"):
            await group.step("breaks", TIS, step=0)

    assert [rank.work.done for rank in played(scenario)] == [["1 step"]] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_after_an_aborted_step_all_ranks_have_had_it(who: int) -> None:
    """One of them may hear of it late: the checkpoint that follows has to find all ranks at the same call."""

    async def scenario(group: LearnerGroup, *ranks: Rank) -> None:
        ranks[who].fate = ["call", "call"]
        with pytest.raises(StepAborted):
            await group.step("aborted", TIS, step=0)
        assert group.version == 0
        await group.load_reference(MODEL)

    assert [rank.work.done for rank in played(scenario)] == [["1 step", "2 load"]] * 2


def test_after_a_call_that_did_not_come_no_other_one_does_until_a_restore() -> None:
    """The ranks would refuse the next number, which looks like a fault of the code and ended the run; a loss takes it back. The call that
    comes in the end, after the restore, is refused."""

    async def scenario(group: LearnerGroup, first: Rank, second: Rank) -> None:
        await group.load_reference(MODEL)
        second.fate = ["call"] * 6
        with pytest.raises(ActorUnavailable):
            await group.load_reference(MODEL)
        with pytest.raises(ActorLost, match=r"can't be reached.*after a restore"):
            await group.load_reference(MODEL)
        first._meetings[2].add(1)  # who had waited for the other one gives up
        await group.restore(Path("checkpoint"), 0, deadline_s=50.0)
        await group.load_reference(MODEL)
        with pytest.raises(EngineError, match="call 2, but 5 is the next"):
            await second.load_reference.remote(2, MODEL)
        with pytest.raises(EngineError, match="call 3 came after call 4"):
            await second.restore.remote(3, Path("checkpoint"), 0)

    first, second = played(scenario)
    assert first.work.done == ["1 load", "2 load", "3 restore", "4 load"] and second.work.done == ["1 load", "3 restore", "4 load"]


@pytest.mark.parametrize("stuck", [(0,), (1,), (0, 1)])
def test_a_step_that_a_rank_never_begins_is_lost_work(stuck: tuple[int, ...]) -> None:
    """Its batch is gone, and Ray goes on looking for it, while all ranks answer: the run goes back for an ActorLost, and ends by a
    deadline. A rank that has begun waits for the other one in the middle of it; no further call comes to any of them."""

    async def scenario(group: LearnerGroup, *ranks: Rank) -> None:
        await group.load_reference(MODEL)
        for number in stuck:
            ranks[number].fate = ["arguments"]
        named = " and ".join(f"rank {number}" for number in stuck)
        with pytest.raises(ActorLost, match=rf"^learner step 7 <- rank \d: not done in 100 s.*; not begun by {named}: "):
            await group.step("batch", TIS, step=7)
        with pytest.raises(ActorLost, match=r"not begun.*after a restore"):
            await group.load_reference(MODEL)

    for number, rank in enumerate(played(scenario)):
        assert rank.work.done == ["1 load", *(["2 step"] if number not in stuck else [])]


def test_a_step_that_all_ranks_have_begun_is_late() -> None:
    async def scenario(group: LearnerGroup, first: Rank, second: Rank) -> None:
        first._meetings[1] = {0}
        second._meetings = {}  # each waits for the other one
        with pytest.raises(DeadlineExceeded, match="learner step 0"):
            await group.step("batch", TIS, step=0)

    assert [rank.work.done for rank in played(scenario)] == [["1 step"]] * 2


def test_a_batch_that_does_not_come_to_have_its_fields_read_is_lost_work() -> None:
    async def scenario(group: LearnerGroup, first: Rank, second: Rank) -> None:
        second.fate = ["arguments"]
        with pytest.raises(ActorLost, match="wide fields of a batch <- rank 1: not done in 105 s"):
            await group.fetch("batch", TIS, step=3, limit_s=5.0)

    played(scenario)


def test_what_was_asked_before_a_restore_is_not_done_after_it() -> None:
    """A step that waits for its turn, when the run goes back."""

    async def scenario(group: LearnerGroup, *ranks: Rank) -> None:
        asked = [asyncio.ensure_future(group.step("batch", TIS, step=step)) for step in range(3)]
        await asyncio.sleep(0.5)
        for one in asked:
            one.cancel()
        await group.restore(Path("checkpoint"), 7, deadline_s=50.0)
        await group.load_reference(MODEL)
        assert group.version == 7

    assert [rank.work.done for rank in played(scenario)] == [["1 step", "2 restore", "3 load"]] * 2


def test_a_rank_that_does_not_answer_hides_no_other_one_s_checkpoint() -> None:
    """Only the silent one has not written its part, as far as anybody knows."""

    async def scenario(group: LearnerGroup, first: Rank, second: Rank) -> None:
        second.fate = ["arguments"]
        told: list[WaitNotice] = []
        with pytest.raises(DeadlineExceeded) as late:
            await group.saved(deadline_s=50.0, notice=told.append)
        assert [notice.detail for notice in told] == ["not written by rank 1"] and "rank 0" not in str(late.value)

    played(scenario)


def test_a_question_that_is_no_collective_call_may_miss_a_rank() -> None:
    async def scenario(group: LearnerGroup, first: Rank, second: Rank) -> None:
        first.fate = ["call"]
        assert await group.checkpoint_bytes(deadline_s=5.0) == 2
        second.fate = ["reply", "call"]
        assert await group.fetch("batch", TIS, step=3, limit_s=5.0) == {3: "late"}, "read again, nothing else changes"
        first.fate = ["call"] * 6
        with pytest.raises(ActorUnavailable):
            await group.checkpoint_bytes(deadline_s=5.0)
        await group.load_reference(MODEL)

    assert [rank.work.done for rank in played(scenario)] == [["1 load"]] * 2
