"""`evenkeel doctor`: what would fail, said before anything starts; `train` asks the same rules.

Of a model it shows what its files say of where prompts and answers end; a run, an evaluation, a filter and a warm-up go by the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evenkeel.actors.cluster.address import NoClusterError
from evenkeel.actors.cluster.hub import outline_folder
from evenkeel.actors.config import HubName, RunConfig
from evenkeel.actors.processes.disk import by_disk_at_start
from evenkeel.actors.settings.devices import visible_gpus
from evenkeel.actors.settings.resolve import asks_for_gpus, kept, refusals, with_engine_types
from evenkeel.correction.errors import ConfigError, EvenkeelError, counted
from evenkeel.doctor.facts import Complaint, NodeFacts, PaperFacts, Severity
from evenkeel.doctor.gather import home_of_run, nodes_of_cluster, own_machine
from evenkeel.doctor.on_nodes import Request, on_nodes, requests
from evenkeel.doctor.on_paper import enough, on_paper, worst_first
from evenkeel.doctor.start_checks import check_on_paper_or_refuse
from evenkeel.doctor.surroundings import check_surroundings
from evenkeel.learner.hf.folder import read_config
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import check_is_model
from evenkeel.rollout.config import FileTask, RolloutConfig
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from evenkeel.rollout.tasks.chat import ChatEncoder

UNFIT = 1
"""Exit code when something can't work."""
_COLOURS: dict[Severity, str] = {"fail": "bold red", "warn": "yellow", "note": "dim"}


def summary(complaints: Sequence[Complaint]) -> str:
    """A sentence for the last line."""
    fails = sum(one.severity == "fail" for one in complaints)
    warns = sum(one.severity == "warn" for one in complaints)
    if fails:
        return f"{counted(fails, 'failure')}: the run can't work like this"
    return f"ready, with {counted(warns, 'warning')}" if warns else "ready"


def show(console: Console, complaints: Sequence[Complaint], rows: Sequence[Request]) -> None:
    """Print the table of resources, then the complaints in the order given, and the summary."""
    if rows:
        console.print(table_of(rows))
    for one in complaints:
        console.print(f"[{_COLOURS[one.severity]}]{one.severity}[/]  {escape(str(one))}")
    console.print(summary(complaints))


