"""Rules about the connections between GPUs and between nodes: NVLink, access to each other's memory, RDMA's locked memory, open ports,
answers.

Each rule is a function of (nodes, config) that yields complaints; node_rules.py asks them.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.config import RunConfig
from actors.doctor.facts import Complaint, NodeFacts, Nodes


def nodes_answer(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """Nodes should answer. A node that is late may be reading its packages from a slow disk for the first time, and be usable later."""
    for node in nodes:
        if node.silence:
            yield Complaint(
                "fail" if node.has_failed else "warn",
                f"{node.name} doesn't answer a small task ({node.silence}): nothing is known of its packages, folders, memory and ports",
                "Install evenkeel there, with the same Python" if node.has_failed else "Ask again; if it stays silent, start it anew",
            )


def ports_are_open(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """Rank 0 listens on ports that the system gives it: for the other ranks, and for a weight group."""
    network = _talks_over_the_network(nodes, config)
    for node in nodes:
        if node.why_unreachable:
            needed = network and _may_hold_a_rank_or_an_engine(node, config)
            unless = "It has no room for ranks or engines, which" if network else "A learner on several nodes, or a broadcast,"
            yield Complaint(
                "fail" if needed else "warn",
                f"{node.name} can't reach a free port of a node where the learner's rank 0 may be: {node.why_unreachable}. "
                + ("Ranks and weight groups meet at such ports" if needed else f"{unless} would need it"),
                "Open all TCP ports between the nodes (security group, firewall)",
            )
        elif node.way_not_known:
            yield Complaint(
                "warn",
                f"it isn't known whether {node.name} can reach a free port of a node where learner rank 0 may be: {node.way_not_known}",
                "Ask again; or see that all TCP ports between the nodes are open (security group, firewall)",
            )


def _may_hold_a_rank_or_an_engine(node: NodeFacts, config: RunConfig) -> bool:
    sides = {config.learner.resolved_device, config.rollout.engine.resolved_device}
    return node.offered_gpus > 0 or ("cpu" in sides and node.cpus > 0)


def _talks_over_the_network(nodes: Nodes, config: RunConfig) -> bool:
    """The run has a group of torch.distributed with members on several nodes, or may have."""
    if len(nodes) < 2:
        return False
    learner = config.learner
    on_gpus = learner.resolved_device == "cuda"
    largest = max((node.offered_gpus if on_gpus else node.cpus) for node in nodes)
    return config.weight_sync.transport == "broadcast" or learner.world_size * (learner.gpus_per_rank if on_gpus else 1) > largest
