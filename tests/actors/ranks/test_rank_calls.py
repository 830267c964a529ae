"""Calls that all learner ranks run: in one order, by number, and what each rank does in an export."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
import torch
from ray.exceptions import RayTaskError

from evenkeel.actors.carriers import ExportPlan
from evenkeel.actors.processes.part_heartbeat import CONCURRENCY_GROUPS
from evenkeel.actors.ranks.collective_calls import CollectiveCaller
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.correction.errors import ActorLost, EngineError, SyncError
from evenkeel.engines.weights import WeightBucket, tensor_checksum
from evenkeel.learner.training.step import Abort
from tests.actors.simulated_time import simulate
from tests.actors.weights.rank_pieces import Pieces, rank_with


def test_a_rank_that_dies_while_a_step_is_aborted_leaves_no_other_one_held() -> None:
    """The call fails for its death; the rank that lives was told where it stands, and goes on from there."""

    class Rank:
        def __init__(self, *, lives: bool) -> None:
            self.abort, self.lives = Abort(), lives
            self.begun, self.ends = asyncio.Event(), asyncio.Event()

        def __getattr__(self, name: str) -> Any:
            def remote(*arguments: Any) -> Any:
                return self.answer(name, *arguments)

            return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))

        async def answer(self, method: str, *arguments: Any) -> Any:
            if method == "step":
                self.begun.set()
                await self.ends.wait()
            if not self.lives:
                self.ends.set()
                raise ray.exceptions.ActorDiedError
            return self.abort.release(*arguments) if method == "release" else getattr(self.abort, method)(*arguments)

    async def scenario() -> bool:
        living, dying = Rank(lives=True), Rank(lives=False)
        caller = CollectiveCaller({"rank 0": living, "rank 1": dying})
        asking = asyncio.ensure_future(caller.ask("step", what="learner step 1", deadline_s=50.0, results=1))
        await asyncio.gather(living.begun.wait(), dying.begun.wait())
        with living.abort.during(1):
            caller.refuse(frozenset({"step"}))
            with pytest.raises(ActorLost, match="<- rank 1"):
                await caller.abort()
            with pytest.raises(ActorLost, match="learner step 1 <- rank 1"):
                await asking
            return not living.abort.is_undecided

    assert asyncio.run(scenario())


@pytest.mark.parametrize("begun", [False, True], ids=["nobody has begun", "one has begun"])
def test_a_call_whose_argument_is_gone_is_as_if_it_had_not_been_made(begun: bool) -> None:
    """A batch goes with the service that put it into the store. If no rank has begun, the next call has the same number; if one has, it
    waits for the others in that call, and nobody can say when it ends."""
    numbers = list[tuple[str, int]]()

    async def gone(number: int) -> Any:
        numbers.append(("step", number))
        raise RayTaskError("step", "a long traceback", ray.exceptions.OwnerDiedError("", "", "")).as_instanceof_cause()

    async def answered(number: int) -> str:
        numbers.append(("export", number))
        return "weights"

    def rank(step: Any) -> Any:
        methods = {"step": step, "export": answered}
        of = {name: SimpleNamespace(options=lambda call=call, **_: SimpleNamespace(remote=call)) for name, call in methods.items()}
        return SimpleNamespace(**of)

    async def scenario() -> None:
        caller = CollectiveCaller({"rank 0": rank(gone), "rank 1": rank((lambda _: asyncio.sleep(1000.0)) if begun else gone)})
        with pytest.raises(ActorLost if begun else RayTaskError, match="some rank has begun that call" if begun else "a long traceback"):
            await caller.ask("step", what="learner step 1", deadline_s=5000.0, results=1)
        if begun:
            assert asyncio.get_running_loop().time() < 60.0
            with pytest.raises(ActorLost, match="can be called again after a restore"):
                await caller.ask("export", what="copy", deadline_s=50.0, results=1)
        else:
            assert await caller.ask("export", what="copy", deadline_s=50.0, results=1) == [["weights"]] * 2
            assert numbers == [("step", 1)] * 2 + [("export", 1)] * 2

    simulate(scenario)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gathers_to_the_end_of_a_broadcast(rank: int) -> None:
    """Rank 0 alone sends; when that fails in the middle, it goes on gathering, or the other ranks would wait for it."""
    sent: list[str] = []

    class Broadcaster:
        def begin(self, tensors: dict[str, torch.Tensor]) -> None:
            sent.extend(tensors)
            if "w1" in tensors:
                raise SyncError("an engine is gone")

        def finish(self) -> None:
            sent.append("the last one's end")

    pieces = Pieces()
    actor, plan = rank_with(pieces, rank), ExportPlan(8, stores=False, broadcasts=True)
    lonely = actor.export(1, 0, plan)
    actor._broadcaster = Broadcaster() if rank == 0 else None  # type: ignore[assignment]
    snapshot = actor.export(2, 0, plan)
    assert pieces.gathered == [0, 1, 2] * 2 and sent == (["w0", "w1", "the last one's end"] if rank == 0 else [])
    if rank == 0:
        assert lonely is not None and "no weight group" in lonely.broadcast_error
        assert snapshot is not None and snapshot.broadcast_error == "an engine is gone" and snapshot.buckets == []
    else:
        assert lonely is snapshot is None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_every_rank_gathers_the_weights_and_rank_zero_alone_copies_them(
    rank: int, is_contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass, with the checksums: from where they lie, or through memory that every bucket and version uses again."""
    stored: list[tuple[dict[str, list[float]], int]] = []

    def put(value: Any) -> Any:
        if not isinstance(value, WeightBucket):
            return value
        (part,) = value.parts
        stored.append(({name: tensor.tolist() for name, tensor in value.tensors().items()}, part.ctypes.data))
        return None

    monkeypatch.setattr(ray, "put", put)
    pieces = Pieces(is_contiguous=is_contiguous)
    actor = rank_with(pieces, rank)
    snapshots = [actor.export(number, 0, ExportPlan(8, checksums=True)) for number in (1, 2)]
    assert pieces.gathered == [0, 1, 2] * 2
    if rank == 1:
        assert snapshots == [None, None] and stored == []
        return
    assert [tensors for tensors, _ in stored] == [{"w0": [0.0] * 2}, {"w1": [1.0] * 2}, {"w2": [2.0] * 2}] * 2
    addresses = [address for _, address in stored]
    own = [tensor.data_ptr() for tensor in pieces.tensors]
    assert addresses == own * 2 if is_contiguous else len({*addresses}) == 1 and not {*addresses} & {*own}
    assert snapshots[0] is not None and [[spec.name for spec in bucket] for bucket in snapshots[0].specs] == [["w0"], ["w1"], ["w2"]]
    assert snapshots[0].checksums is not None
    assert snapshots[0].checksums.by_name == {f"w{i}": tensor_checksum(torch.full((2,), float(i))) for i in range(3)}


