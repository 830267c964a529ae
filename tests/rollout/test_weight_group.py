"""How a scheduler joins the learner's weight group: who waits for a member that is gone is told to go on.

SGLang's own joining and NCCL's connecting are stand-ins here, the store is torch's. A real engine: test_engine_failures.py; with the
learner's rank and Ray: tests/e2e/test_broadcast_join.py.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenkeel.engines.rendezvous import Rendezvous, rendezvous_store
from evenkeel.rollout.sglang_plugin import hooks
from lab.ports import free_port

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
JOIN, LEAVE = f"{UPDATER}.init_weights_update_group", f"{UPDATER}.destroy_weights_update_group"
NAME, LONG_S, SOON_S = "weights-0-1", 300.0, 20.0
Answer = tuple[bool, str]


class WatchedGroup:
    """NCCL's, of which torch's watchdog knows no error."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def _get_backend(self, _: torch.device) -> object:
        return object()

    def abort(self) -> None:
        self.aborted.set()


class Updater:
    """SGLang's: joins as `connects` does."""

    def __init__(self, device: str = "cpu", connects: Callable[[], object] = lambda: None) -> None:
        self.device, self._connects = device, connects
        self._model_update_group: dict[str, Any] = {}
        self.told: list[Any] = []
        self.left = threading.Event()

    def init_weights_update_group(self, *told: Any) -> Answer:
        self.told.append(told)
        self._connects()
        self._model_update_group[told[4]] = WatchedGroup()
        return True, "joined"

    def destroy_weights_update_group(self, name: str) -> Answer:
        del self._model_update_group[name]
        self.left.set()
        return True, ""


class Store:
    """Rank 0's, of a group of three."""

    def __init__(self) -> None:
        self.port = free_port()
        self.store: Any = rendezvous_store("127.0.0.1", self.port, rank=0, world_size=3, timeout=timedelta(seconds=60), waits=False)
        self.meeting = self.member()

    def member(self) -> Rendezvous:
        return Rendezvous("127.0.0.1", self.port, NAME, timeout=timedelta(seconds=60))

    def until_came(self, count: int) -> None:
        ends = time.monotonic() + SOON_S
        while self.meeting.came() < count:
            assert time.monotonic() < ends, f"{self.meeting.came()} of {count} came"
            time.sleep(0.01)

    def leave(self) -> None:
        """As a process that ends."""
        del self.store


def hook_of(monkeypatch: pytest.MonkeyPatch, target: str, timeout_s: float = LONG_S) -> Callable[..., Any]:
    """What the plugin puts around a function of SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registered: dict[str, tuple[Callable[..., Any], HookType]] = {}
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: registered.__setitem__(target, (hook, kind)))
    hooks.register(timeout_s)
    hook, kind = registered[target]
    assert kind is HookType.AROUND
    return hook


class Joining:
    """A join in a thread, as the scheduler would wait for it in its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, port: int, updater: Updater, timeout_s: float) -> None:
        hook = hook_of(monkeypatch, JOIN, timeout_s)
        self.answer: Answer | None = None

        def join() -> None:
            self.answer = hook(Updater.init_weights_update_group, updater, "127.0.0.1", port, 1, 3, NAME, "gloo")

        self._thread = threading.Thread(target=join, daemon=True)
        self._thread.start()

    def end(self) -> Answer:
        self._thread.join(SOON_S)
        assert self.answer is not None, f"the scheduler still waits after {SOON_S:g} s"
        return self.answer


def test_members_are_connected_when_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store, updater = Store(), Updater()
    joining = Joining(monkeypatch, store.port, updater, LONG_S)
    store.until_came(1)
    time.sleep(0.1)
    assert updater.told == [], "it would wait for the other one where nobody can tell it anything"
    store.member().arrive()
    store.meeting.begin()
    assert joining.end() == (True, "joined") and updater.told == [("127.0.0.1", store.port, 1, 3, NAME, "gloo")]


def test_who_waits_for_a_member_that_does_not_come_goes_on_when_the_group_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store, updater = Store(), Updater()
    joining = Joining(monkeypatch, store.port, updater, LONG_S)
    store.until_came(1)
    store.meeting.give_up()
    assert joining.end() == (False, "the group was given up before all members had come") and updater.told == []


