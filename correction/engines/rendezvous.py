"""Where ranks of torch.distributed find each other: a store that listens on one address, instead of all of the machine's."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def rendezvous_store(host: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Rank 0 serves the store at host:port and waits for the others, which connect to it.

    torch itself would listen on all interfaces, and the store has no authentication: whoever reaches it can send a run wrong numbers.

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
    return TCPStore(host, port, world_size, is_master=True, timeout=timeout, master_listen_fd=owned_by_store)
