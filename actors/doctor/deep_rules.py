"""Rules of the third layer: what was measured on ranks and an engine has to be right, and fast enough.

Each rule is a function of (facts, config) that yields complaints; the config has its deadlines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from actors.config import RunConfig
from actors.doctor.deep_facts import COLLECTIVES, ENGINE_AND_LEARNER, DeepFacts
from actors.doctor.facts import Complaint
from actors.doctor.memory_rules import gib
from actors.doctor.paper_rules import worst_first
from actors.settings.probe_limits import ProbeLimits, given_limit
from correction.errors import counted

DeepRule = Callable[[DeepFacts, RunConfig], Iterator[Complaint]]

SLOWEST_INSIDE = 2e10
"""Bytes a second between GPUs of a node: PCIe 4 x16 has 25 GB/s or so, NVLink 200 and more."""
SLOWEST_BETWEEN = 2e9
"""Bytes a second between nodes: a network of 25 Gb/s has 3 GB/s; learners want 100 Gb/s and more."""
_TRANSPORTS = "Look for transports that don't work there (ray.env.NCCL_P2P_DISABLE: '1', ray.env.NCCL_DEBUG: INFO)"
GRADIENT = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
"""Relative difference of the gradient's norm from float32's, by type of weights and activations: 8 and 11 bits of mantissa round each of
some hundred operations on the way back; a wrong term shows in tens of per cent."""


def all_parts_ran(facts: DeepFacts, config: RunConfig) -> Iterator[Complaint]:
    for what, reason in facts.broken:
        yield Complaint("fail", f"{what}: {reason}", _TRANSPORTS if what == COLLECTIVES and facts.on_gpus else "")


def collectives_are_right(facts: DeepFacts, config: RunConfig) -> Iterator[Complaint]:
    for one in facts.collectives:
        if not one.is_right:
            yield Complaint(
                "fail",
                f"{one.operation} over {one.ranks} {one.group} ranks gave wrong numbers",
                _TRANSPORTS,
            )


def collectives_are_fast(facts: DeepFacts, config: RunConfig) -> Iterator[Complaint]:
    for one in facts.collectives:
        place = "inside a node" if one.is_inside_a_node else "between nodes"
        text = f"{one.operation} of {gib(one.bytes)} over {one.ranks} {one.group} ranks {place}: {_rate(one.bus_bytes_per_s)}"
        least = SLOWEST_INSIDE if one.is_inside_a_node else SLOWEST_BETWEEN
        if facts.on_gpus and one.is_right and one.bus_bytes_per_s < least:
            remedy = (
                "Look at nvidia-smi topo -m, and whether containers share /dev/shm and IPC"
                if one.is_inside_a_node
                else "Name the fast network: ray.env.NCCL_SOCKET_IFNAME, ray.env.NCCL_IB_HCA"
            )
            yield Complaint("warn", f"{text}, less than {_rate(least)}", remedy)
        else:
            yield Complaint("note", text)


def both_sides_agree(facts: DeepFacts, config: RunConfig) -> Iterator[Complaint]:
    given = given_limit(config)
    of_learner = ProbeLimits.of(facts.dtype, layers=2) if given is None else ProbeLimits(given, math.inf)
    of_engine = ProbeLimits.of_run(config) if config.rollout.engine.has_float8 else of_learner
    for one in facts.agreements:
        limits = of_engine if one.sides == ENGINE_AND_LEARNER else of_learner
        text = f"{one.sides} differ by up to {one.largest:.2g} nats, median {one.median:.2g}, on a model of two layers in {facts.dtype}"
        if not limits.are_kept(one.largest, one.median):
            yield Complaint("fail", f"{text}: more than rounding explains", "evenkeel diff-engines names the first operator that differs")
        else:
            yield Complaint("note", text)
        if one.gradient is not None and not one.gradient <= GRADIENT[facts.dtype]:
            yield Complaint(
                "fail",
                f"the learner's gradient has a norm {100 * one.gradient:.2g} % off float32's on a CPU: more than rounding explains",
                "Set learner.layers: local, and report it as a bug",
            )


def seeds_repeat(facts: DeepFacts, config: RunConfig) -> Iterator[Complaint]:
    if not facts.repeats:
        yield Complaint("warn", "the engine's answers to the same seeds differ: a resumed run would sample others than one that went on")


def updates_meet_their_deadlines(facts: DeepFacts, config: RunConfig) -> Iterator[Complaint]:
    """An update by the object store must be done within its deadline. With weight_sync.transport: broadcast, engines that join get their
    first weights that way."""
    if facts.update is not None:
        of_whom = " to an engine that joins" if config.weight_sync.transport == "broadcast" else ""
        yield from _expected(facts, config, facts.update.bytes, facts.update.export_s + facts.update.take_s, facts.update.pause_s, of_whom)


def broadcast_reaches_the_engine(facts: DeepFacts, config: RunConfig) -> Iterator[Complaint]:
    one = facts.broadcast
    if one is None:
        return
    group = f"a broadcast from the learner's rank 0 to the {counted(one.ranks, 'rank')} of an engine ({one.backend})"
    if one.error:
        yield Complaint(
            "fail",
            f"{group} did not work: {one.error}",
            "Set weight_sync.transport: object_store, or look for what stands in the way (ray.env.NCCL_DEBUG: INFO, "
            "ray.env.NCCL_SOCKET_IFNAME)",
        )
        return
    rate = one.bytes / max(one.send_s, 1e-9)
    text = f"{group} has {_rate(rate)}, in a group that was there in {one.join_s:.2g} s"
    if facts.on_gpus and rate < SLOWEST_BETWEEN:
        remedy = "Name the fast network (ray.env.NCCL_SOCKET_IFNAME, ray.env.NCCL_IB_HCA), or set weight_sync.transport: object_store"
        yield Complaint("warn", f"{text}: less than {_rate(SLOWEST_BETWEEN)}", remedy)
    else:
        yield Complaint("note", text)
    yield from _expected(facts, config, one.bytes, one.send_s, one.pause_s, " by broadcast")


def _expected(facts: DeepFacts, config: RunConfig, measured: int, seconds: float, pause_s: float, way: str) -> Iterator[Complaint]:
    """What an update of the whole model would take, in proportion to the measured one; a warning if that is longer than its deadline.

    Args:
        measured: bytes of the update that was measured.
        seconds: until it had arrived.
        pause_s: seconds for which the engine paused for it.
        way: how it was sent, for the sentence.
    """
    publish_s, pause_s = predicted(facts.version_bytes, measured, seconds), predicted(facts.version_bytes, measured, pause_s)
    text = f"expect {publish_s:.3g} s to publish a version of {gib(facts.version_bytes)}{way}, and {pause_s:.3g} s of an engine's pause"
    text += f" (measured with {gib(measured)} under 8 requests)"
    if publish_s > config.deadlines.sync_s:
        yield Complaint(
            "warn",
            f"{text}: more than deadlines.sync_s = {config.deadlines.sync_s:.3g}, after which an engine counts as lost",
            "Lower deadlines.bytes_per_s, or raise deadlines.sync_s",
        )
    else:
        yield Complaint("note", text)


DEEP_RULES: tuple[DeepRule, ...] = (
    all_parts_ran,
    collectives_are_right,
    collectives_are_fast,
    both_sides_agree,
    seeds_repeat,
    updates_meet_their_deadlines,
    broadcast_reaches_the_engine,
)


def predicted(version_bytes: int, measured_bytes: int, seconds: float) -> float:
    """Seconds for the whole model, in proportion to the bytes of the part that was measured."""
    return max(1.0, version_bytes / measured_bytes) * seconds


def deep_complaints(facts: DeepFacts, config: RunConfig) -> list[Complaint]:
    """All complaints of the deep check (doctor --deep), the worst first."""
    return worst_first([found for rule in DEEP_RULES for found in rule(facts, config)])


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
