"""On which addresses the groups of torch.distributed listen: they have no authentication."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import pytest
import torch

from correction.engines.rendezvous import rendezvous_store
from learner.broadcast import WeightBroadcaster

Listeners = Callable[[], set[tuple[str, int]]]


@contextmanager
def new_listeners() -> Iterator[Listeners]:
    """Of this process, since the block began: (address, port)."""

    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    before = listening()
    yield lambda: listening() - before


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


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
