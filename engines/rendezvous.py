"""Where ranks of torch.distributed find each other, and how one leaves a group that hangs.

Their store listens on one address instead of all of the machine's, and gloo on one interface. Members of a weight group meet there before
torch connects them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

# Name under which torch knows the backend of `gloo_towards`.
_GLOO_TOWARDS = "gloo_towards"


def rendezvous_store(host: str, port: int, *, rank: int, world_size: int, timeout: timedelta, waits: bool = True) -> TCPStore:
    """Rank 0 serves the store at host:port and waits for the others, which connect to it.

    torch itself would listen on all interfaces, and the store has no authentication: whoever reaches it can send a run wrong numbers.

    Args: waits: False: rank 0 doesn't wait here.
    Raises:
        OSError: on rank 0, if the address is not this machine's or the port is taken.
        torch.distributed.DistError: if the others don't come within the timeout, or nobody serves it.
    """
    if rank != 0:
        return TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError:
        listening.close()
        raise
    owned_by_store = listening.detach()
    return TCPStore(host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=waits, master_listen_fd=owned_by_store)


class Rendezvous:
    """Before a weight group is connected its members come together at rank 0's store: all of them are there, or the group is given up.

    Gloo and NCCL connect members in calls that nobody can end, and NCCL's has no deadline: who waits there for a member that is gone does
    nothing else. Rank 0 counts those who came, and says "whole" or "over". Each method asks the store over a connection of its own, and
    raises what torch says if the store is gone.
    """

    def __init__(self, host: str, port: int, name: str, *, timeout: timedelta) -> None:
        """Waits for the store. Args: name: of the group. Raises: torch.distributed.DistError if nobody serves it within the timeout."""
        store = TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)
        self._board = PrefixStore(f"{name}/meeting", store)

    def arrive(self) -> None:
        """Called once by each member but rank 0."""
        self._board.add("came", 1)

    def came(self) -> int:
        """Number of members that have arrived."""
        return self._board.add("came", 0)

    def begin(self) -> None:
        """Called by rank 0 when all are there."""
        self._board.set("whole", "")

    def has_begun(self) -> bool:
        return self._board.check(["whole"])

    def give_up(self) -> None:
        """Called by rank 0 if the group is not wanted any more, or a member doesn't come."""
        self._board.set("over", "")

    def is_given_up(self) -> bool:
        return self._board.check(["over"])


@contextmanager
def gloo_interface_towards(master: str | None, interfaces: Mapping[str, Sequence[Any]]) -> Iterator[None]:
    """Let gloo's groups made in this block listen only on the interface that leads to the master, unless the user has named one.

    Left alone, gloo takes the address of the machine's own name, which may be another network's, or none. For the groups of torch and
    Megatron, which one thread makes: the environment is the process's. Other threads have `gloo_towards`.
    Args: interfaces: of this machine, by name, with their addresses, as psutil.net_if_addrs() has them.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    interface = named or (_interface_towards(master, interfaces) if master else None)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # an empty value is an error for gloo
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if named:
            os.environ["GLOO_SOCKET_IFNAME"] = named


def gloo_towards(master: str | None, interfaces: Mapping[str, Sequence[Any]]) -> tuple[str, Any]:
    """A backend for one group of gloo's that listens as in `gloo_interface_towards`, and its options, as torch's functions that make groups
    take them. Any thread may use it at any time.

    torch's "gloo" takes no options: it reads the interface from the environment in the call that also connects the members. That call may
    last until the group's timeout, if a member is gone, and no other thread could set the environment for its own group meanwhile.
    """
    from torch.distributed.distributed_c10d import Backend, ProcessGroupGloo  # torch.distributed takes its time

    if _GLOO_TOWARDS.upper() not in Backend._plugins:  # where torch notes it last: another thread may be at it
        Backend.register_backend(_GLOO_TOWARDS, _gloo, extended_api=True, devices=Backend.backend_capability["gloo"])
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or (_interface_towards(master, interfaces) if master else None)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    names = interface.split(",") if interface else []
    options._devices = [ProcessGroupGloo.create_device(interface=name) for name in names] or [ProcessGroupGloo.create_default_device()]
    options._threads = 2 * len(options._devices)  # as torch has it
    return _GLOO_TOWARDS, options


def _gloo(group: Any, options: Any) -> Any:
    """Args: group: torch's _DistributedBackendOptions."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    options._timeout, options.group_name, options.global_ranks_in_group = group.timeout, group.group_id, group.global_ranks_in_group
    return ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)


def abort_group(group: Any) -> None:
    """End the communicator of a torch ProcessGroup, if it has one, so that its kernels leave the GPU. It may take until NCCL lets it: where
    something waits, in a thread."""
    with suppress(Exception):  # torch's watchdog may have done it
        group.abort()


def keep_nccl_on(address: str, interfaces: Mapping[str, Sequence[Any]]) -> None:
    """Let NCCL's groups of this process and its children meet, and listen, on the interface of one of this machine's addresses only, unless
    NCCL_SOCKET_IFNAME names one already. To be called before the first of them: NCCL reads it once. What goes over InfiniBand still does;
    without it tensors take this interface, too.

    Args: interfaces: as in `gloo_interface_towards`.
    """
    if interface := _interface_of(address, interfaces):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface.partition(':')[0]}")  # an alias has a colon, which NCCL takes for a port


def _interface_towards(address: str, interfaces: Mapping[str, Sequence[Any]]) -> str | None:
    """Name of the network interface through which packets to an address leave."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # a datagram socket sends nothing here; it only picks the route
        return _interface_of(probe.getsockname()[0], interfaces)


def _interface_of(own_address: str, interfaces: Mapping[str, Sequence[Any]]) -> str | None:
    for name, addresses in interfaces.items():
        if any(item.address.split("%")[0] == own_address for item in addresses):
            return name
    return None
