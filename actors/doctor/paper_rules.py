"""Rules of the first layer: whether the recipe fits the model's config.json and the size of a GPU. No cluster is needed.

Each rule is a function of (facts, config) that yields complaints; the config has devices and types (actors/settings/derived.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

from actors.config import RunConfig
from actors.doctor.facts import Complaint, PaperFacts, Severity
from actors.doctor.kernel_rules import experts_stay_as_sent, half_precision_has_kernels, weights_stay_as_sent
from actors.doctor.memory_rules import gib, on_gpus
from actors.plan.gpus import Gpus
from actors.plan.host_memory import OF_ENGINES, OF_LEARNER, hosts
from actors.plan.traffic import checkpoint_bytes
from actors.settings.derived import RATE_PRETRAINED
from actors.settings.devices import check_types, engines_beside_a_rank, gpus_asked, room_for_engines, unfit_shares, workers_asked
from correction.engines.float8_format import BLOCK
from correction.errors import ConfigError, counted
from learner.model_fit import layout_obstacles, setting_obstacles
from rollout.engine_settings import engine_ranks
from rollout.engine_settings.engine_arguments import unknown
from rollout.engine_settings.engine_ranks import UNREPORTED_ROUTES

PaperRule = Callable[[PaperFacts, RunConfig], Iterator[Complaint]]
SettingsRule = Callable[[RunConfig], Iterator[Complaint]]
"""Of settings alone, so that it can be applied before anything is known of the model."""
FLOAT8_FAMILIES = ("qwen3", "qwen3_moe", "mixtral", "olmoe")
"""By model_type: an engine's weights were compared with those that it was sent. SGLang's loader of Llama leaves out the scales."""
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
    if not learner.is_given("learning_rate"):
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
    try:
        _ = config.rollout.longest_prompt
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
    """For one machine. A failure if what a CPU holds all the time is too much: weights, gradients and optimizer."""
    if facts.host_bytes is None:
        return
    (host,) = hosts(facts.shape, config, gpus_per_node=gpus_asked(config), nodes=1, gpu_bytes=min(facts.gpus, default=0))
    if host.total > facts.host_bytes:
        outside = " outside its GPUs" if "cuda" in (config.learner.resolved_device, config.rollout.engine.resolved_device) else ""
        text = f"the run takes up to {gib(host.total)} of the {gib(facts.host_bytes)} that this machine or container has{outside}: {host}"
        engines = host.parts[OF_ENGINES] * config.rollout.workers / config.rollout.most_workers  # an elastic pool need not grow
        is_certain = host.parts[OF_LEARNER] + engines > facts.host_bytes
        yield Complaint("fail" if is_certain else "warn", text, f"Take a smaller model. {LESS}" if is_certain else LESS)


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
