"""Rules about the connections between GPUs and between nodes: NVLink, access to each other's memory, RDMA's locked memory, open ports,
answers.

Each rule is a function of (nodes, config) that yields complaints; node_rules.py asks them.
"""

from __future__ import annotations

from collections.abc import Iterator

from actors.config import RunConfig
from actors.doctor.facts import Complaint, NodeFacts, Nodes
from actors.doctor.memory_rules import gib

LEAST_LOCKED = 1 << 30
"""Fewest bytes that a process should be allowed to lock: NCCL registers its buffers with the network card, some MiB for each channel and
partner."""
_WAYS = {
    "PIX": "a PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the processor's PCIe bridge",
    "NODE": "PCIe bridges of one socket",
    "SYS": "two sockets",
}
"""nvidia-smi's names of links, from the shortest path to the longest."""


def gpus_of_a_group_are_linked(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """GPUs of a tensor-parallel group or an engine should have fast links. Ray chooses the GPUs, so any two of a node may be in one
    group."""
    asked = _tensor_parallel(config)
    for node in nodes:
        mine = {gpu.number for gpu in node.gpus} or {number for link in node.links for number in (link.one, link.other)}
        links = [link for link in node.links if {link.one, link.other} <= mine]
        bare = [link for link in links if not link.is_nvlink or not link.has_peer_access]
        if not asked or not bare:
            continue
        worst = max(bare, key=lambda link: (not link.has_peer_access, list(_WAYS).index(link.kind) if link.kind in _WAYS else -1))
        way = f"by {_WAYS.get(worst.kind, worst.kind)}, not by NVLink" if not worst.is_nvlink else "by NVLink"
        through = "" if worst.has_peer_access else ", and can't read each other's memory: what they exchange goes through the host's"
        yield Complaint(
            "warn",
            f"{node.name}: {len(bare)} of {len(links)} pairs of GPUs have no fast link, such as {worst.one} and {worst.other}, which are "
            f"connected {way}{through}; {asked} exchange activations in every layer",
            "Lower that setting (pipeline_parallel, or data_parallel with the distributed optimizer, saves memory, too), or use GPUs that "
            "NVLink connects",
        )


def _tensor_parallel(config: RunConfig) -> str:
    learner, engine = config.learner, config.rollout.engine
    asked = {
        "learner.tensor_parallel": learner.tensor_parallel if learner.resolved_device == "cuda" else 1,
        "rollout.engine.tensor_parallel": engine.tensor_parallel if engine.resolved_device == "cuda" else 1,
    }
    return " and ".join(f"{name} = {size}" for name, size in asked.items() if size > 1)


def rdma_may_lock_memory(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    if not _talks_over_the_network(nodes, config):
        return
    for node in nodes:
        if node.has_rdma and node.offered_gpus and node.locked_memory < LEAST_LOCKED:
            yield Complaint(
                "warn",
                f"{node.name}: a process may lock {gib(node.locked_memory)} of memory (ulimit -l), and NCCL registers its buffers with the "
                "InfiniBand or RoCE card that is there: a group over several nodes would fail",
                "ulimit -l unlimited before ray start; in a container --ulimit memlock=-1; or ray.env.NCCL_IB_DISABLE: '1', which is slow",
            )


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
