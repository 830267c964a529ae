"""What the doctor says of room: for ranks, engines and the driver, in GPUs, CPUs, units and memory of nodes that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evenkeel.doctor.gather import own_machine
from evenkeel.doctor.on_nodes import on_nodes, requests
from evenkeel.doctor.on_paper import enough
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape
from tests.actors.known_models import QWEN3_06B
from tests.evenkeel.doctor.test_doctor import DENSE, EXPERTS, HEAD, eight, node, recipe

H200 = Gpus.parse("H200x8x4")


def test_a_group_of_ranks_is_on_one_node() -> None:
    """Eight GPUs are asked for, and are there, two on each node."""
    (found,) = enough(Gpus.parse("H100x2x4"), eight("learner.tensor_parallel=4", "learner.data_parallel=1", "ray.address=auto"))
    assert found.sentence == "learner.tensor_parallel = 4, but a node has 2 GPUs: a group talks in every layer"
    assert (found.severity, found.setting) == ("fail", "Set it to 2 or less")


@pytest.mark.parametrize(
    ("workers", "gpus", "said"),
    [
        (1, "H100x8", ["the run asks for 10 GPUs"]),
        (2, "H100x8x2", ["2 engines of 6 GPUs, each on one node; in addition to the learner 2 nodes of 8 x H100 (80 GiB) have room for 1"]),
        (2, "H100x8x3", []),
    ],
)
def test_engines_have_room_on_nodes_not_in_a_sum(workers: int, gpus: str, said: list[str]) -> None:
    """Of six GPUs each; the learner has four of a node, which leave no room for another, though 16 GPUs are there, and asked for."""
    found = enough(Gpus.parse(gpus), eight("rollout.engine.tensor_parallel=6", f"rollout.workers={workers}", "ray.address=auto"))
    assert len(found) == len(said) and all(text in one.sentence for text, one in zip(said, found, strict=True)), found


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({}, []),
        ({"memory": 64 << 30}, []),
        ({"memory": 32 << 30}, ["head: driver and correction service would take up to 47.3 GiB of its 32 GiB of memory: answers"]),
    ],
)
def test_the_driver_s_node_is_judged_by_what_it_holds(head: dict[str, Any], said: list[str]) -> None:
    """18.9 million tokens in a batch, three of them on their way, each with 8 bytes and 384 of routes: 20.7 GiB of answers, fetched to the
    object store and put together in memory. The service has 4 GiB."""
    config = recipe("qwen3_30b_a3b_4nodes", "ray.address=auto")
    nodes = [replace(HEAD, is_drivers=True, **head), *(node(name=name, gpu_bytes=(H200.memory,) * 8) for name in "abcd")]
    assert [c.sentence[: len(text)] for c, text in zip(on_nodes(nodes, config, EXPERTS), said, strict=True)] == said
    elsewhere = on_nodes([replace(one, is_drivers=False) for one in nodes], config, EXPERTS)
    assert [c for c in elsewhere if "answers" in c.sentence] == []


def test_a_driver_beside_ranks_takes_memory_of_its_own() -> None:
    """Of the node that holds ranks or engines as well; their own answers are among those that it fetches."""
    config = recipe("qwen3_30b_a3b_4nodes", "ray.address=auto")
    others = [node(name=name, gpu_bytes=(H200.memory,) * 8) for name in "abcd"]

    def said(memory: int, **facts: Any) -> list[str]:
        nodes = [replace(others[0], memory=memory << 30, **facts), *others[1:]]
        return [c.sentence for c in on_nodes(nodes, config, EXPERTS)]

    (alone,) = said(100)
    (both,) = said(100, is_drivers=True)
    assert alone.startswith("a: 8 ranks would take up to")
    assert both.startswith("a: 8 ranks, driver and correction service would take up to")
    sizes = [float(text.partition(" up to ")[2].split()[0]) for text in (alone, both)]
    fetched_by_ranks = 6.75  # their wide fields are among the answers
    assert sizes[1] - sizes[0] == pytest.approx(47.3 - fetched_by_ranks, abs=1.5)


def test_ranks_with_a_share_take_memory_for_each_gpu() -> None:
    """Eight GPUs hold eight ranks of 0.6, though their shares would be 13."""
    ranks = ("learner.tensor_parallel=1", "learner.sequence_parallel=false", "learner.data_parallel=16", "learner.gpus_per_rank=0.6")
    shares = (*ranks, "weight_sync.transport=object_store")
    said = [c.sentence for c in on_nodes([node(name=name, memory=64 << 30) for name in "ab"], eight("ray.address=auto", *shares), DENSE)]
    assert any("a: 8 ranks would take up to" in text for text in said), said


def test_a_learner_leaves_nodes_with_rollout_units_to_the_engines() -> None:
    """Sixteen of each on four nodes, of which two take engines: whichever Ray names first."""
    nodes = [node(name="a"), node(name="b", rollout_units=0.0), node(name="c"), node(name="d", rollout_units=0.0)]
    assert on_nodes(nodes, eight("ray.address=auto", "learner.data_parallel=8", "rollout.workers=16"), DENSE) == []
    one_gpu = node(offered_gpus=1.0, free_gpus=1.0, gpus=node().gpus[:1], driver_gpus=1, rollout_units=1.0)
    assert on_nodes([one_gpu], recipe("qwen3_0.6b_1gpu"), ModelShape.of(QWEN3_06B)) == []


def test_a_private_ray_with_too_few_cpus_is_told() -> None:
    """A rank and a worker, of which one would wait for ever. As many as are needed is what a run takes by itself."""
    cpus = [recipe("nano_spell_backward", *words, has_gpu=False) for words in (["ray.num_cpus=1"], ["ray.num_cpus=2"], [])]
    found = [[c for c in on_nodes(own_machine(config), config, DENSE) if "CPUs" in c.sentence] for config in cpus]
    assert [[(c.severity, c.setting) for c in of_one] for of_one in found] == [[("fail", "Raise ray.num_cpus, or set it to null")], [], []]


def test_units_that_another_run_holds_are_not_free() -> None:
    config, nodes = eight("ray.address=auto"), [node(held_units=7.0), node(name="b", held_units=6.5)]
    (row,) = [row for row in requests(nodes, config) if row.kind == "rollout"]
    assert (row.asked, row.there, row.free) == (4, 16, 2.5)
    (told,) = on_nodes(nodes, config, DENSE)
    assert told.severity == "warn" and "'rollout', and 2 are free: another run has the others" in told.sentence
    assert on_nodes([node(held_units=7.0), node(name="b", held_units=5.0)], config, DENSE) == []


def test_shares_of_one_gpu_are_one_gpu() -> None:
    rows = {row.kind: row for row in requests([node()], recipe("qwen3_0.6b_1gpu"))}
    assert (rows["GPU"].asked, rows["GPU"].parts) == (1, "1 rank x 0.7, 1 worker x 0.3")
    assert (rows["CPU"].asked, rows["CPU"].there) == (2, 64)
