"""What lies between GPUs and between nodes: rules with facts that are made up, nvidia-smi's tables of links, a port that is open or not."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.commands.recipe import load_config
from actors.config import RunConfig
from actors.doctor.driver_gpus import links_of_driver
from actors.doctor.facts import GpuFact, Link, NodeFacts
from actors.doctor.link_rules import gpus_of_a_group_are_linked, ports_are_open, rdma_may_lock_memory
from actors.doctor.node_rules import NODE_RULES
from actors.doctor.port_check import PortListener, why_unreachable
from actors.settings.derived import derived

RECIPES = Path(__file__).parents[3] / "recipes"
BROADCAST = "weight_sync.transport=broadcast"


def eight(*overrides: str) -> RunConfig:
    return derived(load_config(RunConfig, RECIPES / "qwen3_8b_8gpu.yaml", overrides), has_gpu=True)


def node(**facts: Any) -> NodeFacts:
    return NodeFacts(**({"name": "a", "offered_gpus": 4.0, "cpus": 64.0} | facts))


def links(kind: str, gpus: int = 4, **facts: Any) -> tuple[Link, ...]:
    return tuple(Link(one, other, kind, **facts) for one in range(gpus) for other in range(one + 1, gpus))


def test_the_doctor_asks_these_rules() -> None:
    assert {gpus_of_a_group_are_linked, rdma_may_lock_memory, ports_are_open} <= set(NODE_RULES)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (links("NV18"), ""),
        ((), ""),
        (links("SYS"), "a: 6 of 6 pairs of GPUs have no fast link, such as 0 and 1, which are connected by two sockets, not by NVLink; "),
        ((*links("PHB", 3), Link(0, 3, "SYS")), "such as 0 and 3, which are connected by two sockets, not by NVLink; "),
        (links("PHB", has_peer_access=False), "by the processor's PCIe bridge, not by NVLink, and can't read each other's memory: what"),
        (links("NV4", has_peer_access=False), "which are connected by NVLink, and can't read each other's memory"),
        ((Link(0, 1, "NV4"), Link(2, 3, "NV4"), Link(1, 2, "NODE")), "a: 1 of 3 pairs of GPUs have no fast link, such as 1 and 2"),
    ],
)
def test_gpus_of_a_tensor_parallel_group_want_nvlink(there: tuple[Link, ...], said: str) -> None:
    """The recipe's learner has pairs; without any such group nothing is said, whatever the machine."""
    found = list(gpus_of_a_group_are_linked([node(links=there)], eight()))
    assert [one.severity for one in found] == ["warn"] * bool(said) and all(said in one.sentence for one in found), found
    assert all("learner.tensor_parallel = 2 exchange" in one.sentence for one in found)
    alone = eight("learner.tensor_parallel=1", "learner.sequence_parallel=false", "learner.data_parallel=4")
    assert list(gpus_of_a_group_are_linked([node(links=there)], alone)) == []


def test_pairs_that_the_run_cannot_get_are_left_out() -> None:
    """CUDA_VISIBLE_DEVICES=2,3: that GPU 0 is far away is nobody's loss."""
    gpus = tuple(GpuFact("H100", 80 << 30, 80 << 30, "sm_90", number) for number in (2, 3))
    there = (Link(0, 2, "SYS"), Link(0, 3, "SYS"), Link(2, 3, "NV18"))
    assert list(gpus_of_a_group_are_linked([node(links=there, gpus=gpus)], eight())) == []
    assert len(list(gpus_of_a_group_are_linked([node(links=there)], eight()))) == 1


def test_an_engine_s_group_counts_as_well() -> None:
    config = eight("learner.tensor_parallel=1", "learner.sequence_parallel=false", "rollout.engine.tensor_parallel=2", "rollout.workers=2")
    (found,) = gpus_of_a_group_are_linked([node(links=links("SYS"))], config)
    assert "; rollout.engine.tensor_parallel = 2 exchange" in found.sentence


