"""Held-out accuracy of a model folder, without Ray: one SGLang engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.progress import Progress

from evenkeel.actors.cluster.hub import model_folder
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.evaluation import evaluate
from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.metrics.held_out import Evaluation, cut_remark
from evenkeel.actors.metrics.step_metrics import StepMetrics, shown
from evenkeel.actors.settings.devices import check_engine_device, visible_gpus
from evenkeel.actors.settings.resolve import refuse_contradictions_of_engines, with_engine_types
from evenkeel.correction.errors import DataError
from evenkeel.doctor.start_checks import check_model_folder
from evenkeel.doctor.surroundings import check_surroundings_of_engine
from evenkeel.learner.hf.folder import read_config
from evenkeel.rollout.config import AnswerSampling, RolloutConfig, named
from evenkeel.rollout.engine.temporary_files import passing_folder
from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.sampler import Sampler
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.mixture import Mixture, first_of_each
from evenkeel.rollout.tasks.tasks import check_task_names
from evenkeel.rollout.trajectory import Prompt, Trajectory
from evenkeel.task_config import mixture, task_config


def evaluate_folder(
    model: Path,
    task: str,
    overrides: Sequence[str],
    *,
    problems: int,
    samples: Path | None,
    say: Callable[[str], None],
) -> Evaluation:
    """Ask held-out questions and print the accuracy.

    Args:
        model: Hugging Face folder, or a name of the hub.
        task: a recipe's path, or the name of a reasoning-gym data set, which is scored by its own scorer.
        overrides: "dotted.key=value" over the recipe, or over what is made up around a name.
        samples: text file for the answers.
    Raises: DataError, ConfigError, EngineError.
    """
    model = model_folder(model)
    config = task_config(model, task, overrides, problems=problems)
    refuse_contradictions_of_engines(config)
    config = with_engine_types(config, has_gpu=visible_gpus() > 0)
    built, rollout = tasks_for(config)
    prompts = first_of_each(built.held_out_prompts(), problems)
    for entry in rollout.entries:
        its, asked = built.tasks[entry.name], sum(task_of(prompt.prompt_id) == entry.name for prompt in prompts)
        if not asked:
            raise DataError(
                f"{its.name}: no question fits into the {rollout.longest_prompt(entry)} tokens that rollout.sampling.max_tokens = "
                f"{rollout.sampling_of(entry.name).max_tokens} leaves of the context of {model}; lower it, or take a model with a longer "
                "context"
            )
        if asked < problems:
            say(f"only {asked} of {problems} questions: {its.held_out_shortage(problems)}")
    for remark in dict.fromkeys(filter(None, (its.remark for its in built.tasks.values()))):
        say(remark)
    how = config.evaluation
    with Progress(transient=True) as progress:
        bar = progress.add_task("starting the engine", total=len(prompts) * how.samples)
        asker = Asker(config.rollout, model, config.seed, lambda answers: progress.update(bar, advance=answers, description="answering"))
        result = asyncio.run(_evaluate(asker, prompts, config))
    say(f"held-out accuracy of {model}: {result.accuracy} (95% Wilson, {how.description}), {result.failed} answers could not be scored")
    for name, one in result.by_task.items():
        say(f"{name}: {one}")
    numbers = StepMetrics(result.step, result.metrics())
    parts = ["held_out/reward", "held_out/response_tokens", "held_out/truncated_share"]
    parts += ["held_out/turns"] * (numbers["held_out/turns"] != 1)
    told = ", ".join(f"{CATALOGUE[name].label} {shown(numbers, name)}" for name in parts)
    say(f"{told} ({config.rollout.limit_of_answers})")
    for k, share in result.pass_at.items():
        say(f"pass@{k}: {share}")
    if (cut := cut_remark(result.trajectories, config.rollout.limit_of_answers)) is not None:
        say(cut)
    if samples is not None:
        samples.write_text(result.text(prompts, limit=len(prompts)), encoding="utf-8", errors="backslashreplace")
        say(f"answers: {samples}")
    return result


def tasks_for(config: RunConfig) -> tuple[Mixture, RolloutConfig]:
    """The tasks of a recipe, to be asked of its model by one engine; and its section rollout with the engine's context decided.

    Args: config: with the engine's device (settings/resolve.py).
    Raises: DataError, ConfigError.
    """
    check_surroundings_of_engine()
    model = config.model
    check_model_folder(model)
    check_engine_device(config)
    for entry in config.rollout.entries:
        with named(entry):
            check_task_names(entry.task)
    rollout = config.rollout.with_context(read_config(model).get_text_config().max_position_embeddings)
    return mixture(config, ChatEncoder.of_entries(model, rollout, is_limited=True)), rollout


async def _evaluate(asker: Asker, prompts: Sequence[Prompt], config: RunConfig) -> Evaluation:
    async with asker.started(first_of_each(prompts, 1)):
        return await evaluate(asker, prompts, config.evaluation, step=0, correct_at=config.correct_at)


class Asker:
    """Answers prompts with an engine of its own; what `evaluate` needs of a rollout pool."""

    def __init__(self, rollout: RolloutConfig, model: Path, seed: int, on_answers: Callable[[int], None]) -> None:
        """
        Args:
            seed: of the samples, as a run's.
            on_answers: called with how many answers have come, each time that a prompt has its own.
        """
        self._rollout, self._model, self._seed, self._on_answers = rollout, model, seed, on_answers

    @asynccontextmanager
    async def started(self, samples: Sequence[Prompt]) -> AsyncIterator[None]:
        """The engine runs meanwhile. Args: samples: the reward function of each one's task is tried on it first."""
        with passing_folder():
            self._sampler = await Sampler.start(self._model, self._rollout, samples=samples, seed=self._seed)
            try:
                yield
            finally:
                await self._sampler.close()

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        async def one(prompt: Prompt) -> tuple[Trajectory, ...]:
            answers = await self._sampler.answer(prompt, how)
            self._on_answers(len(answers))
            return answers

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
