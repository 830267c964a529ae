"""Held-out accuracy of a model folder, without Ray: one SGLang engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import Progress

from actors.commands.task_config import task_config
from actors.commands.train import check_model_folder, model_config
from actors.config import RunConfig
from actors.devices import check_engine_device
from actors.evaluation import Evaluation, evaluate
from correction.errors import DataError
from rollout.chat import ChatEncoder, load_tokenizer
from rollout.sampler import Sampler
from rollout.tasks import build_task, check_task_names
from rollout.trajectory import Prompt, Trajectory


def evaluate_folder(
    model: Path,
    task: str,
    overrides: Sequence[str],
    *,
    problems: int,
    temperature: float | None,
    samples: Path | None,
    say: Callable[[str], None],
) -> Evaluation:
    """Ask held-out questions and print the accuracy.

    Args:
        model: Hugging Face folder.
        task: a recipe's path, or the name of a reasoning-gym data set, which is scored by its own scorer.
        overrides: "dotted.key=value" over the recipe, or over what is made up around a name.
        temperature: None: the recipe's evaluation.temperature.
        samples: text file for the answers.
    Raises: DataError, ConfigError, EngineError.
    """
    check_model_folder(model)
    config = task_config(model, task, overrides, problems=problems)
    check_engine_device(config)
    check_task_names(config.rollout.task)
    longest_prompt = config.rollout.max_prompt_tokens(model_config(model).max_position_embeddings)
    encoder = ChatEncoder.for_task(load_tokenizer(model), config.rollout.task, longest_prompt)
    built = build_task(config.rollout.task, encoder)
    prompts = built.held_out_prompts()[:problems]
    if not prompts:
        raise DataError(
            f"{built.name}: no question fits into the {longest_prompt} tokens that rollout.sampling.max_tokens = "
            f"{config.rollout.sampling.max_tokens} leaves of the context of {model}; lower it, or take a model with a longer context"
        )
    if len(prompts) < problems:
        say(f"only {len(prompts)} of {problems} questions: the others are too long for {longest_prompt} tokens, or there are no more")
    settings = config.evaluation
    temperature = settings.temperature if temperature is None else temperature
    with Progress(transient=True) as progress:
        bar = progress.add_task("starting the engine", total=len(prompts))
        asker = _Asker(config, model, lambda: progress.update(bar, advance=1, description="answering"))
        result = asyncio.run(asker.evaluate(prompts, temperature=temperature, correct_at=settings.correct_at))
    how = "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"
    say(f"held-out accuracy of {model}: {result.accuracy} (95% Wilson, {how}), {result.failed} answers could not be scored")
    if samples is not None:
        samples.write_text(result.text(prompts, limit=len(prompts)))
        say(f"answers: {samples}")
    return result


class _Asker:
    """Answers prompts with an engine of its own; what `evaluate` needs of a rollout pool."""

    def __init__(self, config: RunConfig, model: Path, on_answer: Callable[[], None]) -> None:
        self._config, self._model, self._on_answer = config, model, on_answer

    async def evaluate(self, prompts: Sequence[Prompt], *, temperature: float, correct_at: float) -> Evaluation:
        self._sampler = await Sampler.start(self._model, self._config.rollout, sample=prompts[0], seed=self._config.seed)
        try:
            return await evaluate(self, prompts, step=0, temperature=temperature, correct_at=correct_at)
        finally:
            await self._sampler.close()

    async def answer(self, prompts: Sequence[Prompt], temperature: float) -> list[Trajectory]:
        async def one(prompt: Prompt) -> Trajectory:
            answer = await self._sampler.answer(prompt, temperature)
            self._on_answer()
            return answer

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
