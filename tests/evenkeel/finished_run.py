"""A run of two steps that has ended before its last, as a resume finds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evenkeel.actors.checkpoints.reader import ResumePoint
from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.config import RunConfig
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.ledger import Ledger
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import CHECKPOINT_FORMAT, RunFolder
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.learner.weights.file_sums import seal
from evenkeel.recipe import as_recipe, load_config
from evenkeel.resume_point import find_resume_point, run_recipe, with_absolute_paths, with_settings
from evenkeel.rollout.trajectory import UnfinishedGroup
from tests.actors.cases import at_hand, group, prompt, prompts, snapshot_of
from tests.e2e.launch import RECIPE
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer


def state(step: int) -> TrainingState:
    """One group trained in each step; two more under way, of which the older is finished, and the younger begun."""
    return TrainingState(step, step, 1.0, snapshot_of(book(step)), {}, {})


def book(step: int) -> GroupBook:
    found = GroupBook(groups_per_step=1, max_staleness=1)
    for version in range(step):
        for ticket in found.admit(prompts(version, version + 1), now=0.0):
            found.finish(at_hand(group(ticket)), now=0.0)
        found.settle(version + 1, version + 1, [g.group_id for g in found.draw(version, 1)], now=0.0)
    older, younger = found.admit(prompts(step, step + 2), now=0.0)
    found.finish(at_hand(group(older)), now=0.0)
    found.waits(younger.group_id, so_far=UnfinishedGroup(younger.group_id, group(younger).trajectories))
    return found


def make_finished_run(base: Path) -> Path:
    """Its folder, of two steps, each with a checkpoint, made by what makes a run's."""
    from tests.learner.learner_cases import learner_on

    (base / "model").mkdir()
    model = save_tiny_model(save_tiny_tokenizer(base / "model"))
    with RunFolder.create(base / "run", "x") as folder, learner_on(model) as learner:
        devices = [f"{section}.device=cpu" for section in ("learner", "rollout.engine", "init.learner")]  # a run's folder has them decided
        config = load_config(RunConfig, RECIPE, [f"model={model}", "steps=9", "groups_per_step=1", *devices])
        give(folder, config)
        ledger = Ledger(folder.path / "ledger.jsonl")
        for step in (1, 2):
            folder.append_metrics(StepMetrics(step))
            ledger.hand_out(one.prompt_id for one in (prompts(0, 3) if step == 1 else prompts(step + 1, step + 2)))
            ledger.settle(step, trained=[prompt(step - 1).prompt_id], discarded=[], contents=book(step).contents())
            ledger.compare(book(step).contents())
            with folder.checkpoint(step) as checkpoint:
                learner.save(checkpoint.state / "learner")
                learner.save_hf(checkpoint.hf)
                replace(state(step), ledger=ledger.flush(), data="0f").save(checkpoint.state)
    return base / "run"


def give(folder: RunFolder, config: RunConfig) -> RunConfig:
    """Have the folder hold this recipe, and what a machine without a GPU makes of it, apart from the model. Returns: the latter."""
    config = with_absolute_paths(config)
    folder.write_recipe(as_recipe(config))
    folder.write_config(ran := with_devices(config, has_gpu=False))
    return ran


def give_words(folder: RunFolder, *overrides: str) -> RunConfig:
    """The same with these settings in addition to what it was given."""
    return give(folder, run_recipe(folder, overrides).config)


def hasty(config: RunConfig, checkpoint_s: float = 0.1) -> RunConfig:
    """The same with this deadline of a checkpoint, three times of which the run folder's disk has."""
    return config.model_copy(update={"deadlines": config.deadlines.model_copy(update={"checkpoint_s": checkpoint_s})})


def resumed(folder: RunFolder, overrides: Sequence[str], *, discard_groups: bool = False) -> ResumePoint:
    """Where a resume on a machine without a GPU goes on, once all that it runs with is derived."""
    found = find_resume_point(folder, overrides)
    assert found.point is not None
    config = with_devices(found.recipe.config, has_gpu=False)
    return with_settings(folder, found.point, found.recipe, config, discard_groups=discard_groups)


def keep_in_checkpoint(folder: RunFolder, config: RunConfig) -> None:
    """Have the newest checkpoint hold these settings, as those that it was sampled with. Args: config: resolved."""
    checkpoint = folder.checkpoints()[-1]
    (state_file,) = checkpoint.state.glob("controller.json")
    state_file.write_text(json.dumps(json.loads(state_file.read_text()) | {"settings": config.model_dump(mode="json")}))
    (checkpoint.path / "manifest.json").unlink()
    seal(checkpoint.path, {"format": CHECKPOINT_FORMAT, "step": checkpoint.step})
