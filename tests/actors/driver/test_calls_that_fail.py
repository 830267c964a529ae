"""A call to a part that is late, or whose argument or answer is lost: made again, or the run goes back, or it ends."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import (
    ActorDiedError,
    OutOfDiskError,
    OwnerDiedError,
    RayTaskError,
)

from evenkeel.actors.driver.recovery import Lost, lost_among, lost_answer, what_is_lost, while_they_answer
from evenkeel.actors.processes.supervision import wait_for
from evenkeel.correction.errors import ActorLost, DeadlineExceeded, RankFailed
from tests.actors.driver.test_lost_parts import ALIVE, GONE, Part


def test_a_call_that_is_late_is_made_again_if_all_answer_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a queue that was late by a few seconds more than the deadline ended the run, as nothing of it was lost."""
    monkeypatch.setattr("evenkeel.actors.driver.recovery._ANSWER_S", 0.2)
    told: list[str] = []
    pauses = [1.0, 1.0, 0.0]

    async def call() -> str:
        await asyncio.sleep(pauses.pop(0))
        return "settled"

    def asked(part: Part) -> str:
        notify = lambda _, text: told.append(text)  # noqa: E731
        return asyncio.run(while_they_answer({"queue": part}, call, "advance", deadline_s=0.1, notify=notify))

    assert asked(Part(ALIVE)) == "settled" and len(told) == 2 and "answers again" in told[0]
    for part in (Part("silent"), Part(GONE)):  # lost from here on: one that answers again a moment later would end the run
        pauses[:] = [1.0]
        with pytest.raises(ActorLost, match=r"^advance: not done.*queue gave no answer"):
            asked(part)
    assert len(told) == 2


def test_a_call_that_hangs_in_an_actor_that_answers_ends_with_its_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.actors.driver.recovery._ANSWER_S", 0.2)
    told: list[str] = []
    hangs = while_they_answer(
        {"queue": Part(ALIVE)}, lambda: asyncio.sleep(60.0), "advance", deadline_s=0.01, notify=lambda _, text: told.append(text)
    )
    with pytest.raises(DeadlineExceeded, match=r"^advance: not done"):
        asyncio.run(hangs)
    assert len(told) == 9, "asked ten times"


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (ActorDiedError(), "an argument of a call is gone (ActorDiedError)"),
        (OwnerDiedError("", "", ""), "an argument of a call is gone (OwnerDiedError)"),
        (OutOfDiskError("full"), "no room in Ray's object store (OutOfDiskError): its node needs more memory in /dev/shm"),
        (RayTaskError("g", "another traceback", KeyError("x")), ""),
        (KeyError("x"), ""),
    ],
    ids=["its maker died", "its owner died", "no room", "a bug in a call of the call's", "a bug"],
)
def test_a_call_whose_argument_or_answer_is_gone_takes_the_run_back_and_a_bug_ends_it(cause: Exception, expected: str) -> None:
    """Ray says of all of them that the task has failed. What a batch was put into the store by is the service: it is replaced alone."""
    error = RayTaskError("step", "a long traceback", cause).as_instanceof_cause()
    assert lost_answer(error).startswith(expected) and bool(lost_answer(error)) == bool(expected)
    lost = asyncio.run(lost_among({"queue": Part(ALIVE)}, error))
    assert lost == Lost(answer=lost_answer(error)) and bool(lost) == bool(expected)
    of_a_run = asyncio.run(lost_among({"learner rank 0": Part(ALIVE), "correction service": Part(ALIVE)}, error))
    assert (bool(of_a_run) and of_a_run.is_replaceable) == expected.startswith("an argument") and bool(of_a_run) == bool(expected)
    if expected:
        said = what_is_lost(lost, error)
        assert said.startswith(f"lost: an answer ({expected}") and "traceback" not in said


def test_a_full_store_is_said_of_an_answer_as_well() -> None:
    """An answer that Ray could not write down comes as an error of the call itself."""

    async def call() -> None:
        raise OutOfDiskError("full")

    with pytest.raises(ActorLost) as caught:
        asyncio.run(wait_for(call(), "correct <- correction service", deadline_s=10.0))
    what = "correct <- correction service: no room in Ray's object store (OutOfDiskError): its node needs more memory in /dev/shm"
    assert lost_answer(caught.value).startswith(what)


def test_a_rank_that_has_failed_is_lost_unless_another_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lives may say only that its connection to a dead one was closed."""
    monkeypatch.setattr("evenkeel.actors.driver.recovery._ANSWER_S", 0.2)
    error = RankFailed("learner rank 0: its device or a collective has failed in step", rank="learner rank 0")
    for other, expected in ((ALIVE, "learner rank 0"), ("silent", "learner rank 0"), (GONE, "learner rank 1")):  # it may wait in that call
        parts = {"correction service": Part(ALIVE), "learner rank 0": Part(ALIVE), "learner rank 1": Part(other)}
        assert asyncio.run(lost_among(parts, error)) == Lost((expected,))
    assert asyncio.run(lost_among({"correction service": Part(ALIVE)}, error)) == Lost(answer=str(error)), "it isn't a part any more"
    said = what_is_lost(Lost(("learner rank 0",)), error)
    assert said == f"lost: learner rank 0 ({error}); going back to the last checkpoint"
