"""What `evenkeel doctor MODEL` shows: what a model's tokenizer, template and configs say about where its prompts and answers end, and how
long both may be. A run, an evaluation, a filter and a warm-up go by the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.markup import escape

from evenkeel.actors.cluster.hub import outline_folder
from evenkeel.actors.processes.disk_at_start import by_disk_at_start
from evenkeel.actors.settings.devices import visible_gpus
from evenkeel.actors.settings.resolve import with_engine_types
from evenkeel.correction.errors import ConfigError, counted
from evenkeel.learner.hf.folder import read_config
from evenkeel.plan.shape import check_is_model
from evenkeel.questions import DISK_OR_HUB, questions
from evenkeel.rollout.config import FileTask, RolloutConfig
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.task_config import task_config

_QUESTION, _SAID = "What is 17 + 25?", "evenkeel-system"
_BARE = FileTask(path=Path("none"))
"""A task's settings of prompts, where there is no task."""


def model_page(target: Path, task: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What there is to know, as (name, text in rich's markup); a line that goes on with the one before has no name.

    Args:
        target: model folder, or a name of the hub.
        task: a recipe's path or the name of a reasoning-gym data set, for its settings and its first question; empty: a question made up.
        overrides: "dotted.key=value" over the task's.
    Raises: DataError, ConfigError.
    """
    if overrides and not task:
        raise ConfigError(f"evenkeel doctor {target} {overrides[0]}: of a model alone there is nothing to set; add --task RECIPE")
    folder, _ = by_disk_at_start(partial(outline_folder, target), f"config and tokenizer of {target}", disk=DISK_OR_HUB, computes=True)
    check_is_model(folder)
    shape = read_config(folder).get_text_config()
    rollout, prompt, from_where = None, None, "a question that is made up; --task RECIPE shows the first of a task"
    if task:
        config = task_config(folder, task, overrides, problems=1)
        rollout = with_engine_types(config, has_gpu=visible_gpus() > 0).rollout.with_context(shape.max_position_embeddings)
        encoder = ChatEncoder.of_folder(folder, rollout.task, rollout)
        made = questions(rollout.task, config.deadlines.start_s, encoder)
        prompt, from_where = made.train_prompt(0).token_ids, f"the first training question of {made.name}"
    else:
        encoder = ChatEncoder.of_folder(folder, _BARE)
    yield "model", f"{escape(str(target))}: {shape.model_type}, context of {shape.max_position_embeddings} tokens"
    yield from _ends(encoder)
    yield from _lengths(rollout, shape.max_position_embeddings)
    yield "system turn", escape(_system(encoder))
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
        yield "", f"rollout.sampling.max_tokens = {rollout.sampling.max_tokens} leaves {rollout.longest_prompt} for a prompt"


def _system(encoder: ChatEncoder) -> str:
    """What a system turn says, and who makes it."""
    if encoder.system_prompt is not None:
        return f"{encoder.system_prompt!r} (rollout.task.system_prompt)"
    if not encoder.apply_chat_template:
        return "none, without the chat template"

    def rendered(*turns: tuple[str, str]) -> str:
        asked = [{"role": role, "content": content} for role, content in turns]
        return str(encoder.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **encoder.chat_template_kwargs))

    try:
        before, found, after = rendered(("system", _SAID), ("user", _QUESTION)).partition(_SAID)
    except Exception:  # whatever a template raises
        return "none; the chat template takes none"
    if not found:
        return "none; the chat template leaves it out"
    prompt = rendered(("user", _QUESTION))
    own, is_there, _ = prompt.removeprefix(before).partition(after.partition(_QUESTION)[0])
    return f"{own!r} (the chat template's own)" if is_there and prompt.startswith(before) else "none"


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
