"""What other processes hold of the GPUs: a run stops where a rank or an engine doesn't fit into the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.config import RunConfig
from actors.doctor.facts import Complaint, GpuFact, NodeFacts
from actors.doctor.free_memory_rules import loads_by_gpu
from actors.doctor.node_rules import on_nodes
from actors.doctor.room_rules import requests
from actors.plan.engine_memory import engine_memory, least_free
from actors.plan.gpus import Gpus
from actors.plan.shape import ModelShape
from tests.actors.doctor.test_doctor import DENSE, H100, eight, node, recipe
from tests.actors.known_models import QWEN3_06B

SMALL = ModelShape.of(QWEN3_06B)
A10G = Gpus.parse("A10Gx1")


def with_free(*free: int, memory: int = H100.memory, **facts: Any) -> NodeFacts:
    """Args: free: GiB of each GPU."""
    gpus = tuple(GpuFact("H100", memory, min(memory, gib << 30), "sm_90", number) for number, gib in enumerate(free))
    return node(gpus=gpus, offered_gpus=float(len(free)), free_gpus=float(len(free)), driver_gpus=len(free), **facts)


def told(there: NodeFacts, config: RunConfig, shape: ModelShape = DENSE) -> list[Complaint]:
    return [one for one in on_nodes([there], config, shape) if "another process holds the rest" in one.sentence]


@pytest.mark.parametrize(
    ("free", "severities"),
    [
        ((80,) * 8, []),
        ((2, *(80,) * 7), ["fail"]),  # neither a rank, of 53.5 GiB, nor an engine
        ((70, *(80,) * 7), ["warn"]),  # either fits
        ((30, *(80,) * 7), ["warn"]),  # an engine fits, and the learner has room elsewhere
        ((*(80,) * 3, *(30,) * 5), ["fail"] * 5),  # four ranks, and room for three
        ((2, *(80,) * 8), ["warn"]),  # nine GPUs for eight: Ray may give the first to nobody
        ((2, 2, *(80,) * 7), ["fail", "fail"]),
    ],
)
def test_a_run_on_this_machine_stops_where_no_order_of_its_gpus_has_room(free: tuple[int, ...], severities: list[str]) -> None:
    found = told(with_free(*free), eight())
    assert [one.severity for one in found] == severities, found
    for one in found:
        assert ("a learner rank needs 53.5 GiB" in one.sentence) == (" has 70 GiB" not in one.sentence)
        assert ("an engine needs" in one.sentence) == (" has 2 GiB" in one.sentence)
        assert ("CUDA_VISIBLE_DEVICES" in one.setting) == (len(free) > 8), "only where others are enough"


def test_on_a_cluster_and_on_parts_of_a_card_it_is_a_warning() -> None:
    """Ray gives nobody what another of its jobs holds; and of a part of a card the driver's numbers say nothing."""
    full = with_free(2, *(80,) * 7)
    assert [one.severity for one in told(full, eight("ray.address=auto"))] == ["warn"]
    assert [one.severity for one in told(replace(full, visible_devices="MIG-5"), eight())] == ["warn"]
    assert told(full, eight("learner.device=cpu", "rollout.engine.device=cpu", "learner.dtype=bfloat16")) == []


def test_learner_and_engine_on_one_gpu_need_room_for_both() -> None:
    """A rank of 14.7 GiB, and an engine that takes its 30 %, 6.7 GiB: together 21.4 of 22.5."""
    config = recipe("qwen3_0.6b_1gpu")
    ((what, size),) = loads_by_gpu(SMALL, config, A10G.memory)
    memory = engine_memory(SMALL, config.rollout, A10G.memory)
    assert what == "a learner rank with 1 engine" and 21 << 30 < size < 22 << 30
    assert least_free(SMALL, config.rollout, A10G.memory) == memory.weights + memory.cache + memory.outside_cache
    (one,) = told(with_free(20, memory=A10G.memory), config, SMALL)
    assert one.severity == "fail" and "a learner rank with 1 engine needs 21." in one.sentence
    assert "lower rollout.gpus_per_worker" in one.setting
    smaller = recipe("qwen3_0.6b_1gpu", "rollout.gpus_per_worker=0.2")
    assert [found.severity for found in told(with_free(20, memory=A10G.memory), smaller, SMALL)] == ["warn"], "what the remedy says helps"
    assert told(with_free(22, memory=A10G.memory), config, SMALL) == []


def test_an_engine_on_a_gpu_of_its_own_takes_a_fraction_of_what_is_free() -> None:
    """With that much free the cache holds one request, and with less none."""
    least, memory = least_free(DENSE, eight().rollout, H100.memory), engine_memory(DENSE, eight().rollout, H100.memory)
    context = 768 << 20
    fraction = (H100.memory - memory.outside_cache) / (H100.memory - context)
    cache = (least - context) * fraction - memory.weights
    assert cache == pytest.approx(memory.request_tokens * memory.token_bytes, abs=2)


def test_the_table_s_free_gpus_are_those_that_nobody_holds() -> None:
    """A Ray of the run's own would call all of them free."""
    rows = {row.kind: (row.there, row.free) for row in requests([with_free(2, 30, *(80,) * 6)], eight())}
    assert rows["GPU"] == (8, 6)


def test_a_model_that_needs_larger_gpus_is_told_that_and_no_more() -> None:
    """The first layer says so; that a little is held doesn't matter then."""
    small = with_free(*(20,) * 8, memory=24 << 30)
    assert {one.severity for one in told(small, eight())} == {"warn"}
    assert all("rank needs" not in one.sentence for one in told(small, eight()))
