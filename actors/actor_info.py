"""What an actor tells the controller when it is up."""

from __future__ import annotations

from dataclasses import dataclass

import ray


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Who an actor is and where its numbers are."""

    role: str
    """"rollout", "learner", ..."""
    name: str
    """Which one of its role."""
    pid: int
    target: str
    """host:port of its Prometheus endpoint."""
    detail: str = ""
    """What a person should know of it besides."""

    @property
    def key(self) -> str:
        return f"{self.role}-{self.name}"


def listen_address(bind: str) -> str:
    """`metrics.bind` as an address: "node" means this node's own, as other nodes reach it."""
    return node_address() if bind == "node" else bind


def node_address() -> str:
    """This node's address in its Ray cluster."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
