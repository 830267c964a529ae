"""Rules of the first layer: whether the recipe fits the model's config.json and the size of a GPU, and whether that kind of GPU has the
kernels. No cluster is needed.

Each rule is a function of (facts, config) that yields complaints; the config has devices and types (actors/settings/resolve.py).

Some kernels want weights in another order, or in another type. SGLang 0.5.21 brings them into it once, after loading; a weight update
writes what files have, so that the engine would compute with something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.devices import check_types, engines_beside_a_rank, gpus_asked, room_for_engines, unfit_shares, workers_asked
from evenkeel.actors.settings.resolve import RATE_PRETRAINED
from evenkeel.correction.errors import ConfigError, counted
from evenkeel.doctor.facts import Complaint, PaperFacts, Severity
from evenkeel.doctor.memory_rules import gib, on_gpus
from evenkeel.engines.float8_format import BLOCK
from evenkeel.learner.model_fit import layout_obstacles, setting_obstacles
from evenkeel.plan.hosts import EARLIER, OF_ENGINES, OF_LEARNER, checkpoint_bytes, hosts
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape
from evenkeel.rollout.engine_settings import engine_ranks
from evenkeel.rollout.engine_settings.engine_arguments import unknown
from evenkeel.rollout.engine_settings.engine_ranks import UNREPORTED_ROUTES


class Architecture(NamedTuple):
    """The architecture of a GPU. Later ones are greater."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}"


RUNNER = "moe_runner_backend"
PRODUCTS = "fp8_gemm_runner_backend"
# SGLang's runners of experts that leave their weights as files have them; auto does so on all GPUs but Blackwell. Engines on GPUs get
# triton where a recipe says nothing (rollout/engine_settings/engine_config.py).
_KEPT_BY = ("auto", "triton")
# Products of float8 whose scales are powers of two on Blackwell (fp8_utils.py, requant_block_scale_ue8m0_for_deepgemm); ours is triton.
_ROUNDED_ANEW_BY = ("auto", "deep_gemm")
# An architecture where deep_gemm's are so, too: DEEPGEMM_SCALE_UE8M0 covers sm_120 and sm_121, and of these sm_120 is left out when it
# comes to weights (model_loader/utils.py, should_deepgemm_weight_requant_ue8m0). auto is CUTLASS's on both, which leaves them alone.
_GB10 = Architecture(12, 1)
# Major number of its architectures for data centres: sm_100, sm_103 (arg_groups/model_overrides/qwen3_moe.py).
_BLACKWELL = 10
# Lowest architectures that either side's kernels in half precision are made for (Ampere), and with products of float8.
_HALF, _FLOAT8 = Architecture(8, 0), Architecture(8, 9)


def experts_stay_as_sent(shape: ModelShape, config: RunConfig) -> Iterator[Complaint]:
    """The weights of experts must keep their layout in the engine, on GPUs and on CPUs (SGLang's layers/quantization/unquant.py,
    layers/moe/fused_moe_triton/layer.py)."""
    runner = _runner(config)
    if shape.experts and runner not in _KEPT_BY:
        yield Complaint(
            "fail",
            f"rollout.engine.engine_args.{RUNNER} = {runner}: SGLang may lay the weights of experts out otherwise for it, and new weights "
            "as files have them would have no place",
            "Set it to triton",
        )


def half_precision_has_kernels(config: RunConfig, *, of_ranks: Collection[str], of_engines: Collection[str]) -> Iterator[Complaint]:
    """In bfloat16 and in float16: torch's variable-length attention, which ranks take for both (learner/model/attention.py), is
    FlashAttention, and SGLang's own kernels (sglang-kernel) have no code for older GPUs. A failure if all GPUs of a side are so.

    Args: architectures of the GPUs that a rank, and that an engine may get, such as sm_90; those that aren't known are left out.
    """
    learner, engine = config.learner, config.rollout.engine
    on_half = learner.resolved_device == "cuda" and learner.resolved_dtype != "float32"
    ranks = _known(of_ranks) if on_half else []
    engines = _known(of_engines) if engine.resolved_device == "cuda" else []
    sides = {"the learner's attention in half precision (FlashAttention)": ranks, "SGLang's kernels": engines}
    old = {what: known for what, known in sides.items() if known and known[0] < _HALF}
    if old:
        yield Complaint(
            "fail" if any(known[-1] < _HALF for known in old.values()) else "warn",
            f"GPUs of {min(known[0] for known in old.values())} are too old for {' and '.join(old)}",
            f"Take GPUs of {_HALF} (Ampere) and later, or compute on the CPU (device: cpu)",
        )


