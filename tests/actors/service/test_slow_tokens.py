"""Tokens that the service waits for are told to the run, with whose they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from evenkeel.actors.carriers import StoredGroup, Ticket, WaitNotice
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.groups import tokens as payloads
from evenkeel.actors.processes.part_heartbeat import raise_when_silent
from evenkeel.actors.record.run_folder import RunEvent
from tests.actors.cases import FakeActor, prompt
from tests.actors.service.service_scene import GROUPS, ServiceScene, answered
from tests.actors.simulated_time import simulate


def test_the_run_hears_whose_tokens_the_service_waits_for() -> None:
    """While it waits, as an event of the run, with the worker and its node. Before, it was a line in the service's own log, and the run
    said no more than that its groups are drawn."""
    told = list[Any]()

    async def scenario() -> None:
        scene = ServiceScene(deadlines=DeadlinesConfig(batch_s=1e4))
        tickets = await scene.admit(0, GROUPS)
        asking = asyncio.create_task(scene.next_batch(0))
        parts = {"correction service": FakeActor(scene.service)}
        watching = asyncio.create_task(raise_when_silent(parts, 40.0, lambda *said: told.append(said)))
        sources = [f"rollout worker {number} on node ab12" for number in range(GROUPS)]
        never = asyncio.get_running_loop().create_future()
        pairs = zip(tickets, sources, strict=True)
        scene.books.put(*[StoredGroup(answered(ticket).facts, never, source=source) for ticket, source in pairs])
        await asyncio.sleep(59.0)
        assert scene.books.book.counts()["drawn"] == GROUPS
        asking.cancel()
        watching.cancel()
        scene.stop()

    simulate(scenario)
    what = "tokens of 4 groups <- rollout worker 0 on node ab12, rollout worker 1 on node ab12, rollout worker 2 on node ab12 and 1 more"
    assert told == [("warning", WaitNotice(f"correction service: {what}", 30))]
    event = RunEvent.now(*told[0])
    assert RunEvent.parse(event.line) == event and event.notice is not None, "a wait for who reads the run's folder, too"


def test_a_notice_names_the_groups_that_are_not_here_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    class StoreReference:
        """Of Ray's."""

    references = [StoreReference() for _ in range(6)]
    facts = [answered(Ticket(number, prompt(number), 0)).facts for number in range(6)]
    groups = [StoredGroup(facts[i], one, source=f"rollout worker {i % 2}") for i, one in enumerate(references)]

    def wait(asked: list[StoreReference], *, num_returns: int, timeout: float) -> tuple[list[StoreReference], list[StoreReference]]:
        assert (asked, num_returns, timeout) == (references, 6, 0)
        return asked[:1], asked[1:]

    monkeypatch.setattr(payloads.ray, "ObjectRef", StoreReference)
    monkeypatch.setattr(payloads.ray, "wait", wait)
    said = asyncio.run(payloads._missing(groups))
    assert said == "5 groups not here yet: 1, 2, 3 ... of rollout worker 1, rollout worker 0"
    monkeypatch.setattr(payloads.ray, "wait", lambda asked, **_: (asked, []))
    assert asyncio.run(payloads._missing(groups)) == ""