def test_a_rank_refuses_a_call_out_of_order_and_one_for_other_weights() -> None:
    """The ranks would wait for each other in different calls: better an error at once, in one sentence."""
    actor = rank_with(Pieces(), rank=1)
    actor.export(1, 0, ExportPlan(8))
    for number in (1, 3):  # again, and one left out
        with pytest.raises(EngineError, match=rf"^learner rank 1: proximal logprobs came as collective call {number}, but 2 is the next"):
            actor.proximal(number, None, 0)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="reference logprobs asked at version 7, but the weights are of 0"):
        actor.reference_logprobs(2, None, 7)  # type: ignore[arg-type]
    actor.export(3, 0, ExportPlan(8))


def test_every_rank_gets_the_calls_of_a_group_in_one_order_with_their_numbers() -> None:
    """Whoever of the process makes them: ranks that ran two collective calls in different orders would wait for each other for ever."""
    calls: dict[int, list[tuple[int, str]]] = {0: [], 1: []}

    class Method:
        def __init__(self, rank: int, name: str) -> None:
            self.rank, self.name = rank, name

        def options(self, *, num_returns: int) -> Method:
            self.results = num_returns
            return self

        def remote(self, number: int, *_: Any) -> Any:
            calls[self.rank].append((number, self.name))
            answers = [asyncio.ensure_future(asyncio.sleep(0.01, self.name)) for _ in range(self.results)]
            return answers[0] if self.results == 1 else answers

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __getattr__(self, name: str) -> Method:
            return Method(self.rank, name)

    group = LearnerGroup([Rank(0), Rank(1)], version=4, step_s=5.0)

    async def scenario() -> None:
        forwards = [group.proximal(None, version=4), group.reference_logprobs(None, version=4)]
        found, *_ = await asyncio.gather(*forwards, group.export(ExportPlan(8)))
        assert await found == "proximal", "a reference, for who has asked"
        await group.restore(Path("a"), 2, deadline_s=5.0)

    asyncio.run(asyncio.wait_for(scenario(), 30.0))
    assert calls[0] == calls[1] == [(1, "proximal"), (2, "reference_logprobs"), (3, "export"), (4, "restore")]
    assert group.version == 2


def test_a_group_stays_in_its_process() -> None:
    """Another process that had it would number its calls anew."""
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(LearnerGroup([object()], version=4, step_s=5.0))


class Waiting:
    """In place of WeightBroadcaster: waits for members that don't come, until the group is given up; or joins at once."""

    comes = False

    def __init__(self, *_: Any, given_up: threading.Event, **__: Any) -> None:
        self.is_closed = False
        if not self.comes and given_up.wait(60):
            raise SyncError("the learner has left it meanwhile")

    def close(self) -> None:
        self.is_closed = True


def test_a_rank_leaves_a_weight_group_whose_members_it_still_awaits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other thread does; a call that comes before the join is known, too, as calls may overtake each other."""
    monkeypatch.setattr("evenkeel.learner.weights.broadcast.WeightBroadcaster", Waiting)
    actor: Any = rank_with(Pieces(), 0)
    actor._learner.placement = SimpleNamespace(device=torch.device("cpu"))
    told = ("127.0.0.1", 1, 2)
    actor._served = "weights-0-1", object()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(actor.open_broadcast, *told, "weights-0-1", 300.0)
        while not opening.running():
            time.sleep(0.01)
        time.sleep(0.1)
        actor.close_broadcast("weights-0-1")
        with pytest.raises(SyncError, match="has left it meanwhile"):
            opening.result(20)
    actor.close_broadcast("weights-0-2")
    with pytest.raises(SyncError, match="weights-0-2: it was given up before the learner joined it"):
        actor.open_broadcast(*told, "weights-0-2", 300.0)
    monkeypatch.setattr(Waiting, "comes", True)
    actor._served = "weights-0-3", object()
    actor.open_broadcast(*told, "weights-0-3", 300.0)
    joined = actor._broadcaster
    assert not joined.is_closed
    actor.close_broadcast("weights-0-3")
    assert joined.is_closed and actor._broadcaster is None


def test_a_weight_group_is_left_out_of_turn() -> None:
    """Ray's thread for the join may be waiting in it."""
    groups = [getattr(LearnerRankActor, name).__ray_concurrency_group__ for name in ("open_broadcast", "close_broadcast")]
    assert groups[0] != groups[1] and groups[1] in CONCURRENCY_GROUPS