@pytest.mark.parametrize(
    ("facts", "nodes", "overrides", "is_said"),
    [
        ({}, 2, [BROADCAST], True),
        ({}, 2, [], False),
        ({}, 2, ["learner.data_parallel=4"], True),
        ({}, 1, [BROADCAST], False),
        ({"has_rdma": False}, 2, [BROADCAST], False),
        ({"locked_memory": 1 << 50}, 2, [BROADCAST], False),
        ({"offered_gpus": 0.0}, 2, [BROADCAST], False),
    ],
)
def test_locked_memory_is_for_cards_that_read_memory_themselves(
    facts: dict[str, Any], nodes: int, overrides: list[str], is_said: bool
) -> None:
    """8 MiB is what most systems allow. Four ranks fit a node of four GPUs, eight don't; an engine of a broadcast is on either."""
    one = replace(node(has_rdma=True, locked_memory=8 << 20), **facts)
    found = list(rdma_may_lock_memory([one] * nodes, eight(*overrides)))
    assert [(c.severity, "a process may lock 8 MiB" in c.sentence) for c in found] == [("warn", True)] * nodes * is_said


@pytest.mark.parametrize(
    ("overrides", "severity", "why"),
    [
        ([BROADCAST], "fail", "Ranks and weight groups meet at such ports"),
        (["learner.data_parallel=4"], "fail", "Ranks and weight groups meet"),
        ([], "warn", "A learner on several nodes, or a broadcast, would need it"),
    ],
)
def test_a_port_that_a_node_cannot_reach(overrides: list[str], severity: str, why: str) -> None:
    closed = node(name="b", why_unreachable="10.0.0.1:40123: timed out")
    (found,) = ports_are_open([node(), closed], eight(*overrides))
    assert found.severity == severity and found.sentence.startswith("b can't reach a free port of a node where") and why in found.sentence


@pytest.mark.parametrize(
    ("facts", "severity"), [({}, "fail"), ({"offered_gpus": 0.0}, "warn"), ({"offered_gpus": 0.0, "cpus": 0.0}, "warn")]
)
def test_a_port_is_needed_where_a_rank_or_an_engine_may_be(facts: dict[str, Any], severity: str) -> None:
    """A head without GPUs runs the driver's side alone, which needs none of rank 0's ports: the run must not be refused for it."""
    closed = node(name="head", why_unreachable="10.0.0.1:40123: timed out", **facts)
    (found,) = ports_are_open([node(), closed], eight(BROADCAST))
    assert (found.severity, "It has no room for ranks or engines" in found.sentence) == (severity, severity == "warn")
    on_cpus = derived(load_config(RunConfig, RECIPES / "nano_chain_sum.yaml", [BROADCAST]), has_gpu=False)
    (on_cpu,) = ports_are_open([node(), closed], on_cpus)
    assert (on_cpu.severity == "fail") == (closed.cpus > 0)


def test_a_listener_is_reached_and_what_is_not_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.metrics.exporter.node_address", lambda: "127.0.0.1")
    listener = PortListener()
    address = listener.open()
    assert [why_unreachable(address), why_unreachable(address)] == ["", ""]
    listener._socket.close()
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and nobody listens
        assert "refused" in why_unreachable(reserved.getsockname())
    monkeypatch.setattr("actors.doctor.port_check._CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in why_unreachable(silent.getsockname())


def test_what_nvidia_smi_says_of_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As its two tables are: underlined heads, an X at each GPU's own place, cards of the network among the columns."""
    smi = tmp_path / "nvidia-smi"
    topology = "\t\033[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\033[0m\n" + "".join(
        (
            "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\n",
            "GPU1\tNV18\t X \tNODE\tSYS\t0-47\t0\n",
            "GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1\n",
            "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n",
        )
    )
    peers = " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tCNS\t\n GPU1\tOK\tX\tOK\t\n GPU2\tCNS\tOK\tX\t\n\nLegend:\n  OK  = Status Ok\n"
    (tmp_path / "topo").write_text(topology)
    (tmp_path / "peers").write_text(peers)
    smi.write_text(f'#!/bin/sh\ncase "$2" in -m) cat {tmp_path}/topo;; -p2p) cat {tmp_path}/peers;; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert links_of_driver() == (Link(0, 1, "NV18"), Link(0, 2, "SYS", False), Link(1, 2, "NODE"))
    smi.write_text("#!/bin/sh\necho 'a sentence that is no table'\n")
    assert links_of_driver() == ()
