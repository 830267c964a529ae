"""What a recipe leaves open is decided once, for both sides, before anything starts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import check_types
from evenkeel.actors.settings.resolve import ModelFacts, with_devices, with_engine_types, with_model
from evenkeel.correction.errors import ConfigError
from evenkeel.learner.config import LearnerConfig
from evenkeel.preparation import decide_devices
from evenkeel.recipe import load_config
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"


def config(overrides: str = "") -> RunConfig:
    return load_config(RunConfig, RECIPE, overrides.split())


def test_a_cpu_keeps_what_it_always_had() -> None:
    plain = config()
    found = with_devices(plain, has_gpu=False)
    assert (found.learner.device, found.learner.dtype) == ("cpu", "float32")
    assert (found.rollout.engine.device, found.rollout.engine.dtype) == ("cpu", "float32")
    assert found.rollout.engine.weight_group_backend == "gloo"
    decided = {"device", "dtype", "weight_group_backend", "layers"}
    assert found.learner.model_dump(exclude=decided) == plain.learner.model_dump(exclude=decided)
    assert found.rollout.engine.model_dump(exclude=decided) == plain.rollout.engine.model_dump(exclude=decided)


@pytest.mark.parametrize(
    ("overrides", "learner", "engine"),
    [
        ("max_staleness=1", 1, 1),
        ("max_staleness=0", 4, 4),
        ("max_staleness=0 true_on_policy=true", 2, 2),  # the most that the contract allows
        ("max_staleness=0 learner.data_parallel=2 rollout.workers=3", 2, 1),
        ("max_staleness=0 learner.threads=3", 3, 4),
        ("max_staleness=0 ray.address=10.0.0.1:6379", 1, 1),
    ],
)
def test_sides_that_take_turns_have_all_cores_each(monkeypatch: pytest.MonkeyPatch, overrides: str, learner: int, engine: int) -> None:
    """4 cores here: with one thread each, half of a synchronous run's processor time would be idle."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    found = with_devices(config(overrides), has_gpu=False)
    assert (found.learner.threads, found.rollout.engine.threads) == (learner, engine)


def test_a_gpu_gets_bfloat16_on_both_sides_and_sizes_that_suit_it() -> None:
    """Nothing is handed on as auto: SGLang would make float16 of a float32 folder."""
    recipe = RunConfig.model_validate(config("learner.data_parallel=2").model_dump(exclude={"learner", "rollout"}) | {
        "learner": {"data_parallel": 2}, "rollout": config().rollout.model_dump(exclude={"engine"}),
    })  # fmt: skip
    found = with_devices(recipe, has_gpu=True)
    learner, engine = found.learner, found.rollout.engine
    assert (learner.device, learner.dtype, engine.device, engine.dtype) == ("cuda", "bfloat16", "cuda", "bfloat16")
    assert (learner.tokens_per_microbatch, engine.max_running_requests) == (8192, 256)
    assert engine.with_context(4096).sglang_arguments("m", 0)["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("recipe", "has_gpu", "layers"),
    [
        ("", False, "local"),
        ("learner.dtype=float32 rollout.engine.dtype=bfloat16", True, "local"),
        ("true_on_policy=true", True, "local"),
        ("", True, "auto"),  # by what is installed where a rank is
        ("learner.layers=transformer_engine", True, "transformer_engine"),
    ],
)
def test_layers_are_decided_here_unless_it_depends_on_what_is_installed(recipe: str, has_gpu: bool, layers: str) -> None:
    assert with_devices(config(recipe), has_gpu=has_gpu).learner.layers == layers


def open_learner(**given: Any) -> RunConfig:
    """A recipe whose learner says this and nothing else."""
    recipe = config()
    rollout = recipe.rollout.model_dump(exclude={"engine"})
    fields = recipe.model_dump(exclude={"learner", "rollout"}) | {"learner": given, "rollout": rollout}
    return with_devices(RunConfig.model_validate(fields), has_gpu=True)


