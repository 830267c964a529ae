"""`evenkeel train RECIPE --smoke`: one step of a run as the recipe has it, on a model of two layers, in a folder that is then removed.

All of it is the real code: checks, Ray, ranks, engines, tokenizer, task, reward, step, weight sync with its probe, checkpoint, evaluations.
Made up are the weights, which are random, and with them the answers, which mostly go on until rollout.sampling.max_tokens.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenkeel.actors.cluster.hub import outline_folder
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.step_metrics import shown
from evenkeel.actors.record.run_folder import RunFolder, fresh_path
from evenkeel.correction.errors import counted
from evenkeel.doctor.memory_rules import gib
from evenkeel.engines.contract import expert_count
from evenkeel.learner.hf.folder import read_json, side_files
from evenkeel.learner.hf.tensor_files import save_model
from evenkeel.plan.shape import ModelShape
from evenkeel.resume_point import recipe_of, with_absolute_paths
from evenkeel.training import train_run

LAYERS = 2
_PROBLEMS = 8
_SEED = 7


def smoke_run(recipe: Path, overrides: Sequence[str], say: Callable[[str], object]) -> int:
    """Make the model and the step, and say what passed. What fails keeps its folder, and the error names it.

    Returns: exit status: 0, or 1 if the probe says that an engine doesn't compute what the learner does; that of a run which ended early.
    Raises: as ModelShape.read and train_run.
    """
    config = with_absolute_paths(recipe_of(recipe, overrides).config)
    outline, _ = outline_folder(config.model)
    ModelShape.read(outline)  # which says what is wrong with a folder, or with the family
    content = cut_config(read_json(outline / "config.json"), config)
    folder = fresh_path(config.run_dir.parent if config.run_dir else Path("runs").absolute(), f"smoke-{config.name}")
    model, run = folder / "model", folder / "run"
    try:
        say(f"making a model of {counted(content['num_hidden_layers'], 'layer')} as wide as {config.model}, with random weights")
        make_model(model, outline, content)
        summary = train_run(recipe, [*overrides, *_settings(config, model, run)], None, stays=False)
        if summary.steps < 1:
            say(f"smoke: ended before its step. All of it is in {folder}")
            return summary.exit_code or 1
        lines, is_healthy = _passed(RunFolder.view(run), config)
    except BaseException as error:
        if folder.exists():
            error.add_note(f"smoke: it failed, and all of it is in {folder}")
        raise
    say("\n".join(lines))
    if not is_healthy:
        say(f"smoke: engine and learner differ by more than rounding explains (the warning above). All of it is in {folder}")
        return 1
    shutil.rmtree(folder)
    say(f"smoke: passed; {folder} is removed")
    return 0


def cut_config(content: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """The model's config.json with two layers, or one for each of the learner's stages, and the fewest experts that both sides can divide.
    Widths, vocabulary and context stay."""
    cut, learner = dict(content.get("text_config", content)), config.learner
    cut["num_hidden_layers"] = layers = max(LAYERS, learner.pipeline_parallel * learner.virtual_pipeline)
    if "layer_types" in cut:
        cut["layer_types"] = list(cut["layer_types"])[:layers]
    for key in ("num_experts", "num_local_experts"):
        if expert_count(cut["model_type"], cut.get(key)):
            ranks = math.lcm(learner.expert_parallel, config.rollout.engine.expert_parallel)
            cut[key] = min(cut[key], -(-2 * cut["num_experts_per_tok"] // ranks) * ranks)
    return cut


def make_model(folder: Path, outline: Path, content: Mapping[str, Any]) -> None:
    """Write a model's folder: the tokenizer and all else of another one, this config, and random weights in which every layer counts:
    matrices preserve the scale of activations, and weights of norms differ from 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    folder.mkdir(parents=True)
    for name, data in side_files(outline).items():
        (folder / name).write_bytes(data)
    kind, others = content["model_type"], {key: value for key, value in content.items() if key != "model_type"}
    with no_init_weights():  # each value is drawn once: a model of 8B's widths has 1.6 billion here
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **others), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.tie_weights()  # left out with the initialisation
    torch.manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=1.0, std=0.1)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    save_model(model, folder)


def _settings(config: RunConfig, model: Path, run: Path) -> list[str]:
    """What the step has instead of the recipe's: as few groups as the learner can divide, few questions, and nothing that ends or reports
    it elsewhere."""
    learner, sampling = config.learner, config.rollout.sampling
    groups = learner.optimizer_steps_per_batch * max(1, -(-learner.data_parallel // sampling.samples_per_group))
    return [
        f"model={model}",
        f"run_dir={run}",
        "steps=1",
        f"groups_per_step={min(groups, config.groups_per_step)}",
        f"evaluation.problems={min(_PROBLEMS, config.evaluation.problems)}",
        "dynamic_sampling=false",
        "monitor.on_alarm=none",
        "monitor.preset=null",
        "metrics.views=[tensorboard]",
    ]


def _passed(run: RunFolder, config: RunConfig) -> tuple[list[str], bool]:
    """What the step has shown, a line for each part; whether no probe was beyond its limits."""
    (step,) = run.each_step(lambda _: True)
    events = run.read_events()
    first = [event.text for event in events if "sampled its first group" in event.text]
    rows = {
        "learner": f"{counted(config.learner.world_size, 'rank')} up",
        "engines": f"{step['pool/workers']:.0f} of {config.rollout.workers} up. {first[0][:1].upper()}{first[0][1:]}" if first else "up",
        "step": f"{shown(step, 'time/train_s')}, gradient's norm {shown(step, 'learner/grad_norm')}, reward {shown(step, 'reward/mean')}",
        "sync": f"{gib(step['sync/bytes'])} to {counted(int(step['sync/receipts']), 'engine')} in {shown(step, 'time/sync_s')}",
        "probe": f"engine and learner differ by up to {shown(step, 'sync/probe_max_abs_difference')}",
    }
    is_healthy = not any(event.level == "warning" and "weight_sync.max_probe_difference" in event.text for event in events)
    return [f"{name:<9}{text}" for name, text in rows.items()], is_healthy
