"""GPUs that are asked for and aren't there are said before anything waits for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evenkeel.actors.cluster.placement import in_order, places_of
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.parts import worker_settings
from evenkeel.actors.pool import workers
from evenkeel.actors.settings.devices import (
    check_devices,
    check_engine_device,
    check_gpus_to_come,
    check_received,
    check_rollout_resource,
    check_types,
    engines_beside_a_rank,
    gpus_asked,
    held_by,
    room_for_engines,
    unfit_shares,
    whole_gpus,
    workers_with_a_unit,
)
from evenkeel.actors.settings.environment import OF_BATCHES, learner_environment, worker_environment
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.errors import ConfigError
from evenkeel.engines import machine
from evenkeel.engines.machine import ON_CPU
from evenkeel.recipe import load_config
from tests.actors.cases import prompt

RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"
HALF = "learner.dtype=bfloat16"
"""For a learner on a CPU: SGLang has no float32 on a GPU."""
TWO_RANKS = "rollout.gpus_per_worker=0.5 rollout.engine.tensor_parallel=2"


def config(*overrides: str) -> RunConfig:
    """With the devices of a machine that has the GPUs that torch sees now."""
    return with_devices(load_config(RunConfig, RECIPE, overrides), has_gpu=torch.cuda.is_available())


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("there", "overrides", "said"),
    [
        (0, f"rollout.engine.device=cuda {HALF}", "rollout.engine.device = cuda with 1 worker: 1 GPU is needed.* torch sees none here"),
        (0, "learner.device=cuda learner.data_parallel=2", "learner.device = cuda with 2 ranks: 2 GPUs are needed"),
        (1, "rollout.engine.device=cuda learner.device=cuda", "and learner.device = cuda with 1 rank: 2 GPUs are needed.*sees 1"),
        (1, "", "rollout.engine.device = cuda with 1 worker and learner.device = cuda with 1 rank: 2 GPUs"),
        (3, "rollout.min_workers=1 rollout.max_workers=3", "rollout.engine.device = cuda with 3 workers and .*: 4 GPUs"),
        (3, "rollout.workers=3", "rollout.engine.device = cuda with 3 workers and .*: 4 GPUs"),
        (4, "rollout.workers=2 rollout.engine.tensor_parallel=2", "device = cuda with 2 workers of 2 GPUs and .*: 5 GPUs are needed"),
    ],
)
def test_too_few_gpus_on_this_machine(monkeypatch: pytest.MonkeyPatch, there: int, overrides: str, said: str) -> None:
    gpus(monkeypatch, there)
    with pytest.raises(ConfigError, match=said):
        check_devices(config(*overrides.split()))


@pytest.mark.parametrize(
    ("there", "overrides"),
    [
        (0, ""),
        (0, "rollout.engine.device=cpu learner.device=cpu"),
        (1, f"learner.device=cpu {HALF}"),
        (2, ""),
        (1, f"{TWO_RANKS} rollout.engine.device=cpu"),  # whose ranks are processes
        (0, "learner.device=cuda ray.address=auto"),
    ],
)
def test_enough_gpus_or_another_machines(monkeypatch: pytest.MonkeyPatch, there: int, overrides: str) -> None:
    """auto without a GPU is the CPU; what a joined cluster has is known after joining."""
    gpus(monkeypatch, there)
    check_devices(config(*overrides.split()))


def test_an_engine_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    check_engine_device(config())
    with pytest.raises(ConfigError, match=r"rollout\.engine\.device = cuda, but torch sees no GPU here"):
        check_engine_device(config("rollout.engine.device=cuda", HALF))
    gpus(monkeypatch, 2)
    check_engine_device(config("rollout.engine.tensor_parallel=2"))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.tensor_parallel = 4, but torch sees 2 GPUs here"):
        check_engine_device(config("rollout.engine.tensor_parallel=4"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("rollout.engine.dtype=bfloat16", r"engine.dtype = bfloat16 with learner.dtype = float32: .*Set learner.dtype to bfloat16, or"),
        ("learner.dtype=float16 rollout.engine.dtype=bfloat16", "rollout.engine.dtype = bfloat16 with learner.dtype = float16"),
    ],
)
def test_an_engine_of_another_type_than_the_learners_is_refused(monkeypatch: pytest.MonkeyPatch, overrides: str, said: str) -> None:
    """It would refuse the first weights, after the start of everything."""
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=said):
        check_types(with_devices(config(*overrides.split()), has_gpu=False))


@pytest.mark.parametrize("overrides", ["", "learner.dtype=float16", "learner.dtype=float16 rollout.engine.dtype=float16"])
def test_equal_types_and_those_that_follow_the_learner_are_not(monkeypatch: pytest.MonkeyPatch, overrides: str) -> None:
    gpus(monkeypatch, 0)
    check_types(with_devices(config(*overrides.split()), has_gpu=False))


@pytest.mark.parametrize(
    ("shares", "gpus_needed"),
    [([], 0), ([1.0, 1.0], 2), ([0.5, 0.4], 1), ([0.5, 0.6], 2), ([0.4] * 5, 3), ([0.3, 0.7, 0.3, 0.7], 2), ([0.1] * 10, 1)],
)
def test_shares_of_gpus_lie_on_one_each(shares: list[float], gpus_needed: int) -> None:
    """0.4 five times is two GPUs' worth, but no GPU holds three of them."""
    assert whole_gpus(shares) == gpus_needed