def weights_stay_as_sent(shape: ModelShape, config: RunConfig, architectures: Collection[str]) -> Iterator[Complaint]:
    """An engine must hold the weights in the order and type in which it was sent them.

    Args: architectures: of the GPUs that an engine may get, such as sm_90; those that aren't known are left out.
    """
    known = _known(architectures)
    if config.rollout.engine.resolved_device != "cuda" or not known:
        return
    if shape.experts and _runner(config) == "auto" and any(one.major == _BLACKWELL for one in known):
        yield Complaint(
            "fail",
            f"rollout.engine.engine_args.{RUNNER} = auto: on Blackwell SGLang lays the weights of experts out for other kernels, where new "
            "weights as files have them have no place",
            "Set it to triton, or leave it out",
        )
    products = config.rollout.engine.engine_args.get(PRODUCTS, "triton")
    if config.rollout.engine.has_float8 and any(_rounds_anew(products, one) for one in known):
        yield Complaint(
            "fail",
            f"rollout.engine.engine_args.{PRODUCTS} = {products}: on Blackwell SGLang rounds the scales of float8 anew for it, and an "
            "engine would not hold what it was sent",
            "Set it to triton, or leave it out",
        )
    yield from _types_stay(config, known)


def _rounds_anew(products: str, one: Architecture) -> bool:
    """Whether these products of float8 have scales of their own on an architecture."""
    return (products in _ROUNDED_ANEW_BY and one.major == _BLACKWELL) or (products == "deep_gemm" and one == _GB10)


def _types_stay(config: RunConfig, known: list[Architecture]) -> Iterator[Complaint]:
    """GPUs without products of float8 make SGLang pack the weights anew (layers/quantization/fp8_utils.py). A failure if no GPU has them, a
    warning if some have: the engines may be on those."""
    engine = config.rollout.engine
    packed = [one for one in known if _HALF <= one < _FLOAT8]
    if engine.has_float8 and packed:
        yield Complaint(
            "fail" if known[-1] < _FLOAT8 else "warn",
            f"rollout.engine.quantization = float8_block on {packed[0]}, which has no products of float8: SGLang packs the weights anew "
            "for another kernel (Marlin), where those that are sent have no place",
            f"Set it to none, or take GPUs of {_FLOAT8} and later",
        )


def _runner(config: RunConfig) -> str:
    return str(config.rollout.engine.engine_args.get(RUNNER, "triton"))


def _known(names: Collection[str]) -> list[Architecture]:
    """The known architectures, lowest first."""
    return sorted({found for name in names if (found := architecture_of(name)) is not None})


def architecture_of(name: str) -> Architecture | None:
    """(9, 0) of sm_90 or sm_90a; None: its driver doesn't say."""
    found = re.search(r"(\d+)(\d)", name)
    return Architecture(int(found[1]), int(found[2])) if found else None


PaperRule = Callable[[PaperFacts, RunConfig], Iterator[Complaint]]
SettingsRule = Callable[[RunConfig], Iterator[Complaint]]
"""A rule of settings alone, so that it can be applied before anything is known of the model."""
FLOAT8_FAMILIES = ("qwen3", "qwen3_moe", "mixtral", "olmoe")
"""Families, by model_type, of which an engine's weights were compared with those that it was sent. SGLang's loader of Llama leaves out the
scales."""
LESS = "Use machines with more memory, shorter answers (rollout.engine.context_length), or fewer (groups_per_step)"


def devices_and_types(config: RunConfig) -> Iterator[Complaint]:
    yield from map(Complaint.refusal, unfit_shares(config))
    try:
        check_types(config)
    except ConfigError as error:
        yield Complaint.refusal(error)


