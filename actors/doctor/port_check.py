"""Checks that a free port on another node can be reached, as other ranks and engines have to reach those of the learner's rank 0."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

_CONNECT_S = 3.0
_SIGN = b"."


class PortListener:
    """Listens on a free port, and accepts connections. Used as a Ray actor."""

    def open(self) -> tuple[str, int]:
        from actors.metrics.exporter import node_address

        self._socket = socket.create_server((node_address(), 0))
        threading.Thread(target=self._answer, daemon=True).start()
        host, port = self._socket.getsockname()[:2]
        return host, port

    def _answer(self) -> None:
        while True:
            caller, _ = self._socket.accept()
            with caller, contextlib.suppress(OSError):
                caller.sendall(_SIGN)


class OpenPort:
    """A free port of a node, with a PortListener."""

    def __init__(self, listener: Any, address: tuple[str, int]) -> None:
        self._listener, self.address = listener, address

    @classmethod
    def on(cls, node_id: str, *, within_s: float) -> OpenPort | None:
        """None if the listener can't be started on the node, or not in time; the node's facts say why."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        listener: Any = ray.remote(PortListener).options(num_cpus=0, scheduling_strategy=there).remote()
        try:
            address: tuple[str, int] = ray.get(listener.open.remote(), timeout=within_s)
            return cls(listener, address)
        except ray.exceptions.RayError:
            ray.kill(listener)
            return None

    def close(self) -> None:
        import ray

        ray.kill(self._listener)


def why_unreachable(address: tuple[str, int]) -> str:
    """Why a PortListener could not be reached; empty: it could."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_S) as there:
            there.settimeout(_CONNECT_S)
            found = there.recv(1)
    except OSError as error:
        return f"{address[0]}:{address[1]}: {error}"
    return "" if found == _SIGN else f"{address[0]}:{address[1]}: something else answers there"
