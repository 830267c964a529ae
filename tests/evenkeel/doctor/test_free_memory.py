"""What other processes hold of the GPUs: a run stops where a rank or an engine certainly doesn't fit into the rest."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.doctor import gather
from evenkeel.doctor.facts import Complaint, GpuFact, NodeFacts
from evenkeel.doctor.gather import seen_by_torch
from evenkeel.doctor.memory_rules import loads_by_gpu
from evenkeel.doctor.on_nodes import on_nodes, requests
from evenkeel.engines.machine import CONTEXT, LEAST_OF_CACHE
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.memory import engine_memory, least_at_start, state_bytes
from evenkeel.plan.shape import ModelShape
from evenkeel.rollout.sglang_plugin.gpu_share import cache_bytes
from tests.actors.known_models import QWEN3_06B
from tests.evenkeel.doctor.test_doctor import DENSE, H100, eight, node, recipe

SMALL = ModelShape.of(QWEN3_06B)
A10G = Gpus.parse("A10Gx1")


def with_free(*free: float | None, memory: int = H100.memory, **facts: Any) -> NodeFacts:
    """Args: free: GiB of each GPU; None: not known."""
    there = [None if gib is None else min(memory, int(gib * 2**30)) for gib in free]
    gpus = tuple(GpuFact("H100", memory, of_gpu, "sm_90", number) for number, of_gpu in enumerate(there))
    return node(gpus=gpus, offered_gpus=float(len(free)), free_gpus=float(len(free)), driver_gpus=len(free), **facts)


def told(there: NodeFacts, config: RunConfig, shape: ModelShape = DENSE) -> list[Complaint]:
    return [one for one in on_nodes([there], config, shape) if "another process holds the rest" in one.sentence]


@pytest.mark.parametrize(
    ("free", "severities"),
    [
        ((80,) * 8, []),
        ((2, *(80,) * 7), ["fail"]),  # neither a rank, of 45.8 GiB and more, nor an engine
        ((70, *(80,) * 7), ["warn"]),  # either fits
        ((30, *(80,) * 7), ["warn"]),  # an engine fits, and the learner has room elsewhere
        ((*(80,) * 3, *(30,) * 5), ["warn"] * 5),  # four ranks, and room for three; engines fit everywhere
        ((2, *(80,) * 8), ["warn"]),  # nine GPUs for eight: Ray may give the first to nobody
        ((2, 2, *(80,) * 7), ["fail", "fail"]),
        ((2, *(None,) * 7), ["fail"]),  # whatever is free of the others: eight are asked for
        ((*(None,) * 3, *(30,) * 5), ["warn"] * 5),
    ],
)
def test_a_run_on_this_machine_stops_where_it_needs_a_gpu_that_has_no_room(free: tuple[int | None, ...], severities: list[str]) -> None:
    found = told(with_free(*free), eight())
    assert [one.severity for one in found] == severities, found
    for one in found:
        assert ("free, too little for any rank or engine (at least 18" in one.sentence) == (" has 2 GiB" in one.sentence), one.sentence
        assert ("CUDA_VISIBLE_DEVICES" in one.setting) == (len(free) > 8), "only where others are enough"


def test_a_gpu_for_engines_that_an_elastic_run_begins_without_stops_nothing() -> None:
    """Six of eight GPUs are enough for its start; whoever holds the others may have left when the pool grows."""
    elastic = eight("rollout.max_workers=4", "rollout.min_workers=2", "rollout.workers=2")
    assert [one.severity for one in told(with_free(2, 2, *(80,) * 6), elastic)] == ["warn", "warn"]
    assert [one.severity for one in told(with_free(2, 2, 2, *(80,) * 5), elastic)] == ["fail"] * 3


def engines(share: float, workers: int) -> list[str]:
    return [f"rollout.gpus_per_worker={share}", f"rollout.workers={workers}", "learner.gpus_per_rank=1"]


@pytest.mark.parametrize(("share", "workers"), [(0.5, 2), (0.25, 4), (0.5, 4)])
def test_an_idle_gpu_has_room_for_engines_whose_shares_fill_it(share: float, workers: int) -> None:
    """The driver keeps some of it: of an idle H100's 81,559 MiB 81,000 are free."""
    config = recipe("qwen3_0.6b_1gpu", *engines(share, workers))
    assert told(with_free(*[81_000 / 1024] * 3), config, SMALL) == []


def test_gpus_of_which_the_driver_says_nothing_are_neither_full_nor_too_small() -> None:
    """nvidia-smi has [N/A] for one of them, or for both."""
    unknown = GpuFact("", 0, None, "sm_90")
    for config, shape in ((eight(), DENSE), (eight("ray.address=auto"), DENSE), (recipe("qwen3_0.6b_1gpu"), SMALL)):
        for gpus in ((unknown,) * 8, (GpuFact("", H100.memory, None, "sm_90"),) * 8, (GpuFact("", 0, 1 << 30, "sm_90"),) * 8):
            assert told(node(gpus=gpus, gpu_bytes=tuple(gpu.bytes for gpu in gpus if gpu.bytes)), config, shape) == []
    (one,) = told(node(gpus=(*(unknown,) * 7, GpuFact("H100", H100.memory, 2 << 30, "sm_90")), gpu_bytes=(H100.memory,)), eight())
    assert one.severity == "fail", "of eight that are asked for one is full"


