"""Requests of the correction service for forwards; how they end up in a batch is in test_correction_service.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.carriers import FetchRequest, ForwardRequest, KeepRequest, PreparedBatch, ScoringRequest, SplitRequest
from actors.ranks.forwards import ForwardRequests, next_batch
from correction.errors import DeadlineExceeded, EngineError
from tests.actors.cases import FakeActor


def ask(requests: ForwardRequests, batch: Any, deadline_s: float = 5.0) -> asyncio.Task[Any]:
    wanted = ScoringRequest(3, batch, wants_proximal=True, wants_reference=False)
    return asyncio.create_task(requests.ask(wanted, deadline_s=deadline_s))


def test_a_request_that_was_given_up_is_not_handed_out() -> None:
    """The learner must not be asked for what nobody waits for any more, and its late answer finds nobody."""

    async def scenario() -> None:
        requests = ForwardRequests()
        first = ask(requests, "first", deadline_s=0.01)
        with pytest.raises(DeadlineExceeded, match=r"^forward at version 3 <- learner: not done in 0 s"):
            await first
        taking = asyncio.create_task(requests.take())
        await asyncio.sleep(0.01)
        assert not taking.done()
        second, third = ask(requests, "second"), ask(requests, "third")
        taken = await taking
        assert (taken.batch, taken.version, taken.wants_proximal, taken.wants_reference) == ("second", 3, True, False)
        assert (await requests.take()) is taken, "whoever took it may have told nobody"
        proximal: Any = SimpleNamespace(logprobs=torch.ones(1), route_places=None)
        requests.answer(taken.number - 1, proximal, None, None, 1.0, {})
        requests.answer(taken.number, proximal, None, None, 2.0, {})
        answer = await second
        assert list(answer.fields) == ["proximal_logprobs"] and answer.seconds == 2.0 and not third.done()
        assert (await requests.take()).batch == "third"
        third.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [False, True], ids=["answers", "fails"])
def test_the_controller_brings_what_is_needed_and_asks_again(fails: bool) -> None:
    """At the version of the request, in its order, nothing twice; an error of the learner ends the wait for the batch."""
    told: list[Any] = []
    batch = PreparedBatch(3, None, None, 0, (), (), 0.0, 0.0)  # type: ignore[arg-type]
    answers = [ScoringRequest(3, "a", True, True, number=1), ScoringRequest(3, "b", False, True, number=2), batch]

    class Service:
        async def next_batch(self) -> Any:
            return answers.pop(0)

        async def forwarded(self, number: int, proximal: Any, reference: Any, split: Any, seconds: float, lost: Any) -> None:
            told.append((number, proximal, reference))

    class Learner:
        async def proximal(self, batch: Any, *, version: int) -> str:
            if fails:
                raise EngineError("rank 1 is gone")
            return f"proximal of {batch} at v{version}"

        async def reference_logprobs(self, batch: Any, *, version: int) -> str:
            return f"reference of {batch} at v{version}"

    async def scenario() -> None:
        service: Any = FakeActor(Service())
        assert await next_batch(service.next_batch.remote, service, Learner(), step=3, deadline_s=5.0) is batch  # type: ignore[arg-type]

    if fails:
        with pytest.raises(EngineError, match="rank 1 is gone"):
            asyncio.run(scenario())
        assert told == []
        return
    asyncio.run(scenario())
    assert told == [(1, "proximal of a at v3", "reference of a at v3"), (2, None, "reference of b at v3")]


@pytest.mark.parametrize(
    ("request_", "calls", "answer"),
    [
        (KeepRequest(3, oldest=1, number=7), ["keep 3 1"], (None, None, None, {})),
        (FetchRequest(3, "corrected", None, 9.0, number=7), ["fetch corrected 9.0 False"], (None, None, None, {})),  # type: ignore[arg-type]
        (SplitRequest(3, "sample", oldest=1, fetch_s=9.0, number=7), ["fetch sample 9.0 True", "split 1"], (None, None, "both", {})),
        (SplitRequest(3, "lost", oldest=1, fetch_s=9.0, number=7), ["fetch lost 9.0 True"], (None, None, None, {5: "gone"})),
        (ScoringRequest(3, "lost", True, True, 9.0, number=7), ["fetch lost 9.0 False"], (None, None, None, {5: "gone"})),
    ],
    ids=["keep", "fetch", "split", "split of lost groups", "scores of lost groups"],
)
def test_the_learner_does_what_a_request_is_for_and_nothing_with_groups_that_are_lost(
    request_: ForwardRequest, calls: list[str], answer: tuple[Any, ...]
) -> None:
    done: list[str] = []
    told: list[Any] = []
    batch = PreparedBatch(3, None, None, 0, (), (), 0.0, 0.0)  # type: ignore[arg-type]
    answers = [request_, batch]

    class Service:
        async def next_batch(self) -> Any:
            return answers.pop(0)

        async def forwarded(self, number: int, *found: Any) -> None:
            told.append((number, *found[:3], found[4]))

    class Learner:
        async def fetch(self, batch: Any, correction: Any, *, step: int, limit_s: float, everything: bool) -> dict[int, str]:
            done.append(f"fetch {batch} {limit_s} {everything}")
            return {5: "gone"} if batch == "lost" else {}

        async def keep_weights(self, version: int, *, oldest: int) -> None:
            done.append(f"keep {version} {oldest}")

        async def at_sampling(self, batch: Any, *, version: int, oldest: int) -> str:
            done.append(f"split {oldest}")
            return "both"

    async def scenario() -> None:
        service: Any = FakeActor(Service())
        assert await next_batch(service.next_batch.remote, service, Learner(), step=3, deadline_s=5.0) is batch  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert (done, told) == (calls, [(7, *answer)])