def table_of(rows: Sequence[Request]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("resource", "asked", "there", "free", "for"):
        table.add_column(name, justify="left" if name in ("resource", "for") else "right")
    for row in rows:
        table.add_row(row.kind, f"{row.asked:g}", f"{row.there:g}", f"{row.free:g}", row.parts)
    return table


def in_json(complaints: Sequence[Complaint], rows: Sequence[Request]) -> dict[str, Any]:
    """The same as JSON, for programs."""
    return {
        "summary": summary(complaints),
        "findings": findings(complaints),
        "resources": [asdict(row) for row in rows],
    }


def findings(complaints: Sequence[Complaint]) -> list[dict[str, str]]:
    return [{"level": one.severity, "sentence": one.sentence, "setting": one.setting[:1].upper() + one.setting[1:]} for one in complaints]


def doctor(
    target: Annotated[
        Path, typer.Argument(metavar="RECIPE|RUN_DIR|MODEL", help="Recipe (YAML) of a run to be started, the folder of one, or a model's.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.")] = None,
    gpus: Annotated[
        str, typer.Option(metavar="NAMExCOUNT", help="Check the recipe for these GPUs, such as H100x8 or H100x8x4, instead of those here.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    task: Annotated[
        str, typer.Option(metavar="RECIPE|DATA_SET", help="Of a model: show this task's first prompt, and how long its prompts may be.")
    ] = "",
) -> None:
    """Say what is in a run's way before it is started; or, of a run's folder, what happened to the run.

    It first checks what follows from the recipe and the model folder: memory of each GPU, layouts, dtypes, disk, what the learner can't
    train. It reads the questions of the task, has the reward function score one of them, and looks whether ports and packages are there.
    Then it checks the nodes, this machine or, by a small task on each, those of the cluster at ray.address: GPUs, versions, folders, shared
    memory. With --gpus it makes the first part alone, from config.json, for GPUs that aren't here.
    `evenkeel train` makes the same checks, and stops at what can't work.

    For a model's folder, or hf:NAME, it shows what tokenizer, chat template and configs say: the tokens that end an answer, how long
    prompts and answers may be, and the prompt of a question with its system turn and special tokens.

    For a run's folder it says how the run ended, what it waited for, which part was slow or gone, whether all prompts are accounted for,
    and what to do.

    Exit codes: 0 nothing stands in the way; 1 something can't work, or the recipe can't be read.
    """
    if by_disk_at_start(partial(_is_model, target), f"{target}, to be opened", disk="its disk"):
        _show_model(target, task, overrides or [])
        return
    if task:
        raise ConfigError(f"evenkeel doctor {target}: --task goes with a model's folder, and this is none")
    if by_disk_at_start(target.is_dir, f"{target}, to be opened", disk="its disk"):
        options = {"--gpus": gpus, "--json": as_json}
        typer.echo(_of_run(target, [*(overrides or []), *(name for name, value in options.items() if value)]))
        return
    if target.suffix not in (".yaml", ".yml") and not target.exists():
        raise ConfigError(f"{target}: there is no such recipe file or run folder")
    from evenkeel.recipe import load_config

    config = load_config(RunConfig, target, overrides or [])
    complaints, rows = _found(config, gpus)
    if as_json:
        typer.echo(json.dumps(in_json(complaints, rows), indent=2, allow_nan=False))
    else:
        show(Console(highlight=False, soft_wrap=not sys.stdout.isatty()), complaints, rows)
    if any(one.severity == "fail" for one in complaints):
        raise typer.Exit(UNFIT)


def _is_model(target: Path) -> bool:
    """A name of the hub, or a folder that isn't a run's."""
    return HubName.of(target) is not None or ((target / "config.json").exists() and not (target / "config.yaml").exists())


def _show_model(target: Path, task: str, overrides: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, text in model_page(target, task, overrides):
        console.print(f"[dim]{name:<16}[/]{text}")


def _of_run(folder: Path, overrides: list[str]) -> str:
    from evenkeel.actors.record.run_folder import RunFolder
    from evenkeel.doctor.run_doctor import diagnose_run, page

    if overrides:
        raise ConfigError(f"{folder}: a run's folder has its recipe; leave out {' '.join(overrides)}")
    view = by_disk_at_start(lambda: RunFolder.view(folder), f"{folder}, to be opened")
    return page(diagnose_run(view))


def _found(config: RunConfig, gpus: str) -> tuple[list[Complaint], list[Request]]:
    if not gpus:
        return _found_here(config)
    kind = Gpus.parse(gpus)
    found = check_on_paper_or_refuse(config, has_gpu=True, meant=[kind])
    if isinstance(found, list):
        return found, []
    config, facts = found
    return worst_first(on_paper(facts, config) + enough(kind, config)), []


def _found_here(config: RunConfig) -> tuple[list[Complaint], list[Request]]:
    """On this machine, or on the cluster at ray.address; of one that can't be joined the refusal, and what is known without it."""
    from evenkeel.resume_point import with_absolute_paths

    config = with_absolute_paths(config)  # as train names them
    refused: list[Complaint] = []
    has_gpu = False
    try:
        check_surroundings(config)
        has_gpu = _has_gpu(config)
    except ConfigError as error:
        refused = [Complaint.refusal(error)]
        if not isinstance(error, NoClusterError) or asks_for_gpus(config):
            return refused, []  # the rest depends on whether there are GPUs
    if undecided := list(map(Complaint.refusal, refusals(config, has_gpu=has_gpu))):
        return refused + undecided, []
    found = check_on_paper_or_refuse(config, has_gpu=has_gpu)
    if isinstance(found, list):
        return worst_first(refused + found + _of_inputs(config, has_model=False)), []
    config, facts = found
    told = on_paper(facts, config) + _of_inputs(config)
    try:
        nodes = None if refused else _nodes(config, facts)
    except NoClusterError as error:
        nodes, refused = None, [Complaint.refusal(error)]
    if nodes is None:
        return worst_first(refused + told), []
    return worst_first(told + on_nodes(nodes, config, facts.shape)), requests(nodes, config)


def _of_inputs(config: RunConfig, *, has_model: bool = True) -> list[Complaint]:
    """What `train` says of all else that a run is given, by the same function. Args: has_model: its config.json could be read."""
    from evenkeel.actors.record.run_folder import RunFolder
    from evenkeel.preparation import check_inputs, outline  # with transformers, which takes seconds

    lacking: list[EvenkeelError] = []
    model: Path | None = None
    if has_model:
        with kept([]):  # that no prompt has room, which the rules have
            for entry in config.rollout.entries:
                config.rollout.longest_prompt(entry)
            with kept(lacking):
                model, _ = outline(config)
    found = check_inputs(config, model, lacking=lacking).found
    if config.run_dir is not None:
        with kept(lacking):
            by_disk_at_start(partial(RunFolder.check_free, config.run_dir), "the folder of a new run")
    return [*map(Complaint.refusal, lacking), *found]


def _has_gpu(config: RunConfig) -> bool:
    """Whether there is a GPU, as cluster.gpus_there, but of a run on this machine without importing Ray."""
    if config.ray.address is None:
        return visible_gpus() > 0
    from evenkeel.actors.cluster.cluster import gpus_there

    return gpus_there(config, tries=1) > 0


def _nodes(config: RunConfig, facts: PaperFacts) -> list[NodeFacts]:
    if config.ray.address is None:
        return own_machine(config)
    from evenkeel.actors.cluster.cluster import Cluster

    with Cluster(config, tries=1):
        return nodes_of_cluster(config, None if facts.closed_folder else home_of_run(config))


_QUESTION = "What is 17 + 25?"
# A task's settings of prompts, where there is no task.
_BARE = FileTask(path=Path("none"))


def model_page(target: Path, task: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What there is to know, as (name, text in rich's markup); a line that goes on with the one before has no name.

    Args:
        target: model folder, or a name of the hub.
        task: a recipe's path or the name of a reasoning-gym data set, for its settings and its first question; empty: a question made up.
        overrides: "dotted.key=value" over the task's.
    Raises: DataError, ConfigError.
    """
    from evenkeel.rollout.tasks.chat import ChatEncoder  # with its readers of files, which help doesn't need
    from evenkeel.task_config import DISK_OR_HUB, questions, task_config

    if overrides and not task:
        raise ConfigError(f"evenkeel doctor {target} {overrides[0]}: of a model alone there is nothing to set; add --task RECIPE")
    folder, _ = by_disk_at_start(partial(outline_folder, target), f"config and tokenizer of {target}", disk=DISK_OR_HUB, computes=True)
    check_is_model(folder)
    shape = read_config(folder).get_text_config()
    rollout, prompt, from_where = None, None, "a question that is made up; --task RECIPE shows the first of a task"
    if task:
        config = task_config(folder, task, overrides, problems=1)
        rollout = with_engine_types(config, has_gpu=visible_gpus() > 0).rollout.with_context(shape.max_position_embeddings)
        entry, encoders = rollout.entries[0], ChatEncoder.of_entries(folder, rollout, is_limited=True)
        encoder = encoders[entry.name]
        made = questions(entry.task, config.deadlines.start_s, encoder)
        prompt, from_where = made.train_prompt(0).token_ids, f"the first training question of {made.name}"
    else:
        encoder = ChatEncoder.of_folder(folder, _BARE)
    yield "model", f"{escape(str(target))}: {shape.model_type}, context of {shape.max_position_embeddings} tokens"
    yield from _ends(encoder)
    yield from _lengths(rollout, shape.max_position_embeddings)
    ids = prompt or encoder.encode(_QUESTION)
    yield "prompt", escape(f"{counted(len(ids), 'token')}, special ones in brackets: {from_where}")
    yield from (("", line) for line in _marked(encoder, ids).split("\n"))


def _ends(encoder: ChatEncoder) -> Iterator[tuple[str, str]]:
    for token, names in encoder.ends.sources.items():
        yield "answers end at", f"[bold]{escape(encoder.name_of(token))}[/] ({token}): {', '.join(names)}"
    assert encoder.ends.of_turn is not None
    yield "turns end with", f"[bold]{escape(encoder.name_of(encoder.ends.of_turn))}[/], as do a warm-up's demonstrations"
    if encoder.remark is not None:
        yield "", escape(encoder.remark)


def _lengths(rollout: RolloutConfig | None, model_context: int) -> Iterator[tuple[str, str]]:
    engine = rollout.engine if rollout is not None else EngineConfig().with_context(model_context)
    together, prompt = engine.lengths.together, engine.lengths.prompt
    yield "lengths", f"prompt and answer at most {together} tokens together, a prompt at most {prompt}: {engine.room_text}"
    if rollout is not None:
        longest = rollout.longest_prompt(rollout.entries[0])
        yield "", f"rollout.sampling.max_tokens = {rollout.sampling.max_tokens} leaves {longest} for a prompt"


def _marked(encoder: ChatEncoder, ids: Sequence[int]) -> str:
    """The prompt, as rich's markup: special tokens in brackets of their own."""
    special = {number for number, token in encoder.tokenizer.added_tokens_decoder.items() if token.special}
    text = ""
    for is_special, run in groupby(ids, key=lambda token: token in special):
        if is_special:
            text += "".join(f"[reverse]{escape(f'⟦{encoder.name_of(token)}⟧')}[/]" for token in run)
        else:
            text += escape(str(encoder.tokenizer.decode(list(run), clean_up_tokenization_spaces=False)))
    return text
