"""On which addresses the groups of torch.distributed listen: they have no authentication."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch

from evenkeel.correction.errors import SyncError
from evenkeel.engines.rendezvous import Rendezvous, keep_nccl_on, rendezvous_store
from evenkeel.learner.weights.broadcast import WeightBroadcaster
from lab.ports import free_port

Listeners = Callable[[], set[tuple[str, int]]]


@contextmanager
def new_listeners() -> Iterator[Listeners]:
    """Of this process, since the block began: (address, port)."""

    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    before = listening()
    yield lambda: listening() - before


def address_in_a_network() -> str:
    """Of this machine, where others reach it."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not ipaddress.ip_address(one.address).is_loopback:
                return one.address
    pytest.skip("this machine is in no network")


def test_a_store_listens_on_its_address_alone() -> None:
    port = free_port("127.0.0.1")
    with new_listeners() as listeners:
        store = rendezvous_store("127.0.0.1", port, rank=0, world_size=1, timeout=timedelta(seconds=30))
        assert listeners() == {("127.0.0.1", port)}
        del store


INTERFACES = {
    "lo": [SimpleNamespace(address="127.0.0.1")],
    "eth0": [SimpleNamespace(address="fe80::1%eth0"), SimpleNamespace(address="10.0.0.7")],
    "eth1": [SimpleNamespace(address="192.168.1.7")],
}


@pytest.mark.parametrize(
    ("address", "of_the_user", "expected"),
    [("10.0.0.7", None, "=eth0"), ("127.0.0.1", None, "=lo"), ("10.0.0.7", "eth1", "eth1"), ("10.9.9.9", None, None)],
    ids=["a node's own", "a private run", "the user's word", "not this machine's"],
)
def test_nccl_meets_on_the_node_s_own_interface(
    monkeypatch: pytest.MonkeyPatch, address: str, of_the_user: str | None, expected: str | None
) -> None:
    """Left alone, NCCL takes any interface that it finds, the public one, too; "=" is its word for exactly this name."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", of_the_user or "")  # so that it is taken back at the end
    if not of_the_user:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    keep_nccl_on(address, INTERFACES)
    assert os.environ.get("NCCL_SOCKET_IFNAME") == expected


@pytest.mark.parametrize("is_private", [True, False], ids=["loopback", "in a network"])
def test_a_weight_group_listens_where_its_members_meet(is_private: bool) -> None:
    """Left alone, gloo would take the address of the machine's own name: another network's, or one that no other node reaches."""
    host = "127.0.0.1" if is_private else address_in_a_network()
    with new_listeners() as listeners:
        group = WeightBroadcaster(host, free_port(host), 1, f"at {host}", 30.0, torch.device("cpu"))
        found = listeners()
        group.close()
    assert len(found) == 2, "its store and gloo"
    assert {address for address, _ in found} == {host}


def test_the_user_s_word_about_the_interface_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = address_in_a_network()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with new_listeners() as listeners:
        group = WeightBroadcaster(host, free_port(host), 1, "on lo", 30.0, torch.device("cpu"))
        found = listeners()
        group.close()
    assert {address for address, _ in found} == {host, "127.0.0.1"}, "its store, and gloo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_member_that_dies_while_gloo_connects_keeps_no_other_group_waiting() -> None:
    """Of the first group all have come, and one is gone before it is connected: gloo waits for it for 20 s, in a call that nobody ends. The
    next one has a quarter of that."""
    port, given_up = free_port(), threading.Event()

    def lead() -> None:
        with pytest.raises(SyncError):
            WeightBroadcaster("127.0.0.1", port, 2, "stuck", 20.0, torch.device("cpu"), given_up=given_up)

    with new_listeners() as listeners:
        leading = threading.Thread(target=lead, daemon=True)
        leading.start()
        Rendezvous("127.0.0.1", port, "stuck", timeout=timedelta(seconds=20)).arrive()
        while len(listeners()) < 2:  # gloo listens, and looks for the other one
            time.sleep(0.01)
        group = WeightBroadcaster("127.0.0.1", free_port(), 1, "next", 5.0, torch.device("cpu"))
        assert leading.is_alive()
        group.send({"a": torch.zeros(2)})
        group.close()
    given_up.set()
    leading.join()
