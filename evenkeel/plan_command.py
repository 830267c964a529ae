"""`evenkeel plan`: what a run would need, on GPUs that need not be here, as rows of text and as numbers for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import counted
from evenkeel.correction.settings.schedule import needs_logprobs_at_sampling
from evenkeel.doctor.facts import Complaint, PaperFacts
from evenkeel.doctor.memory_rules import gib, rank_options
from evenkeel.doctor.on_paper import enough, on_paper, worst_first
from evenkeel.doctor.start_checks import check_on_paper_or_refuse
from evenkeel.doctor_command import UNFIT, findings, show
from evenkeel.learner.model_fit import layout_obstacles
from evenkeel.plan.hosts import HostMemory, Traffic, hosts, traffic
from evenkeel.plan.layouts import Gpus, Layout, layouts
from evenkeel.plan.memory import RESERVE, EngineMemory, RankMemory, engine_memory, rank_memory

_SHOWN_LAYOUTS = 8


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run needs, on GPUs that need not be there."""

    gpus: Gpus
    parameters: int
    tensors: int
    rank: RankMemory | None
    """None if the layout doesn't divide the model."""
    engine: EngineMemory
    moved: Traffic
    hosts: tuple[HostMemory, ...]
    layouts: tuple[Layout, ...]
    complaints: tuple[Complaint, ...]


def make_plan(facts: PaperFacts, config: RunConfig, gpus: Gpus, complaints: Sequence[Complaint]) -> RunPlan:
    """Args: config: with devices and types, for GPUs; complaints: of the doctor's rules."""
    learner, shape = config.learner, facts.shape
    options = rank_options(config)
    rank = None if any(layout_obstacles(learner, shape.sizes)) else rank_memory(shape, learner, **options)
    engine = engine_memory(shape, config.rollout, gpus.memory)
    share = int(gpus.memory * learner.gpus_per_rank)
    others = layouts(shape, learner, learner.world_size, share, **options, gpus_per_node=gpus.per_node)
    moved = traffic(shape, config)
    of_hosts = tuple(hosts(shape, config, gpus_per_node=gpus.per_node, nodes=gpus.nodes, gpu_bytes=gpus.memory))
    return RunPlan(gpus, shape.parameters, shape.tensors, rank, engine, moved, of_hosts, tuple(others), tuple(complaints))


def sections(plan: RunPlan, config: RunConfig) -> dict[str, list[tuple[str, str]]]:
    """Title -> (what, how much)."""
    learner, rollout = config.learner, config.rollout
    ranks = f"{counted(learner.world_size, 'rank')}"
    engines = f"{rollout.workers}" + (f" (up to {rollout.most_workers})" if rollout.is_elastic else "")
    engines += f" of {rollout.engine.tensor_parallel} GPUs" if rollout.engine.tensor_parallel > 1 else ""
    head = f"{plan.parameters / 1e9:.2f}B parameters in {plan.tensors:,} tensors; {plan.gpus}"
    return {
        f"{config.model.name}: {head}": [("batch", config.batch_arithmetic()), *_of_earlier_weights(config)],
        f"learner: {ranks}, {learner.dtype}": _of_rank(plan, config),
        f"engines: {engines}, {rollout.engine.dtype}": _of_engine(plan, config),
        "outside the GPUs": [
            ("one version of the weights", gib(plan.moved.version)),
            ("object store", f"{gib(plan.moved.store)}: two versions and two batches of {gib(plan.moved.batch)} each at most"),
            ("checkpoint", f"{gib(plan.moved.checkpoint)}; {config.checkpoint.keep} are kept"),
        ],
        "memory of the hosts": [row for one in plan.hosts for row in _of_host(one)],
        f"layouts of {ranks}": _of_layouts(plan, config),
    }


def _of_earlier_weights(config: RunConfig) -> list[tuple[str, str]]:
    """What it costs to tell mismatch and staleness apart in every batch."""
    if not (config.max_staleness and needs_logprobs_at_sampling(config.correction)):
        return []
    words = (
        f"a forward pass over a trajectory for each earlier version among its tokens, at most {config.max_staleness}: free while the "
        f"learner waits for rollouts, else in addition to the step (time/split_s); {counted(config.earlier_weights, 'earlier version')} "
        "in each rank's host memory, see below"
    )
    return [("mismatch apart", words)]


def _of_rank(plan: RunPlan, config: RunConfig) -> list[tuple[str, str]]:
    if plan.rank is None:
        return [("", "the layout doesn't divide the model, see below")]
    rank, share = plan.rank, plan.gpus.memory * config.learner.gpus_per_rank
    parts = {"weights": rank.weights, "gradients": rank.gradients, "optimizer": rank.optimizer}
    if rank.has_peak_with_other_weights:
        parts |= {"other weights": rank.other, "forward pass with them": rank.forward}
    else:
        parts |= {"activations": rank.activations, "head": rank.head, "layer's backward pass": rank.layer}
    rows = [(name, gib(size)) for name, size in (parts | {"reserve": RESERVE}).items() if size]
    return [*rows, ("together", f"{gib(rank.with_reserve)} of {gib(share)}")]