@pytest.mark.parametrize(
    ("given", "of_experts", "of_dense"),
    [
        ({"tensor_parallel": 2, "sequence_parallel": True}, True, False),
        ({"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}, False, False),
        ({"tensor_parallel": 2, "sequence_parallel": True, "distributed_optimizer": False}, False, False),
        ({"tensor_parallel": 2, "sequence_parallel": True, "device": "cpu", "dtype": "bfloat16"}, False, False),
        ({"data_parallel": 2, "expert_parallel": 2}, True, True),
        ({}, False, False),
    ],
)
def test_an_optimizer_is_shared_where_ranks_hold_the_same_experts_too(given: dict[str, Any], of_experts: bool, of_dense: bool) -> None:
    """Whether there are experts is the model's to say, and is known later than the devices."""
    for has_experts, wanted in ((True, of_experts), (False, of_dense)):
        found = with_model(open_learner(**given), ModelFacts({}, 0, has_experts=has_experts))
        assert found.learner.distributed_optimizer is wanted


def test_what_the_recipe_says_stays_also_where_it_is_the_default() -> None:
    given = "learner.data_parallel=2 learner.distributed_optimizer=false learner.tokens_per_microbatch=2048 learner.dtype=float16"
    found = with_model(with_devices(config(f"{given} rollout.engine.max_running_requests=64"), has_gpu=True), ModelFacts({}, 0))
    assert (found.learner.distributed_optimizer, found.learner.tokens_per_microbatch) == (False, 2048)
    assert (found.rollout.engine.max_running_requests, found.rollout.engine.dtype) == (64, "float16")


def test_once_decided_nothing_changes_any_more() -> None:
    """What is resolved has plain values, which stay whatever machine reads them."""
    once = with_devices(config("learner.data_parallel=2"), has_gpu=True)
    assert with_devices(once, has_gpu=False) == once
    assert with_devices(RunConfig.model_validate(once.model_dump()), has_gpu=False) == once


def test_a_worker_with_a_part_of_a_gpu_has_an_engine_with_that_part_of_its_memory() -> None:
    """Sized on its node (engines/machine.py); a fraction that is given stays."""
    shared = with_devices(config("rollout.gpus_per_worker=0.4"), has_gpu=True).rollout.engine
    assert (shared.gpu_share, shared.memory_fraction) == (0.4, None)
    assert with_devices(config(), has_gpu=True).rollout.engine.gpu_share == 1
    given = config("rollout.gpus_per_worker=0.4 rollout.engine.memory_fraction=0.2")
    assert with_devices(given, has_gpu=True).rollout.engine.memory_fraction == 0.2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("learner.dtype=float32", "rollout.engine.dtype = float32 with device = cuda: SGLang's attention kernels"),
        ("rollout.engine.dtype=float32", "rollout.engine.dtype = float32 with device = cuda"),
        ("learner.layers=transformer_engine learner.dtype=float32", r"learner: layers = transformer_engine: dtype = float32"),
    ],
)
def test_a_gpu_refuses_what_its_kernels_cant_do(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_devices(config(overrides), has_gpu=True)


@pytest.mark.parametrize(
    ("overrides", "has_gpu", "found"),
    [
        ("", True, ("cuda", "bfloat16")),
        ("", False, ("cpu", "float32")),
        ("learner.dtype=float16", True, ("cuda", "float16")),
        ("learner.dtype=bfloat16", False, ("cpu", "bfloat16")),
        ("rollout.engine.device=cpu", True, ("cpu", "bfloat16")),
        ("rollout.engine.dtype=float16", True, ("cuda", "float16")),
    ],
)
def test_an_engine_without_a_run_has_the_types_of_a_run_s(overrides: str, has_gpu: bool, found: tuple[str, str]) -> None:
    plain = config(overrides)
    alone = with_engine_types(plain, has_gpu=has_gpu)
    engine = alone.rollout.engine
    assert (engine.device, engine.dtype) == found
    assert engine.dtype == with_devices(plain, has_gpu=has_gpu).rollout.engine.dtype
    decided = {"device", "dtype", "weight_group_backend", "layers"}
    assert engine.model_dump(exclude=decided) == plain.rollout.engine.model_dump(exclude=decided) and alone.learner == plain.learner
    with pytest.raises(ConfigError, match=r"rollout\.engine\.dtype = float32 with device = cuda"):
        with_engine_types(config("learner.dtype=float32"), has_gpu=True)


@pytest.mark.parametrize(("switch", "has_gpu"), [("true", False), ("false", False), ("true", True)])
def test_an_engine_without_a_run_has_the_operators_of_a_run_s(switch: str, has_gpu: bool) -> None:
    """So that `evenkeel eval` of a true on-policy run's recipe measures what the run's own evaluation did; a run on GPUs is refused."""
    engine = with_engine_types(config(f"true_on_policy={switch}"), has_gpu=has_gpu).rollout.engine
    assert engine.batch_invariant == (switch == "true" and not has_gpu)


def test_layers_for_gpus_wait_for_the_device_to_be_known() -> None:
    """A driver without a GPU may start a run on a cluster that has them."""
    wanted = config("learner.layers=transformer_engine")
    assert with_devices(wanted, has_gpu=True).learner.layers == "transformer_engine"
    with pytest.raises(ConfigError, match="learner: layers = transformer_engine: dtype = float32"):
        with_devices(wanted, has_gpu=False)


def test_a_float32_learner_on_a_cpu_feeds_no_engine_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="float32 with device = cuda"):
        with_devices(config("learner.device=cpu rollout.engine.device=cuda"), has_gpu=True)
    mixed = with_devices(config("learner.device=cpu learner.dtype=bfloat16 rollout.engine.device=cuda"), has_gpu=True)
    check_types(mixed)
    assert mixed.rollout.engine.dtype == "bfloat16"


