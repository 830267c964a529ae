"""What a part of a run is made with, and what it says of itself. What travels between parts is in actors/carriers.py.

Frozen: nothing is changed after it was handed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.config import RolloutConfig
    from rollout.trajectory import Prompt


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that all rollout workers of a run share."""

    rollout: RolloutConfig
    """The run's section."""
    model: Path
    """Folder with config and tokenizer; the weights come from the learner."""
    sample: Prompt
    """A prompt on which the reward function is tried when a worker starts, so that its errors show then."""
    bind: str
    """metrics.bind."""
    resource: str
    """Ray resource of which a worker asks for one unit."""
    seed: int = 0
    """Seed of the run's samples."""
    topk: int = 0
    """Most likely tokens to keep with each sampled one, for corrections that look at them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the worker's process; the engine's processes inherit them."""
    weights_fetch_s: float = 60.0
    """Longest wait for the bytes of a version to come to the node."""

    @property
    def has_wide_fields(self) -> bool:
        """Whether groups have wide fields: many values a token (correction/wide.py)."""
        return self.topk > 0 or self.rollout.engine.return_routed_experts


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Who an actor is and where its numbers are."""

    role: str
    """"rollout", "learner", ..."""
    name: str
    """Its name among the actors of that role."""
    pid: int
    """Process id of the actor."""
    target: str
    """host:port of its Prometheus endpoint."""
    detail: str = ""
    """Further facts for people."""
    node: str = ""
    """Id of its node; empty: not known."""
    host: str = ""
    """Address of its node, for people."""
    layers: str = ""
    """Of a learner rank: which layers its part of the model is made of (learner/model/layers.py)."""

    @property
    def key(self) -> str:
        return f"{self.role}-{self.name}"


@dataclass(frozen=True, slots=True)
class WaitNotice:
    """Something has not come yet."""

    what: str
    """Phase, both sides and version, as the wait has named them ("weight sync v12 -> worker 3")."""
    seconds: int
    """Since the wait began."""
    detail: str = ""
    """What exactly is missing; empty: not known."""

    def __str__(self) -> str:
        return f"waiting {self.seconds} s for {self.what}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class PartReport:
    """What a part has to tell; its next heartbeat brings it."""

    number: int
    """Running number among the part's reports, from 1; the next heartbeat acknowledges those up to the last one received."""
    message: str | WaitNotice
    """A sentence, or the notice of a wait."""