def _of_engine(plan: RunPlan, config: RunConfig) -> list[tuple[str, str]]:
    engine, most = plan.engine, config.rollout.engine.max_running_requests
    ranks = config.rollout.engine.tensor_parallel
    each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    return [
        ("weights", gib(engine.weights) + each),
        ("KV cache", f"{gib(max(0, engine.cache))}{each}: {engine.tokens:,} tokens"),
        ("in addition", f"{gib(engine.outside_cache)} for context, activations, graphs and sampler"),
        ("requests", f"{engine.longest_requests} of {engine.request_tokens:,} tokens; {most} at most"),
    ]


def _of_layouts(plan: RunPlan, config: RunConfig) -> list[tuple[str, str]]:
    """The first layouts, and the recipe's own, which is marked. Where it has the words of another one, the settings in which it differs are
    added."""
    learner, rows = config.learner, []
    first = list(plan.layouts[:_SHOWN_LAYOUTS])
    if plan.rank is not None and all(one.changes(learner) for one in first):
        first.append(Layout(learner, plan.rank, int(plan.gpus.memory * learner.gpus_per_rank)))
    for one in first:
        words = str(one)
        if not one.changes(learner):
            namesake = next((other for other in plan.layouts if str(other) == words), one)
            words = " ".join(filter(None, (words, one.changes(namesake.config), "(the recipe's)")))
        rows.append((f"{'fits' if one.fits else 'too large'}, {gib(one.memory.with_reserve)}", words))
    return rows


def _of_host(host: HostMemory) -> list[tuple[str, str]]:
    return [(host.node, gib(host.total)), *((f"  {what}", gib(size)) for what, size in host.parts.items() if size)]


def in_numbers(plan: RunPlan) -> dict[str, Any]:
    """The plan as plain numbers, for `--json`: bytes. `rank` is None if the layout doesn't divide the model."""
    engine = asdict(plan.engine)
    return {
        "gpus": str(plan.gpus),
        "parameters": plan.parameters,
        "tensors": plan.tensors,
        "rank": {**asdict(plan.rank), "reserve": RESERVE, "total": plan.rank.with_reserve} if plan.rank else None,
        "engine": {**engine, "tokens": plan.engine.tokens, "longest_requests": plan.engine.longest_requests},
        "traffic": asdict(plan.moved),
        "hosts": [{"node": one.node, "total": one.total, "parts": one.parts} for one in plan.hosts],
        "layouts": [{"layout": str(one), "bytes": one.memory.with_reserve, "fits": one.fits} for one in plan.layouts],
        "findings": findings(plan.complaints),
    }


def plan(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) of the run that is meant; of its model only config.json is read.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.")] = None,
    gpus: Annotated[
        str, typer.Option(metavar="NAMExCOUNT[xNODES]", help="GPUs to plan for, such as H100x8, H200x8x4 or 24GBx1.")
    ] = "H100x8",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, in bytes.")] = False,
) -> None:
    """Say what a run would need, without a GPU: memory by role, requests that fit, bytes of a version and a checkpoint, other layouts.

    Weights, gradients and optimizer are counted, activations are what autograd keeps of the learner's layers. What would be refused
    is said as `evenkeel doctor` says it.

    Exit codes: 0 there is a plan, whatever is said of it; 1 the recipe or the model's config.json leaves nothing to plan with.
    """
    from evenkeel.recipe import load_config

    kind, console = Gpus.parse(gpus), Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    found = check_on_paper_or_refuse(load_config(RunConfig, recipe, overrides or []), has_gpu=True, meant=[kind])
    if isinstance(found, list):
        if as_json:
            typer.echo(json.dumps({"gpus": str(kind), "findings": findings(found)}, indent=2, allow_nan=False))
        else:
            show(console, found, [])
        raise typer.Exit(UNFIT)
    config, facts = found
    complaints = worst_first(on_paper(facts, config) + enough(kind, config))
    made = make_plan(facts, config, kind, complaints)
    if as_json:
        typer.echo(json.dumps(in_numbers(made), indent=2, allow_nan=False))
        return
    for title, rows in sections(made, config).items():
        console.print(f"[bold]{escape(title)}[/]")
        table = Table(box=None, show_header=False, pad_edge=False)
        for what, text in rows:
            table.add_row(f"  {what}", escape(text))
        console.print(table)
    show(console, complaints, [])
