"""What can't be read of the object store: lost with a node, sampled again; without room, said. What goes on without it: small groups. How
facts travel."""

from __future__ import annotations

import asyncio
import pickle
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, ObjectStoreFullError, OutOfDiskError, RayTaskError

from evenkeel.actors.carriers import StoredGroup, Ticket
from evenkeel.actors.groups.tokens import GONE, LATE, fetched, read_now, to_hand_on, tokens_fetch_s, whole
from evenkeel.correction.errors import ActorLost
from evenkeel.rollout.trajectory import AnswerFacts, FailureKind, FinishReason, Group, GroupFacts, VersionSpan
from tests.actors.cases import group, prompts, trajectory
from tests.actors.simulated_time import simulate


def stored(error: Exception | None) -> tuple[Any, dict[int, str]]:
    """Of two groups, the second of which can't be read."""

    async def scenario() -> tuple[Any, dict[int, str]]:
        groups = [group(ticket) for ticket in (Ticket(number, one, 0) for number, one in enumerate(prompts(0, 2)))]
        values = [asyncio.get_running_loop().create_future() for _ in groups]
        values[0].set_result(groups[0])
        values[1].set_result(groups[1]) if error is None else values[1].set_exception(error)
        return await fetched([StoredGroup(one.facts, value) for one, value in zip(groups, values, strict=True)], deadline_s=5.0)

    return asyncio.run(scenario())


def test_what_went_with_its_node_is_told_by_its_id() -> None:
    assert stored(None)[1] == {}
    groups, lost = stored(ObjectLostError("id", "owner", ""))
    assert len(groups) == 1 and lost == {1: GONE}


def test_tokens_that_do_not_come_in_time_are_lost_and_hold_up_no_batch() -> None:
    """A pull from another node may hang. Before, the batch waited for it as long as for its groups: hours, with long answers."""
    groups: list[Group] = []

    async def scenario() -> None:
        groups.extend(group(Ticket(number, one, 0)) for number, one in enumerate(prompts(0, 2)))
        values = [asyncio.get_running_loop().create_future() for _ in groups]
        values[0].set_result(groups[0])
        stored = [StoredGroup(one.facts, value) for one, value in zip(groups, values, strict=True)]
        limit_s = tokens_fetch_s(stored, bytes_per_s=1e3)
        assert limit_s == pytest.approx(60.0 + 8 * 4096 / 1e3), "two groups of two answers of two tokens"
        assert await fetched(stored, deadline_s=limit_s) == ([groups[0]], {1: LATE})
        assert asyncio.get_running_loop().time() == pytest.approx(limit_s)

    simulate(scenario)


def test_tokens_and_wide_fields_have_one_deadline() -> None:
    """A checkpoint after SIGTERM has seconds: tokens that come late leave the wide fields what is left of them, not as long again."""

    async def scenario() -> None:
        clock, one = asyncio.get_running_loop().time, group(Ticket(0, prompts(0, 1)[0], 0))
        tokens, hangs = (asyncio.get_running_loop().create_future() for _ in range(2))
        asyncio.get_running_loop().call_later(8.0, tokens.set_result, one)
        assert await whole([StoredGroup(one.facts, tokens, hangs)], deadline_s=10.0) == ([], [0])
        assert clock() == pytest.approx(10.0)

    simulate(scenario)


def test_what_a_rank_cannot_read_is_gone_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"there": 1, "gone": ObjectLostError("id", "owner", ""), "late": GetTimeoutError("not yet")}

    def get(asked: Any, *, timeout: float) -> Any:
        found = [values[one] for one in ([asked] if isinstance(asked, str) else asked)]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found[0] if isinstance(asked, str) else found

    monkeypatch.setattr(ray, "get", get)
    assert read_now(list(values), 5.0) == ({"there": 1}, {"gone": GONE, "late": LATE})
    assert read_now(["there"], 5.0) == ({"there": 1}, {})


@pytest.mark.parametrize("kind", [ObjectStoreFullError, OutOfDiskError])
def test_a_result_without_room_is_no_loss_of_a_node(kind: type[Exception]) -> None:
    """Sampled again it would find no room again, for ever, and be told as gone with its worker's node."""
    for error in (kind("full"), RayTaskError("generate_group", "a traceback", kind("full")).as_instanceof_cause()):
        with pytest.raises(ActorLost, match=r"^group 1: no room in Ray's object store \(\w+\): its node needs more memory in /dev/shm"):
            stored(error)


@pytest.mark.parametrize(("tokens", "goes"), [(2, "itself"), (100 * 1024 // 16 - 1, "itself"), (100 * 1024 // 16, "by reference")])
def test_a_group_goes_on_itself_where_ray_would_keep_it_in_this_process_for_good(tokens: int, goes: str) -> None:
    """Two answers of so many tokens, each of at least eight bytes, and Ray's limit for results that it hands over by value: 100 KiB."""
    one = trajectory(prompts(0, 1)[0], range(tokens))
    whole = replace(group(Ticket(0, prompts(0, 1)[0], 0)), trajectories=(one, one))

    async def handed_on(error: Exception | None = None) -> tuple[Any, Any]:
        reference = asyncio.get_running_loop().create_future()
        reference.set_result(whole) if error is None else reference.set_exception(error)
        found = await to_hand_on(whole.facts, reference)
        return found, reference

    found, reference = asyncio.run(handed_on())
    assert found is (whole if goes == "itself" else reference)
    found, reference = asyncio.run(handed_on(ObjectLostError("id", "owner", "")))
    assert found is reference, "who computes with it says that it is lost"


def test_facts_are_themselves_after_a_process_and_are_pickled_as_plain_tuples() -> None:
    """All of their fields, of answers that several versions sampled, too; only what is no dataclass is pickled by name."""
    spans = (VersionSpan(3, 0, 5), VersionSpan(4, 5, 9))
    answers = (
        AnswerFacts(9, spans, FinishReason.LENGTH, 0.5, {"format": 0.5}, None, None, 7, 2, 5, 40, 0.25, 3, (0.5, 0.0), 4, 1),
        AnswerFacts(0, (), FinishReason.ABORT, None, {}, "the engine aborted it", FailureKind.ENGINE),
    )
    for field in fields(AnswerFacts):
        assert getattr(answers[0], field.name) != getattr(answers[1], field.name), "each field has a value that another one's would change"
    facts = GroupFacts(11, "train/0/11", answers, 3, generate_s=1.5, reward_s=0.25, wide_bytes=1 << 20)
    pickled = pickle.dumps(facts)
    assert pickle.loads(pickled) == facts
    assert b"FinishReason" in pickled and not {b"AnswerFacts", b"VersionSpan"} & set(re.findall(rb"\w+", pickled))