@pytest.mark.parametrize(("offered", "device"), [({"CPU": 16.0, "GPU": 8.0}, "cuda"), ({"CPU": 16.0}, "cpu")])
def test_auto_is_what_the_cluster_has_not_what_the_driver_sees(
    monkeypatch: pytest.MonkeyPatch, offered: dict[str, float], device: str
) -> None:
    """The head of a cluster has no GPU; ranks that asked for none would all take the first one of their node."""
    joined: list[str | None] = []
    monkeypatch.setattr("evenkeel.actors.cluster.cluster.Cluster", lambda config, **_: joined.append(config.ray.address) or nullcontext())
    monkeypatch.setattr("ray.cluster_resources", lambda: offered)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found, notes = decide_devices(config("ray.address=10.0.0.1:6379"))
    assert (found.learner.device, found.rollout.engine.device, joined) == (device, device, ["10.0.0.1:6379"])
    assert [("no node of the cluster" in note) for note in notes] == [True] * (device == "cpu")
    decide_devices(config("ray.address=10.0.0.1:6379 learner.device=cuda rollout.engine.device=cuda"))
    assert len(joined) == 1, "what is said need not be asked"


def test_without_a_run_each_side_decides_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for has_gpu, device, dtype, backend in ((False, "cpu", "float32", "gloo"), (True, "cuda", "bfloat16", "nccl")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has=has_gpu: has)
        engine, learner = EngineConfig().on_this_machine(), LearnerConfig().on_this_machine()
        assert (learner.resolved_device, learner.resolved_dtype) == (engine.resolved_device, engine.resolved_dtype) == (device, dtype)
        assert engine.resolved_group_backend == backend and engine.with_context(64).sglang_arguments("m", 0)["dtype"] == dtype
        assert learner.on_this_machine() is learner and engine.on_this_machine() is engine, "decided already"


def test_a_part_is_given_what_is_decided_and_decides_nothing_itself() -> None:
    """One that would look at its own process finds no GPU on a cluster's head, or one that is another's."""
    for read in (
        lambda: LearnerConfig().resolved_device,
        lambda: LearnerConfig(device="cpu").resolved_dtype,
        lambda: EngineConfig().copy_threads,
        lambda: EngineConfig(device="cpu").resolved_dtype,
        lambda: EngineConfig(device="cpu").resolved_group_backend,
    ):
        with pytest.raises(ConfigError, match=r"(learner|rollout\.engine)\.[a-z_]+ = auto, which nothing has decided"):
            read()
    assert [name for name, value in with_devices(config(), has_gpu=True).rollout.engine.model_dump().items() if value == "auto"] == []