def train_takes_model_and_task(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    yield from map(Complaint.refusal, facts.refused)
    yield from map(Complaint.refusal, facts.lacking)


def learning_rate_is_by_kind_of_model(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    learner = config.learner
    if not facts.gives_rate:
        kind = "a pretrained model" if learner.learning_rate == RATE_PRETRAINED else "a model made from nothing"
        sentence = f"learner.learning_rate = {learner.learning_rate:g}, the default for {kind} (usual values: docs/tasks.md#learning-rate)"
        yield Complaint("note", sentence)


def layout_divides_the_model(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    yield from map(Complaint.refusal, layout_obstacles(config.learner, facts.shape.sizes))


def settings_fit_the_experts(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    yield from map(Complaint.refusal, setting_obstacles(config.learner, facts.shape.sizes))


def engine_reports_its_experts(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    """rollout/engine/engine.py refuses the same when an engine starts."""
    kind = facts.shape.model_type
    if kind in UNREPORTED_ROUTES and config.learner.routing_replay == "rollout":
        reason = f"learner.routing_replay = rollout: SGLang's {kind} doesn't report which experts it took"
        yield Complaint("fail", reason, "Set it to recompute, or to none")


def sglang_knows_its_arguments(config: RunConfig) -> Iterator[Complaint]:
    engine = config.rollout.engine
    for reason, remedy in unknown(engine.attention_backend, engine.engine_args, on_cpu=engine.resolved_device == "cpu"):
        yield Complaint("fail", reason, remedy)


def experts_keep_their_layout(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    yield from experts_stay_as_sent(facts.shape, config)


def gpus_have_kernels(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    yield from half_precision_has_kernels(config, of_ranks=facts.architectures, of_engines=facts.architectures)


def weights_keep_layout_and_type(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    yield from weights_stay_as_sent(facts.shape, config, facts.architectures)


def float8_can_be_had(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    """Whole blocks: SGLang asks for them of each rank's part of a matrix (layers/quantization/fp8_utils.py, validate_fp8_block_shape; of
    experts fp8.py), its kernels for GPUs also of what goes into a product (per_token_group_quant_fp8), which may be the hidden channels."""
    if not config.rollout.engine.has_float8:
        return
    engine, kind = config.rollout.engine, facts.shape.model_type
    if kind not in FLOAT8_FAMILIES:
        yield Complaint("fail", f"rollout.engine.quantization = float8_block: no engine of {kind} was seen to take it", "Set it to none")
    ranks, on_cpu = engine.tensor_parallel, engine.resolved_device == "cpu"
    on_each, lower = (f" on each of {ranks} ranks", ", or rollout.engine.tensor_parallel lower") if ranks > 1 else ("", "")
    expert_ranks = ranks if on_cpu else ranks // engine.expert_parallel  # on a CPU SGLang fills up experts' widths for all ranks
    for part, channels in facts.shape.channels(ranks, expert_ranks).items():
        if channels % BLOCK:
            reason = f"its {part} have {channels} channels{on_each}, no multiple of {BLOCK}"
            fewer = ", or rollout.engine.expert_parallel higher" if part == "experts" and expert_ranks > 1 and not on_cpu else ""
            yield Complaint("fail", f"rollout.engine.quantization = float8_block: {reason}", f"Set it to none{lower}{fewer}")
    if not on_cpu and facts.shape.hidden % BLOCK:
        reason = f"its hidden_size is {facts.shape.hidden}, no multiple of {BLOCK}, by which SGLang's kernels for GPUs round"
        yield Complaint("fail", f"rollout.engine.quantization = float8_block: {reason}", "Set it to none")


def engine_ranks_divide_the_model(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    shape = facts.shape
    for obstacle, remedy in engine_ranks.obstacles(
        config.rollout.engine,
        model_type=shape.model_type,
        heads=shape.heads,
        key_heads=shape.key_heads,
        widths=[shape.feed_forward],
        experts=shape.experts,
    ):
        yield Complaint("fail", obstacle, remedy)


def prompts_have_room(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    for entry in config.rollout.entries:
        try:
            config.rollout.longest_prompt(entry)
        except ConfigError as error:
            yield Complaint.refusal(error)


def run_folder_can_be_made(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    if facts.closed_folder:
        text = f"run_dir = {config.run_dir or 'runs'}: this process may not write into {facts.closed_folder}"
        yield Complaint("fail", text, "Set run_dir, or let it write there")


def disk_holds_the_checkpoints(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    if facts.disk_free is None:
        return
    one = checkpoint_bytes(facts.shape, config)
    kept = one * (config.checkpoint.keep + 1)  # a new one is whole before an old one goes
    if facts.disk_free < one:
        text = f"a checkpoint has {gib(one)}, but the run folder's disk has {gib(facts.disk_free)} free"
        yield Complaint("fail", text, "Set run_dir")
    elif facts.disk_free < kept:
        text = f"{config.checkpoint.keep} checkpoints and the one being written have {gib(kept)}, but {gib(facts.disk_free)} are free"
        yield Complaint("warn", text, "Set run_dir to a larger disk, or lower checkpoint.keep")


def host_holds_the_run(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    """For one machine. A failure if what it holds all the time is too much: on a CPU weights, gradients and optimizer, and in any case the
    copies of earlier weights."""
    if facts.host_bytes is None:
        return
    (host,) = hosts(facts.shape, config, gpus_per_node=gpus_asked(config), nodes=1, gpu_bytes=min(facts.gpus, default=0))
    if host.total > facts.host_bytes:
        outside = " outside its GPUs" if "cuda" in (config.learner.resolved_device, config.rollout.engine.resolved_device) else ""
        text = f"the run takes up to {gib(host.total)} of the {gib(facts.host_bytes)} that this machine or container has{outside}: {host}"
        engines = host.parts[OF_ENGINES] * config.rollout.workers / config.rollout.most_workers  # an elastic pool need not grow
        least, earlier = host.parts[OF_LEARNER] + engines, host.parts[EARLIER]
        remedy = f"Take a smaller model. {LESS}" if least > facts.host_bytes else LESS
        if earlier:
            remedy = (
                f"Lower max_staleness, of whose versions copies are kept, or take a correction on rho and monitor.split_every: 0. {LESS}"
            )
        yield Complaint("fail" if least + earlier > facts.host_bytes else "warn", text, remedy)


def names_are_not_taken(facts: PaperFacts, config: RunConfig) -> Iterator[Complaint]:
    """Of modules: rollout/module_path.py."""
    if facts.taken_names:
        text = f"named like modules of evenkeel or of Python itself, which a reward gets in their place: {_some(facts.taken_names)}"
        yield Complaint("warn", text, "Rename what the reward imports")
    if facts.stand_ins:
        text = f"PYTHONPATH puts them before modules of Python's standard library, for every process: {_some(facts.stand_ins)}"
        yield Complaint("warn", text, "Rename them, or leave their folder out: a reward is found where the run is started, too")


def _some(paths: Sequence[str]) -> str:
    most = 5
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")


SETTINGS_RULES: tuple[SettingsRule, ...] = (devices_and_types, sglang_knows_its_arguments)
PAPER_RULES: tuple[PaperRule, ...] = (
    train_takes_model_and_task,
    learning_rate_is_by_kind_of_model,
    layout_divides_the_model,
    settings_fit_the_experts,
    engine_reports_its_experts,
    experts_keep_their_layout,
    gpus_have_kernels,
    weights_keep_layout_and_type,
    float8_can_be_had,
    engine_ranks_divide_the_model,
    prompts_have_room,
    run_folder_can_be_made,
    disk_holds_the_checkpoints,
    host_holds_the_run,
    names_are_not_taken,
)


def on_paper(facts: PaperFacts, config: RunConfig) -> list[Complaint]:
    """All complaints of the first layer, the worst first."""
    found = [complaint for of_settings in SETTINGS_RULES for complaint in of_settings(config)]
    found += [complaint for rule in PAPER_RULES for complaint in rule(facts, config)]
    of_gpus = on_gpus(facts.shape, config, of_ranks=facts.gpus, of_engines=facts.gpus, gpus_per_node=facts.gpus_per_node)
    return worst_first([*found, *of_gpus])


def without_model(config: RunConfig, meant: Sequence[Gpus] = ()) -> list[Complaint]:
    """What can be said of a run whose model's config.json can't be read.

    Args: config: with devices and types. meant: GPUs of machines that aren't here.
    """
    kinds = {kind.architecture for kind in meant}
    found = [complaint for rule in SETTINGS_RULES for complaint in rule(config)]
    found += half_precision_has_kernels(config, of_ranks=kinds, of_engines=kinds)
    return [*found, *(complaint for kind in meant for complaint in enough(kind, config))]


def fewer_gpus(config: RunConfig) -> str:
    """What to set so that the run asks for fewer GPUs: the numbers that multiply them, and shares where both sides can have them."""
    learner, rollout = config.learner, config.rollout
    workers = "rollout.max_workers" if rollout.is_elastic and config.ray.address is None else "rollout.workers"
    numbers: dict[str, int] = {}
    if rollout.engine.resolved_device == "cuda":
        numbers |= {workers: workers_asked(config), "rollout.engine.tensor_parallel": rollout.engine.tensor_parallel}
    if learner.resolved_device == "cuda":
        layout = ("data_parallel", "tensor_parallel", "pipeline_parallel")
        numbers |= {f"learner.{name}": getattr(learner, name) for name in layout}
    above_one = [name for name, number in numbers.items() if number > 1]
    ways = [f"lower {' or '.join(above_one)}"] if above_one else []
    on_gpus = {learner.resolved_device, rollout.engine.resolved_device} == {"cuda"}
    can_share = learner.tensor_parallel == rollout.engine.tensor_parallel == 1 and config.weight_sync.transport != "broadcast"
    if on_gpus and can_share and not engines_beside_a_rank(config):
        ways.append("have an engine and a rank share a GPU: learner.gpus_per_rank and rollout.gpus_per_worker that add up to 1")
    text = ", or ".join(ways)
    return text[:1].upper() + text[1:]


def enough(gpus: Gpus, config: RunConfig) -> list[Complaint]:
    """Complaints if there are fewer GPUs than ranks and engines ask for, or a node can't hold a tensor-parallel group."""
    learner, engine, wanted, found = config.learner, config.rollout.engine, gpus_asked(config), []
    has = f"but a node has {counted(gpus.per_node, 'GPU')}"
    if config.ray.address is None and gpus.nodes > 1:
        gpus = replace(gpus, nodes=1)
        if wanted > gpus.count:
            text = f"ray.address isn't set, so that the run has one node alone: it asks for {wanted} GPUs, and {gpus} are {gpus.count}"
            found.append(Complaint("fail", text, "Set ray.address: auto, on a node of their cluster"))
    elif wanted > gpus.count:
        found.append(Complaint("fail", f"the run asks for {counted(wanted, 'GPU')}, and {gpus} are {gpus.count}", fewer_gpus(config)))
    if learner.resolved_device == "cuda" and learner.tensor_parallel > gpus.per_node:
        text = f"learner.tensor_parallel = {learner.tensor_parallel}, {has}: a group talks in every layer"
        found.append(Complaint("fail", text, f"Set it to {gpus.per_node} or less"))
    if engine.resolved_device == "cuda" and engine.tensor_parallel > gpus.per_node:
        text = f"rollout.engine.tensor_parallel = {engine.tensor_parallel}, {has}: an engine is on one node"
        found.append(Complaint("fail", text, f"Set it to {gpus.per_node} or less"))
    elif engine.resolved_device == "cuda" and engine.tensor_parallel > 1 and wanted <= gpus.count:
        room, workers = room_for_engines([(gpus.per_node, math.inf)] * gpus.nodes, config), workers_asked(config)
        if room < workers:
            size = engine.tensor_parallel
            text = f"{workers} engines of {size} GPUs, each on one node; in addition to the learner {gpus} have room for {room}"
            found.append(Complaint("fail", text, "Lower rollout.engine.tensor_parallel or rollout.workers"))
    return found


def stop_at_failures(complaints: list[Complaint]) -> None:
    """Raises: ConfigError with all complaints that are failures."""
    if failures := [str(one) for one in complaints if one.severity == "fail"]:
        raise ConfigError("\n".join(failures))


def worst_first(complaints: list[Complaint]) -> list[Complaint]:
    return sorted(complaints, key=lambda one: get_args(Severity).index(one.severity))