def test_who_waits_for_a_member_that_dies_while_they_are_connected_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call for it runs on in its thread. If it succeeds after all, the engine leaves the group that nobody has any more."""
    store, may_end = Store(), threading.Event()
    updater = Updater(connects=lambda: may_end.wait(60))
    joining = Joining(monkeypatch, store.port, updater, LONG_S)
    store.meeting.begin()
    while not updater.told:
        time.sleep(0.01)
    store.meeting.give_up()
    assert joining.end() == (False, "the group was given up before all members were connected")
    may_end.set()
    assert updater.left.wait(SOON_S) and updater._model_update_group == {}


@pytest.mark.parametrize("is_connecting", [False, True])
def test_who_waits_goes_on_when_the_learner_is_gone(is_connecting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    updater = Updater(connects=lambda: threading.Event().wait(60))
    joining = Joining(monkeypatch, store.port, updater, LONG_S)
    store.until_came(1)
    if is_connecting:
        store.meeting.begin()
        while not updater.told:
            time.sleep(0.01)
    store.leave()
    is_joined, said = joining.end()
    assert not is_joined and "DistNetworkError" in said


def test_who_comes_after_the_group_was_given_up_does_not_wait_for_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is served before anybody is asked. The group has five minutes here; the engine stands still meanwhile."""
    monkeypatch.setattr("evenkeel.rollout.sglang_plugin.weight_group._CONTACT_S", 0.5)
    is_joined, said = Joining(monkeypatch, free_port(), Updater(), LONG_S).end()
    assert not is_joined and "DistNetworkError" in said


def test_the_wait_has_an_end_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody serves the store; whoever has its port says nothing, for which torch waits beyond its own time-out; or a member hangs."""
    said = (False, "the group was not connected in 0 s; a member may be gone")
    assert Joining(monkeypatch, free_port(), Updater(), 0.3).end() == said
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert Joining(monkeypatch, silent.getsockname()[1], Updater(), 0.3).end() == said
    store = Store()
    hanging = Joining(monkeypatch, store.port, Updater(connects=lambda: threading.Event().wait(60)), 0.5)
    store.meeting.begin()
    assert hanging.end() == said


def test_an_engine_leaves_a_group_without_waiting_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may wait for a member that has failed. A group that isn't there is left to SGLang to say."""
    ended, may_end = list[Any](), threading.Event()
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: (may_end.wait(60), ended.append(group)))
    leave, updater, group = hook_of(monkeypatch, LEAVE), Updater(), WatchedGroup()
    updater._model_update_group[NAME] = group
    assert leave(pytest.fail, updater, NAME) == (True, "left")
    assert updater._model_update_group == {} and ended == []
    may_end.set()
    while not ended:
        time.sleep(0.01)
    assert ended == [group]
    assert leave(lambda _, name: (False, f"no {name}"), updater, NAME) == (False, f"no {NAME}")


@pytest.mark.parametrize("comes", [True, False])
def test_nccl_connects_at_the_join_and_not_in_an_update(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a byte from rank 0, which torch's meta device receives here. Without it the first bucket would connect, where the engine stands
    still, and wait there for good if a member is gone."""
    store, updater = Store(), Updater("meta")
    received: list[tuple[torch.Size, torch.dtype, str]] = []

    def broadcast(tensor: torch.Tensor, *, src: int, group: Any) -> None:
        assert src == 0 and group is updater._model_update_group[NAME]
        received.append((tensor.shape, tensor.dtype, tensor.device.type))

    class Arrival:
        def record(self) -> None: ...

        def query(self) -> bool:
            return comes

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(torch.cuda, "Event", Arrival)
    joining = Joining(monkeypatch, store.port, updater, LONG_S if comes else 1.5)
    store.meeting.begin()
    is_joined, said = joining.end()
    assert received == [(torch.Size([1]), torch.uint8, "meta")]
    assert (is_joined, said) == (True, "joined") if comes else not is_joined and "not connected in" in said
    ends = time.monotonic() + SOON_S
    while comes != (NAME in updater._model_update_group):  # the group is of no use; it ends beside the scheduler
        assert time.monotonic() < ends
        time.sleep(0.01)
