"""Limits of `evenkeel doctor --deep`, part by part, and what becomes of ranks and an engine that hang."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.carriers import ExportPlan
from actors.config import RunConfig
from actors.doctor import live
from actors.doctor.deep_facts import DeepFacts
from actors.doctor.deep_rules import deep_complaints
from actors.doctor.live import PART_S, START_S, _Visit, checked_engine
from actors.doctor.on_ranks import collectives
from tests.actors.doctor.test_deep_doctor import BY_BROADCAST, eight
from tests.actors.known_models import QWEN3_8B


@pytest.mark.parametrize(
    ("overrides", "requests"),
    [
        ("", 8),
        ("rollout.engine.tensor_parallel=2 rollout.engine.attention_data_parallel=2", 16),
        ("rollout.engine.max_running_requests=4", 4),
        ("rollout.engine.engine_args.cuda_graph_max_bs_decode=64", 256),
        ("rollout.engine.device=cpu learner.device=cpu learner.dtype=float32", 64),
    ],
)
def test_the_checked_engine_captures_no_more_graphs_than_the_check_has_requests(overrides: str, requests: int) -> None:
    """SGLang captures those up to max_running_requests of a group of ranks; 36 sizes up to 256, while somebody waits."""
    engine = eight(*overrides.split()).rollout.engine
    checked = checked_engine(engine, 7.0)
    assert checked.max_running_requests == requests
    assert (checked.weight_group_timeout_s, checked.context_length, checked.dtype) == (7.0, None, engine.dtype)


class Silent:
    """A rank, or an engine, that answers nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*_: Any, **__: Any) -> Any:
            self.asked.append(name)
            return asyncio.get_running_loop().create_future()

        return SimpleNamespace(remote=remote)


class HangsInBackward(Silent):
    """A rank that measures its collectives, and nothing more."""

    def __getattr__(self, name: str) -> Any:
        def remote(function: Any, *_: Any) -> Any:
            self.asked.append(function.__name__)
            answer = asyncio.get_running_loop().create_future()
            if function is collectives:
                answer.set_result([])
            return answer

        return SimpleNamespace(remote=remote)


class SilentGroup:
    """Ranks that came up, and wait for each other since then."""

    def __init__(self, rank: type[Silent] = Silent) -> None:
        self.ranks = {f"learner rank {i}": rank() for i in range(2)}
        self.was_killed = False

    async def export(self, plan: ExportPlan, **_: float) -> Any:
        raise AssertionError("ranks that hang are asked nothing more")

    def kill(self) -> None:
        self.was_killed = True


def visited(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, group: SilentGroup | None = None
) -> tuple[DeepFacts, dict[str, float], SilentGroup]:
    """A visit without Ray, of ranks and an engine that hang. Returns: what was found, the seconds that each wait was given, the ranks."""
    group, given = group or SilentGroup(), dict[str, float]()
    waits = live.wait_for

    async def noted(call: Any, what: str, *, deadline_s: float) -> Any:
        given[what] = deadline_s
        return await waits(call, what, deadline_s=0.05)

    async def start(*_: Any, start_s: float, step_s: float, made: Any, **__: Any) -> tuple[Any, list[Any]]:
        given.update({"start of the ranks": start_s, "calls of all ranks": step_s})
        made(group)
        return group, []

    async def on_nodes(*_: Any, what: str, limits: Any, **__: Any) -> list[Any]:
        given[what] = limits.start_s
        return [SimpleNamespace(gradient_norm=1.0, logprobs=None)]

    async def reserve(config: RunConfig) -> Any:
        given["room"] = config.deadlines.start_s
        return SimpleNamespace(group=None)

    stand_ins = {"wait_for": noted, "on_their_nodes": on_nodes, "reserve": reserve, "_create_engine": lambda _: Silent()}
    for name, value in stand_ins.items():
        monkeypatch.setattr(live, name, value)
    monkeypatch.setattr(live.LearnerGroup, "start", start)
    monkeypatch.setattr(live.ray, "wait", lambda *_, **__: None)
    monkeypatch.setattr(live.ray, "kill", lambda _: None)
    found = asyncio.run(asyncio.wait_for(_Visit(run, QWEN3_8B, lambda _: None).facts(), 60.0))
    return found, given, group


def test_ranks_that_wait_for_each_other_are_told_by_the_part_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute, where the run's own deadline is a quarter of an hour; and they are asked nothing more."""
    run = eight()
    assert run.deadlines.start_s > 900.0
    found, given, group = visited(run, monkeypatch)
    assert [what for what, _ in found.broken] == ["collectives of the learner", "the engine"]
    assert found.broken[0][1].startswith("collectives <- learner rank ") and found.broken[0][1].endswith("(doctor --deep waits no longer)")
    assert "start of the engine" in found.broken[1][1]
    assert group.was_killed and [one.asked for one in group.ranks.values()] == [["__ray_call__"]] * 2
    told = [one for one in deep_complaints(found, run) if one.severity == "fail"]
    assert "ray.env.NCCL_DEBUG: INFO" in told[0].setting
    starts = {"room", "a model of two layers", "reference", "start of the ranks", "start of the engine"}
    assert {what for what, seconds in given.items() if seconds == START_S} == starts
    assert all(given[what] == PART_S for what in given.keys() - starts) and PART_S <= 60.0 and START_S <= 240.0


def test_cores_that_others_use_too_get_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus = eight("learner.device=cpu", "rollout.engine.device=cpu", "learner.dtype=float32", "rollout.engine.dtype=float32")
    _, given, _ = visited(on_cpus, monkeypatch)
    assert given["start of the engine"] == min(on_cpus.deadlines.start_s, 4 * START_S) and given["calls of all ranks"] == 4 * PART_S


def test_a_run_s_shorter_deadline_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, given, _ = visited(eight("deadlines.start_s=30"), monkeypatch)
    assert given["start of the ranks"] == given["start of the engine"] == given["room"] == 30.0


def test_ranks_that_hang_in_their_backward_pass_are_asked_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a broadcast either, though the engine has answered: they would wait for each other in that, too."""
    group, snapshot = SilentGroup(HangsInBackward), object()

    async def answers(*_: Any) -> Any:
        return snapshot

    async def broadcast(*_: Any) -> Any:
        raise AssertionError("ranks that hang are asked nothing more")

    for name, value in {"_exported": answers, "_ask_the_engine": answers, "_broadcast_to": broadcast}.items():
        monkeypatch.setattr(_Visit, name, value)
    found, _, _ = visited(eight(BY_BROADCAST), monkeypatch, group)
    ((what, reason),) = found.broken
    assert what == "forward and backward pass of the learner" and reason.startswith("backward <- learner rank ")
    assert group.was_killed and [one.asked for one in group.ranks.values()] == [["collectives", "backward"]] * 2
