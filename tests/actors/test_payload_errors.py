"""What can't be read of the object store: lost with a node, sampled again; without room, said. What goes on without it: small groups."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError, RayTaskError

from actors.carriers import StoredGroup, Ticket
from actors.payloads import fetch_s, fetched, to_hand_on
from correction.errors import ActorLost
from rollout.trajectory import Group
from tests.actors.cases import group, prompts
from tests.actors.simulated_time import simulate


def stored(error: Exception | None) -> tuple[Any, list[int]]:
    """Of two groups, the second of which can't be read."""

    async def scenario() -> tuple[Any, list[int]]:
        groups = [group(ticket) for ticket in (Ticket(number, one, 0) for number, one in enumerate(prompts(0, 2)))]
        values = [asyncio.get_running_loop().create_future() for _ in groups]
        values[0].set_result(groups[0])
        values[1].set_result(groups[1]) if error is None else values[1].set_exception(error)
        return await fetched([StoredGroup(one.facts, value) for one, value in zip(groups, values, strict=True)], deadline_s=5.0)

    return asyncio.run(scenario())


def test_what_went_with_its_node_is_told_by_its_id() -> None:
    assert stored(None)[1] == []
    groups, lost = stored(ObjectLostError("id", "owner", ""))
    assert len(groups) == 1 and lost == [1]


def test_tokens_that_do_not_come_in_time_are_lost_and_hold_up_no_batch() -> None:
    """A pull from another node may hang. Before, the batch waited for it as long as for its groups: hours, with long answers."""
    groups: list[Group] = []

    async def scenario() -> None:
        groups.extend(group(Ticket(number, one, 0)) for number, one in enumerate(prompts(0, 2)))
        values = [asyncio.get_running_loop().create_future() for _ in groups]
        values[0].set_result(groups[0])
        stored = [StoredGroup(one.facts, value) for one, value in zip(groups, values, strict=True)]
        limit_s = fetch_s(stored, bytes_per_s=1e3)
        assert limit_s == pytest.approx(60.0 + 8 * 4096 / 1e3), "two groups of two answers of two tokens"
        assert await fetched(stored, deadline_s=limit_s) == ([groups[0]], [1])
        assert asyncio.get_running_loop().time() == pytest.approx(limit_s)

    simulate(scenario)


@pytest.mark.parametrize("kind", [ObjectStoreFullError, OutOfDiskError])
def test_a_result_without_room_is_no_loss_of_a_node(kind: type[Exception]) -> None:
    """Sampled again it would find no room again, for ever, and be told as gone with its worker's node."""
    for error in (kind("full"), RayTaskError("generate_group", "a traceback", kind("full")).as_instanceof_cause()):
        with pytest.raises(ActorLost, match=r"^group 1: no room in Ray's object store \(\w+\): its node needs more memory in /dev/shm"):
            stored(error)


@pytest.mark.parametrize(("token_bytes", "goes"), [(8, "itself"), (100 * 1024 // 4 - 1, "itself"), (100 * 1024 // 4, "by reference")])
def test_a_group_goes_on_itself_where_ray_would_keep_it_in_this_process_for_good(token_bytes: int, goes: str) -> None:
    """Four tokens, and Ray's limit for results that it hands over by value: 100 KiB."""
    whole = group(Ticket(0, prompts(0, 1)[0], 0))

    async def handed_on(error: Exception | None = None) -> tuple[Any, Any]:
        reference = asyncio.get_running_loop().create_future()
        reference.set_result(whole) if error is None else reference.set_exception(error)
        found = await to_hand_on(whole.facts, reference, token_bytes)
        return found, reference

    assert sum(one.response_tokens for one in whole.facts.trajectories) == 4
    found, reference = asyncio.run(handed_on())
    assert found is (whole if goes == "itself" else reference)
    found, reference = asyncio.run(handed_on(ObjectLostError("id", "owner", "")))
    assert found is reference, "who computes with it says that it is lost"