def test_one_gpu_holds_learner_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    check_devices(config("learner.gpus_per_rank=0.5", "rollout.gpus_per_worker=0.4"))
    with pytest.raises(ConfigError, match=r"1 rank of 0.7 GPU: 2 GPUs are needed, but torch sees 1.*rollout.gpus_per_worker"):
        check_devices(config("learner.gpus_per_rank=0.7", "rollout.gpus_per_worker=0.4"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("learner.gpus_per_rank=0.5 learner.data_parallel=2", "learner.gpus_per_rank = 0.5 with 2 ranks: two of them would fit on one GPU"),
        ("learner.gpus_per_rank=0.6 learner.tensor_parallel=2", "learner.gpus_per_rank = 0.6 with tensor_parallel = 2"),
        (TWO_RANKS, "gpus_per_worker = 0.5 with engine.tensor_parallel = 2"),
        (f"{TWO_RANKS} learner.device=cpu {HALF}", "gpus_per_worker = 0.5 with engine.tensor_parallel = 2"),
        ("rollout.gpus_per_worker=0.5 weight_sync.transport=broadcast", "transport = broadcast where a rank or a worker has a share"),
    ],
)
def test_what_nccl_cant_connect_is_refused(monkeypatch: pytest.MonkeyPatch, overrides: str, said: str) -> None:
    gpus(monkeypatch, 8)
    with pytest.raises(ConfigError, match=said):
        check_devices(config(*overrides.split()))


def test_every_reason_against_the_shares_is_told() -> None:
    """`doctor` and `plan` list them; a run stops at the first."""
    both = ("rollout.engine.engine_args.enable_nccl_nvls=true", "weight_sync.transport=broadcast")
    asked = load_config(RunConfig, RECIPE, [*TWO_RANKS.split(), "learner.gpus_per_rank=0.4", "learner.tensor_parallel=2", *both])
    told = [error.reason for error in unfit_shares(with_devices(asked, has_gpu=True))]
    starts = ("rollout.gpus_per_worker = 0.5", "rollout.engine.engine_args.enable", *["learner.gpus_per_rank = 0.4"] * 2, "weight_sync.tr")
    assert [reason.startswith(start) for reason, start in zip(told, starts, strict=True)] == [True] * 5, told
    with pytest.raises(ConfigError) as first:
        check_devices(with_devices(asked, has_gpu=True))
    assert first.value.reason == told[0]


