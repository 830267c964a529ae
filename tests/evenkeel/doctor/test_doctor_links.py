"""What lies between nodes: a port that is open or not, and the rule about it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.doctor.facts import NodeFacts
from evenkeel.doctor.gather import PortListener, why_unreachable
from evenkeel.doctor.on_nodes import ports_are_open
from evenkeel.recipe import load_config

RECIPES = Path(__file__).parents[3] / "recipes"
BROADCAST = "weight_sync.transport=broadcast"


def eight(*overrides: str) -> RunConfig:
    return with_devices(load_config(RunConfig, RECIPES / "qwen3_8b_8gpu.yaml", overrides), has_gpu=True)


def node(**facts: Any) -> NodeFacts:
    return NodeFacts(**({"name": "a", "offered_gpus": 4.0, "cpus": 64.0} | facts))


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
    on_cpus = with_devices(load_config(RunConfig, RECIPES / "nano_chain_sum.yaml", [BROADCAST]), has_gpu=False)
    (on_cpu,) = ports_are_open([node(), closed], on_cpus)
    assert (on_cpu.severity == "fail") == (closed.cpus > 0)


def test_a_listener_is_reached_and_what_is_not_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.actors.metrics.exporter.node_address", lambda: "127.0.0.1")
    listener = PortListener()
    address = listener.open()
    assert [why_unreachable(address), why_unreachable(address)] == ["", ""]
    listener._socket.close()
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and nobody listens
        assert "refused" in why_unreachable(reserved.getsockname())
    monkeypatch.setattr("evenkeel.doctor.gather._CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in why_unreachable(silent.getsockname())
