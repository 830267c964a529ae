"""Memory of the hosts, compared with what structures really take and, slow, what a process was seen to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.environment import OF_SERVICE
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.correct import correct
from evenkeel.plan import hosts as host_memory
from evenkeel.plan.hosts import (
    CORRECTED,
    CUDA,
    DIAGNOSED,
    EARLIER,
    MODULES,
    OF_ENGINES,
    OF_LEARNER,
    HostMemory,
    batch_tokens,
    checkpoint_bytes,
    hosts,
    key_bytes,
    of_engines,
    prompt_tokens,
    wide_bytes,
)
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.memory import engine_memory
from evenkeel.plan.shape import ModelShape
from evenkeel.recipe import load_config
from evenkeel.rollout.trajectory import KeptTokens
from evenkeel.rollout.wide_fields import fields_of, split_wide_fields
from tests.actors.groups.test_wide_groups import tickets, wide_group
from tests.actors.known_models import QWEN3_8B, QWEN3_30B_A3B
from tests.actors.service_memory import ANSWER, group
from tests.evenkeel.plan.test_plan import vars_of
from tests.learner.learner_cases import TIS, random_batch

RECIPES = Path(__file__).parents[3] / "recipes"
DENSE, EXPERTS = ModelShape.of(QWEN3_8B), ModelShape.of(QWEN3_30B_A3B)


def recipe(name: str, *overrides: str) -> RunConfig:
    config = with_devices(load_config(RunConfig, RECIPES / f"{name}.yaml", overrides), has_gpu=True)
    return config.model_copy(update={"rollout": config.rollout.with_context(DENSE.context)})


def dense(*overrides: str) -> list[HostMemory]:
    return hosts(DENSE, recipe("qwen3_8b_8gpu", *overrides), gpus_per_node=8, nodes=1)


def test_a_token_of_an_answer_and_one_of_a_corrected_batch_are_as_large_as_what_holds_them() -> None:
    (answer, *_) = group(0).trajectories
    assert sum(len(one) * one.itemsize for one in (answer.response_ids, answer.behavior_logprobs)) == host_memory.ANSWER * ANSWER
    batch = random_batch(groups=200)
    corrected = correct(replace(batch, proximal_logprobs=batch.behavior_logprobs), TIS)
    held = [value for owner in (corrected, corrected.batch) for value in vars_of(owner) if value.dim() and len(value) == batch.num_tokens]
    assert sum(one.nbytes for one in held) / batch.num_tokens == CORRECTED


def test_wide_fields_are_as_large_as_what_holds_them() -> None:
    """And a place in a batch that stands for them has a key for each token of the prompt."""
    (ticket,) = tickets(1)
    one = wide_group(ticket).trajectories[0]
    fields, n = fields_of(one), len(one.prompt_ids) + len(one.response_ids)
    assert fields is not None and fields.routed_experts is not None and fields.topk_ids is not None
    routed, topk = recipe("qwen3_30b_a3b_4nodes"), recipe("qwen3_8b_8gpu", "correction.preset=dppo-topk-kl")
    _, layers, k = fields.routed_experts.shape
    assert wide_bytes(replace(EXPERTS, layers=layers, experts_per_token=k), routed) * (n - 1) == fields.routed_experts.nbytes
    own = fields.topk_ids.nbytes + fields.topk_logprobs.nbytes  # type: ignore[union-attr]
    assert wide_bytes(DENSE, topk) / 20 * fields.topk_ids.numel() == own
    assert wide_bytes(DENSE, topk, id_bytes=8) == 20 * (8 + 4) and wide_bytes(DENSE, recipe("qwen3_8b_8gpu")) == 0
    sets = fields_of(replace(one, kept_tokens=KeptTokens.of([range(20)] * len(one.response_ids))))
    own, top_k = sets.kept_counts.nbytes + sets.kept_ids.nbytes, "rollout.sampling.top_k=20"  # type: ignore[union-attr]
    assert wide_bytes(DENSE, recipe("qwen3_8b_8gpu", top_k)) * len(one.response_ids) == own, "top_k alone leaves so many of every token"
    for words, most in (("top_p=0.9", 96), ("min_p=0.1", 96), ("top_k=1000000", DENSE.vocabulary)):
        assert wide_bytes(DENSE, recipe("qwen3_8b_8gpu", f"rollout.sampling.{words}")) == 4 + 4 * most
    assert wide_bytes(DENSE, recipe("qwen3_8b_8gpu", "rollout.sampling.top_p=0.9", top_k)) == 4 + 4 * 20
    (light,) = split_wide_fields(wide_group(ticket))[0].trajectories[:1]
    assert light.route_keys is not None and light.route_keys.itemsize * len(light.route_keys) == 4 * len(one.prompt_ids)
    assert key_bytes(EXPERTS, routed) == 4 * prompt_tokens(EXPERTS, routed) and key_bytes(DENSE, topk) == 0


def seen(what: str, tokens: int, environment: dict[str, str]) -> list[float]:
    words = [sys.executable, "-m", "tests.actors.service_memory", what, str(tokens)]
    done = subprocess.run(words, cwd=RECIPES.parent, env=os.environ | environment, capture_output=True, text=True, check=True)
    return [float(one) for one in done.stdout.split()]


@pytest.mark.slow
def test_what_the_service_takes_of_a_batch_is_what_a_process_was_seen_to_take() -> None:
    """Packed, corrected and looked at, at its most: 115 to 149 bytes a token, as its heap has holes or not; 8 + 34 + 105 are counted."""
    counted = host_memory.ANSWER + CORRECTED + DIAGNOSED
    _, most = seen("bytes", 1_000_000, OF_SERVICE)
    assert 0.7 * counted < most < 1.1 * counted


@pytest.mark.slow
def test_in_the_services_environment_a_batch_gets_the_memory_of_those_before_it() -> None:
    """Less than one new page in a thousand tokens, some 40 without: each is zeroed by the kernel, and costs a fault."""
    (own,), (without,) = seen("pages", 100_000, OF_SERVICE), seen("pages", 100_000, {})
    assert own < 0.2 * without


@pytest.mark.slow
def test_modules_are_what_a_rank_imports() -> None:
    code = "import evenkeel.learner.learner_rank, psutil; print(psutil.Process().memory_info().rss)"
    done = subprocess.run([sys.executable, "-c", code], cwd=RECIPES.parent, capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(MODULES, rel=0.2)


def test_one_node_has_every_role() -> None:
    (whole,) = dense()
    config = recipe("qwen3_8b_8gpu")
    assert whole.total == sum(whole.parts.values())
    version = 2 * DENSE.parameters
    assert whole.parts["copy for a checkpoint"] == checkpoint_bytes(DENSE, config), "all ranks are there"
    assert whole.parts["versions in the object store"] == 2 * version and whole.parts["versions fetched to the object store"] == 0
    assert whole.parts["ranks themselves"] == 4 * (MODULES + CUDA)
    embedding = 2 * 151_936 * 4096
    assert whole.parts["buckets in shared memory"] == 4 * 2 * embedding > 9 << 30, "more than the 256 MiB of a bucket, and never cut"
    assert whole.parts["page-locked bucket"] == 2 << 30, "torch takes a power of two"
    (in_large,) = dense("weight_sync.bucket_bytes=1500000000")
    assert in_large.parts["buckets in shared memory"] == 4 * 2 * 1_500_000_000
    assert whole.parts[OF_LEARNER] == whole.parts[OF_ENGINES] == whole.parts["engines' KV caches"] == 0, "they are on GPUs"
    assert whole.parts["reference policy"] == whole.parts[EARLIER] == 0
    (by_broadcast,) = dense("weight_sync.transport=broadcast")
    assert by_broadcast.parts["versions in the object store"] == 2 * version, "while an engine joins"
    (kept,) = dense("learner.report_kl_every=1", "monitor.split_every=10", "max_staleness=3")
    own = 4 * 2 * (DENSE.parameters // 2 + (2 * 36 * 4096 + 36 * 256 + 4096) // 2)
    assert kept.parts["reference policy"] == own and kept.parts[EARLIER] == 3 * own
    (by_correction,) = dense("correction.preset=split-tis", "max_staleness=2")
    assert by_correction.parts[EARLIER] == 2 * own
    assert str(whole).startswith("copy for a checkpoint 122 GiB, versions in the object store 30.5 GiB")


def test_on_a_cpu_the_host_holds_what_gpus_would() -> None:
    """Two copies of 8B parameters with float32 gradients, averages and weights, four engines with 65,536 tokens each."""
    both = ("device=cpu", "dtype=float32")
    (whole,) = dense(*(f"{side}.{word}" for side in ("learner", "rollout.engine") for word in both))
    assert whole.parts[OF_LEARNER] == pytest.approx(2 * 16 * DENSE.parameters, rel=1e-3)
    assert whole.parts[OF_ENGINES] == 4 * 4 * DENSE.parameters
    assert whole.parts["engines' KV caches"] == 4 * 65_536 * DENSE.key_value_bytes("float32")


def test_several_nodes_have_a_role_each() -> None:
    """16 ranks over two nodes: each copies half of what they share, and rank 0's the folder to serve as well."""
    config, kind = recipe("qwen3_30b_a3b_4nodes"), Gpus.parse("H200x8x4")
    driver, learner, engines = hosts(EXPERTS, config, gpus_per_node=kind.per_node, nodes=kind.nodes)
    assert [one.node for one in (driver, learner, engines)] == ["the driver's node", "a node with 8 ranks", "a node with 8 engines"]
    folder, whole = 2 * EXPERTS.parameters, checkpoint_bytes(EXPERTS, config)
    assert learner.parts["copy for a checkpoint"] == (whole - folder) // 2 + folder
    assert engines.parts["versions fetched to the object store"] == 2 * folder
    tokens, keys = batch_tokens(EXPERTS, config), key_bytes(EXPERTS, config)
    assert driver.parts["correction service"] == tokens * (2 * 8 + 3 * 34 + DIAGNOSED) + 5 * keys, "keys stand for routes"
    assert driver.parts["batches in the object store"] == 2 * (tokens * 34 + keys) and keys == 4 * (tokens - 1024 * 16384)
    routes, waiting = 48 * 8, config.max_staleness + 1
    assert engines.parts["wide fields in the object store"] == waiting * tokens * routes // 2, "of 16 engines, once"
    assert engines.parts["experts of the tokens in the KV caches"] == 0, "the GPU's memory isn't known"
    *_, told = hosts(EXPERTS, config, gpus_per_node=kind.per_node, nodes=kind.nodes, gpu_bytes=kind.memory)
    cache = engine_memory(EXPERTS, config.rollout, kind.memory)
    assert told.parts["experts of the tokens in the KV caches"] == 8 * (cache.tokens + 1) * 48 * 8 * 4 > 4 << 30
    assert {name for name, size in told.parts.items() if size != engines.parts[name]} == {"experts of the tokens in the KV caches"}
    two = recipe("qwen3_30b_a3b_4nodes", "rollout.engine.tensor_parallel=2", "rollout.workers=8")
    *_, of_pairs = hosts(EXPERTS, two, gpus_per_node=kind.per_node, nodes=kind.nodes, gpu_bytes=kind.memory)
    cache = engine_memory(EXPERTS, two.rollout, kind.memory)
    assert of_pairs.parts["experts of the tokens in the KV caches"] == 8 * (cache.tokens + 1) * 48 * 8 * 4, "each rank has all tokens"
    assert learner.parts["wide fields, fetched to the object store"] == tokens * routes
    assert learner.parts["wide fields, the ranks' shares"] == 2 * tokens * routes, "four data-parallel shares, each with four ranks"
    assert driver.parts["answers put together for a checkpoint"] == waiting * tokens * (8 + routes)


@pytest.mark.parametrize(("engines", "versions"), [(1, 1), (2, 2)])
def test_a_node_holds_the_older_version_while_another_engine_reads_it(engines: int, versions: int) -> None:
    config = recipe("qwen3_8b_8gpu", "ray.address=auto", "rollout.engine.device=cpu", "rollout.engine.dtype=bfloat16")
    assert of_engines(DENSE, config, engines)["versions fetched to the object store"] == versions * 2 * DENSE.parameters


def test_on_one_node_wide_fields_lie_in_the_object_store_once() -> None:
    config = recipe("qwen3_8b_8gpu", "correction.preset=dppo-topk-kl")
    (whole,) = dense("correction.preset=dppo-topk-kl")
    in_store = sum(size for what, size in whole.parts.items() if "wide fields" in what and "object store" in what)
    assert in_store == (config.max_staleness + 1) * batch_tokens(EXPERTS, config) * 20 * (4 + 4)