@pytest.mark.parametrize(
    ("option", "ranks", "variable"),
    [
        ("enable_nccl_nvls=true", 1, "NCCL_NVLS_ENABLE"),
        ("enable_symm_mem=true", 1, "NCCL_NVLS_ENABLE"),
        ("enable_deterministic_inference=true", 2, "NCCL_ALGO"),
        ("rl_on_policy_target=fsdp", 2, "NCCL_ALGO"),
    ],
)
def test_one_group_has_one_nccl(monkeypatch: pytest.MonkeyPatch, option: str, ranks: int, variable: str) -> None:
    """SGLang overwrites a variable that both sides have alike for the broadcast, or sets one that the learner hasn't."""
    gpus(monkeypatch, 8)
    name, option = option.split("=")[0], f"rollout.engine.engine_args.{option}"
    both = (option, "weight_sync.transport=broadcast", f"rollout.engine.tensor_parallel={ranks}")
    with pytest.raises(ConfigError, match=rf"engine_args\.{name} = .* with weight_sync.transport = broadcast.*{variable}.*object_store"):
        check_devices(config(*both))
    check_devices(config(option, f"rollout.engine.tensor_parallel={ranks}"))
    check_devices(config(*both, "rollout.engine.device=cpu", "learner.device=cpu"))
    if ranks > 1:
        check_devices(config(*both[:2]))  # an engine of one rank has no sums over ranks, and sets nothing


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("rollout.engine.device=cpu", r"learner, on cuda, .* by nccl, and engines, on cpu, by gloo: .*\. Set weight_sync.transport: ob"),
        (f"learner.device=cpu {HALF}", "the learner, on cpu, joins the weight group by gloo, and engines, on cuda, by nccl"),
        ("rollout.engine.weight_group_backend=gloo", r"by nccl, and engines, on cuda, by gloo: .* Set rollout.*_backend: auto, or weight"),
        ("rollout.engine.device=cpu rollout.engine.weight_group_backend=nccl", "by nccl, and engines, on cpu, by nccl"),
        ("rollout.engine.device=cpu learner.device=cpu rollout.engine.weight_group_backend=nccl", "on cpu, joins .* on cpu, by nccl"),
    ],
)
def test_a_broadcast_is_refused_where_learner_and_engines_make_no_group(monkeypatch: pytest.MonkeyPatch, overrides: str, said: str) -> None:
    gpus(monkeypatch, 8)
    with pytest.raises(ConfigError, match=said):
        check_devices(config("weight_sync.transport=broadcast", *overrides.split()))
    check_devices(config(*overrides.split()))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_broadcast_among_equal_devices_is_not(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    gpus(monkeypatch, 8)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    both = (f"rollout.engine.device={device}", f"learner.device={device}", "weight_sync.transport=broadcast")
    check_devices(config(*both))
    check_devices(config(*both, f"rollout.engine.weight_group_backend={backend}"))


@pytest.mark.parametrize(
    ("ids", "seen", "said"),
    [
        ([3], 1, None),
        ([], 8, "learner rank 2: asked Ray for 1 of a GPU and got none"),
        ([3], 8, "learner rank 2: Ray gave it GPU 3, but torch sees 8 there"),
        ([3], 0, "Ray gave it GPU 3, but torch sees 0 there"),
    ],
)
def test_an_actor_has_what_it_asked_for(monkeypatch: pytest.MonkeyPatch, ids: list[int], seen: int, said: str | None) -> None:
    """Of eight GPUs that it sees it would take the first, as would all others."""
    gpus(monkeypatch, seen)
    if said is None:
        check_received("learner rank 2", 1.0, ids)
    else:
        with pytest.raises(ConfigError, match=said):
            check_received("learner rank 2", 1.0, ids)


def test_an_engine_of_several_ranks_asks_for_as_many_gpus_and_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    asked: dict[str, object] = {}

    def options(**given: object) -> SimpleNamespace:
        asked.update(given)
        return SimpleNamespace(remote=lambda *_: None)

    monkeypatch.setattr(workers, "ray", SimpleNamespace(remote=lambda _: SimpleNamespace(options=options)))
    monkeypatch.setattr(workers, "lower_priority", lambda _: None)
    workers.create("0", worker_settings(config("rollout.engine.tensor_parallel=2"), Path("model"), [prompt(0)]), None)
    assert (asked["num_gpus"], asked["num_cpus"]) == (2, 2)
    check_received("rollout worker 0", 2.0, [1, 3])
    with pytest.raises(ConfigError, match=r"rollout worker 0: asked Ray for 2 GPUs and got \[1\]"):
        check_received("rollout worker 0", 2.0, [1])
    gpus(monkeypatch, 8)
    with pytest.raises(ConfigError, match="Ray gave it GPU 1, 3, but torch sees 8 there"):
        check_received("rollout worker 0", 2.0, [1, 3])


def test_the_environment_of_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 8)
    on_gpu = config("weight_sync.transport=broadcast", "ray.env.NCCL_DEBUG=INFO", "ray.env.NCCL_NVLS_ENABLE='1'")
    learner, worker = learner_environment(on_gpu), worker_environment(on_gpu)
    assert learner["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "CUDA_DEVICE_MAX_CONNECTIONS" not in worker
    assert learner["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and "PYTORCH_ALLOC_CONF" not in worker, "its pools are SGLang's"
    assert learner.items() >= OF_BATCHES.items(), "ranks read batches where they lie"
    assert not worker.keys() & OF_BATCHES.keys(), "a worker's groups have no tensors"
    assert worker_environment(config("correction.preset=dppo-topk-tv")).items() >= OF_BATCHES.items(), "but for wide fields"
    for one in (learner, worker):
        assert one["NCCL_CUMEM_ENABLE"] == "0" and one["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        assert one["TORCH_NCCL_DUMP_ON_TIMEOUT"] == one["TORCH_NCCL_ENABLE_MONITORING"] == "0", "or torch's monitor ends every rank"
        assert (one["NCCL_DEBUG"], one["NCCL_NVLS_ENABLE"]) == ("INFO", "1"), "the user's own win"
    assert not {name for name in learner_environment(config()) if name.startswith(("NCCL", "TORCH_NCCL"))}
    on_cpu = learner_environment(config("learner.device=cpu", HALF))
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == "", "torch must see none where the CPU computes"
    assert on_cpu.items() >= ON_CPU.items(), "or kernels for each shape stay in memory, buffers are mapped anew, and threads spin"


def test_neighbouring_ranks_are_on_one_node_and_on_neighbouring_gpus() -> None:
    nodes = {0: "b", 1: "a", 2: "b", 3: "a"}
    assert in_order(nodes, {"a": "10.0.0.2", "b": "10.0.0.1"}, {0: 4, 1: 2, 2: 0, 3: 0}) == (2, 0, 3, 1)


@pytest.mark.parametrize(
    ("given", "visible", "places"),
    [([3, 2], None, [3, 2]), (["GPU-0a", "GPU-9f"], ["GPU-9f", "GPU-0a"], [1, 0]), (["2", "10"], ["10", "2"], [1, 0])],
    ids=["all of a node's", "by UUID", "by number"],
)
def test_a_gpu_s_place_is_that_in_the_list_of_visible_ones(given: list[int | str], visible: list[str] | None, places: list[int]) -> None:
    """Ray hands out words of that list, which are no numbers where it names GPUs by UUID."""
    assert places_of(given, visible) == places


JOINED = ("ray.address=10.0.0.1:6379", "rollout.min_workers=1", "rollout.max_workers=4")


def test_a_resource_that_no_node_can_offer_is_refused() -> None:
    said = r"rollout.max_workers = 4 with ray.rollout_resource = .rollout.: no node .* Give a node type"
    with pytest.raises(ConfigError, match=said) as caught:
        check_rollout_resource(config(*JOINED), 0, 0)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"rollout\.workers = 1 with"):
        check_rollout_resource(config("ray.address=10.0.0.1:6379"), 0, 0)


def test_fewer_nodes_than_the_pool_may_want_are_told_of() -> None:
    note = check_rollout_resource(config(*JOINED), 1, 3)
    assert note is not None and "rollout.max_workers = 4" in note and "offers 3 whole units of" in note
    note = check_rollout_resource(config(*JOINED), 1, 1.5)
    assert note is not None and "offers 1 whole unit of" in note, "a worker takes no half of one"
    assert check_rollout_resource(config(*JOINED), 1, 4) is None
    assert check_rollout_resource(config(*JOINED), 4, 0) is None, "nodes that somebody started by hand"
    assert check_rollout_resource(config(*JOINED), 0, None) is None, "nodes may come that nobody knows of yet"


def test_a_worker_takes_a_whole_unit_on_one_node() -> None:
    assert workers_with_a_unit([1.5, 0.5, 2.0], wanted=10) == 3, "four units in all, of which one lies on two nodes"
    assert workers_with_a_unit([64.0], wanted=10) == 10
    with pytest.raises(ConfigError, match=r"no node of the cluster at .* offers a whole unit"):
        check_rollout_resource(config(*JOINED), 0.5, 0)


def test_gpus_are_asked_for_so_many_workers() -> None:
    one = config("learner.device=cuda", "learner.gpus_per_rank=0.6", "rollout.engine.device=cuda", "rollout.gpus_per_worker=0.4", *JOINED)
    assert [gpus_asked(one, workers=number) for number in (0, 1, 2, 3, 4)] == [1, 1, 2, 2, 3]
    assert gpus_asked(one) == gpus_asked(one, workers=1), "an elastic pool on a cluster begins with its smallest"


@pytest.mark.parametrize(
    ("of_rank", "of_engine", "engines"), [(0.7, 0.3, 1), (0.7, 0.1, 3), (0.9, 0.1, 1), (0.7, 0.31, 0), (1, 0.1, 0), (0.5, 1, 0)]
)
def test_engines_beside_a_rank_fill_its_gpu(of_rank: float, of_engine: float, engines: int) -> None:
    """In floating point 1 - 0.7 is less than 0.3 or three times 0.1, and 1 - 0.9 less than 0.1."""
    shares = f"learner.gpus_per_rank={of_rank}", f"rollout.gpus_per_worker={of_engine}"
    one = config("learner.device=cuda", *shares, "rollout.engine.device=cuda", *JOINED)
    assert engines_beside_a_rank(one) == engines
    assert whole_gpus([of_rank, *[of_engine] * engines]) == 1, "as GPUs are filled"


def test_engines_with_a_share_have_room_beside_a_rank_too() -> None:
    """A rank leaves 0.4 of its GPU, two engines' share. It is on the node that takes fewer workers, one of its two GPUs."""
    one = config("learner.device=cuda", "learner.gpus_per_rank=0.6", "rollout.engine.device=cuda", "rollout.gpus_per_worker=0.2", *JOINED)
    assert [room_for_engines(nodes, one) for nodes in ([(1, 8)], [(2, 8)], [(2, 9), (2, 1)], [(0, 8)])] == [2, 7, 10, 0]


def test_a_share_lies_on_one_gpu() -> None:
    assert [held_by(gpus, share) for gpus, share in ((2, 0.6), (2, 0.5), (1, 1 / 3), (8, 2), (7, 2), (1, 2), (4, 1), (0, 0.5))] == [
        2, 4, 3, 4, 3, 0, 4, 0
    ]  # fmt: skip


def test_ranks_that_will_never_have_gpus_are_refused() -> None:
    four = ["learner.data_parallel=4", "learner.device=cuda", *JOINED]
    with pytest.raises(ConfigError, match=r"4 ranks: 4 GPUs are needed, and the cluster at .* has 3 at most, with all nodes that its auto"):
        check_gpus_to_come(config(*four), 1, 3)
    check_gpus_to_come(config(*four), 4, 0)
    check_gpus_to_come(config(*four), 0, None)
    check_gpus_to_come(config(*four, "learner.device=cpu"), 0, 0)


def test_a_cluster_that_is_asked_what_auto_means_is_not_judged_by_the_drivers_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is joined for that before anything is decided. Without GPUs of its own the run is one on CPUs."""
    gpus(monkeypatch, 8)
    for devices in ((), ("rollout.engine.device=cuda",), ("rollout.engine.device=cpu",)):
        check_gpus_to_come(load_config(RunConfig, RECIPE, ["ray.address=10.0.0.1:6379", "learner.data_parallel=4", *devices]), 0, 0)


@pytest.mark.parametrize(("instructions", "dtype"), [("avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16"), (None, "float32")])
def test_bfloat16_where_the_processor_multiplies_in_it(monkeypatch: pytest.MonkeyPatch, instructions: str | None, dtype: str) -> None:
    """Both sides alike: an engine's type that is left open is the learner's."""
    monkeypatch.setattr(machine, "fast_bfloat16", lambda: instructions)
    given = load_config(RunConfig, RECIPE, ["learner.dtype=bfloat16_if_fast", "learner.device=cpu", "rollout.engine.device=cpu"])
    decided = with_devices(given, has_gpu=False)
    assert (decided.learner.dtype, decided.rollout.engine.dtype) == (dtype, dtype)


def test_instructions_are_those_that_torch_finds() -> None:
    """torch asks the processor itself (CPUID), not Linux."""
    if not Path("/proc/cpuinfo").is_file() or not torch.backends.mkldnn.is_available():
        pytest.skip("not Linux, or a torch without oneDNN")
    has_x86 = torch.cpu._is_avx512_bf16_supported()
    if machine.fast_bfloat16() == "bf16":
        pytest.skip("an Arm processor: torch has no word for its instructions")
    assert (machine.fast_bfloat16() is not None) == has_x86