def test_a_part_of_a_divided_gpu_is_not_judged_by_another_gpu() -> None:
    """torch sees the part; the driver lists whole GPUs, of which the first is full."""
    full, other = GpuFact("H100", H100.memory, 2 << 30, "sm_90", 0, "GPU-a"), GpuFact("H100", H100.memory, None, "sm_90", 1, "GPU-b")
    seen = seen_by_torch((full, other), "MIG-1-of-b", 1)
    assert told(node(gpus=seen, offered_gpus=1.0, free_gpus=1.0), recipe("qwen3_0.6b_1gpu"), SMALL) == []
    assert seen_by_torch((full, other), "0", 1) == (full,), "of a whole one what is free is known"


def test_stages_are_judged_by_the_smallest() -> None:
    """Of four stages the middle ones have no embedding or head: 29 GiB stay, and 39 on the others."""
    staged = eight("learner.tensor_parallel=1", "learner.data_parallel=1", "learner.pipeline_parallel=4", "learner.sequence_parallel=false")
    least = [load / 2**30 for load in loads_by_gpu(DENSE, staged, H100.memory)[:4]]
    assert least == pytest.approx([29.1] * 4, abs=0.1)


def test_a_gpu_too_small_for_a_context_is_no_error() -> None:
    for size in (CONTEXT // 2, CONTEXT, 2 << 30):
        assert least_at_start(DENSE, eight().rollout, size) == size


def test_on_a_cluster_it_is_a_warning() -> None:
    """Ray gives nobody what another of its jobs holds."""
    full = with_free(2, *(80,) * 7)
    assert [one.severity for one in told(full, eight("ray.address=auto"))] == ["warn"]
    assert told(full, eight("learner.device=cpu", "rollout.engine.device=cpu", "learner.dtype=bfloat16")) == []


def test_learner_and_engine_on_one_gpu_need_room_for_both() -> None:
    """What stays of a rank, and what an engine doesn't start without. With 14 of 22.5 GiB both start: an engine makes its cache smaller
    where others have taken more than theirs."""
    config = recipe("qwen3_0.6b_1gpu")
    (load,) = loads_by_gpu(SMALL, config, A10G.memory)
    assert load == sum(state_bytes(SMALL, config.learner)) + least_at_start(SMALL, config.rollout, A10G.memory)
    assert 12 << 30 < load < 14 << 30
    severities = [[one.severity for one in told(with_free(free, memory=A10G.memory), config, SMALL)] for free in (22, 14, 12)]
    assert severities == [[], ["warn"], ["fail"]]


@pytest.mark.parametrize("looks", [0, 1, 3, 99])
def test_who_is_about_to_leave_is_waited_for(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of an attempt that was killed hold their memory for some seconds: the next attempt must not end by a ConfigError, which is
    not tried again. Who stays is waited for half a minute."""
    now, said = [0.0], list[str]()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(gather, "time", clock)
    full, seen = with_free(2, *(80,) * 7), iter(range(100))
    found = gather.when_others_have_left(lambda: [full if next(seen) < looks else with_free(*(80,) * 8)], eight(), DENSE, said.append)
    assert [one.severity for one in told(found[0], eight())] == ["fail"] * (looks == 99)
    assert now[0] == min(2.0 * looks, 30.0) and len(said) == (looks > 0)
    assert all("GPU 0 (H100) has 2 GiB" in one and one.endswith("Waiting up to 30 s for its end") for one in said)


def test_an_engine_on_a_gpu_of_its_own_takes_a_fraction_of_what_is_free() -> None:
    """With the least, and no context, the cache holds nothing."""
    memory, least = engine_memory(DENSE, eight().rollout, H100.memory), least_at_start(DENSE, eight().rollout, H100.memory)
    fraction = (H100.memory - memory.outside_cache) / (H100.memory - CONTEXT)
    assert least * fraction == pytest.approx(memory.weights, abs=2)


def test_the_least_of_an_engine_with_a_share_is_what_its_plugin_starts_with() -> None:
    """Whoever tells a run to end for it goes by the rule by which the engine would end."""
    config, total = recipe("qwen3_0.6b_1gpu"), A10G.memory
    engine = config.rollout.engine.model_copy(update={"gpu_share": config.rollout.gpus_per_worker})
    memory, least = engine_memory(SMALL, config.rollout, total), least_at_start(SMALL, config.rollout, total)
    cache = partial(cache_bytes, engine, total=total, own=memory.weights, vocabulary=SMALL.vocabulary)
    assert cache(least + 2 - memory.weights) == pytest.approx(LEAST_OF_CACHE * memory.cache, abs=4)
    with pytest.raises(RuntimeError, match="others on it have taken more than theirs"):
        cache(least - 2 - memory.weights)


def test_the_table_s_free_gpus_are_those_that_nobody_holds() -> None:
    """A Ray of the run's own would call all of them free."""
    rows = {row.kind: (row.there, row.free) for row in requests([with_free(2, 30, *(80,) * 6)], eight())}
    assert rows["GPU"] == (8, 6)


def test_a_model_that_needs_larger_gpus_is_told_that_and_no_more() -> None:
    """The first layer says so; that a little is held doesn't matter then."""
    small = with_free(*(12,) * 8, memory=16 << 30)
    assert {one.severity for one in told(small, eight())} == {"warn"}
    assert all("too little" not in one.sentence for one in told(small, eight()))
