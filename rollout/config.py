"""Settings of everything between a prompt and its scored group: task, reward, sampling, engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from evenkeel.correction.errors import ConfigError
from evenkeel.correction.settings.base import Settings
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

# ----------------------------------------------------------------------------------------------------------------------
# How many rollout workers a run has: a fixed number, or one that follows the load between two bounds.


class PoolSizeConfig(Settings):
    """Part of rollout's settings."""

    min_workers: PositiveInt | None = Field(default=None, le=10**4)
    """With max_workers: the pool follows the load, between these two. It grows while the learner waits for data, and shrinks while workers
    wait for work (docs/sizing.md)."""
    max_workers: PositiveInt | None = Field(default=None, le=10**4)
    """With min_workers: the most workers. The pool never grows beyond those that admission can keep busy."""
    workers: PositiveInt = Field(default_factory=lambda before: before.get("min_workers") or 1, le=10**4)
    """Rollout workers, each with an engine of its own. With min_workers and max_workers: how many the run begins with; not given,
    min_workers."""

    @model_validator(mode="after")
    def _sizes_of_the_pool_fit(self) -> PoolSizeConfig:
        low, high = self.min_workers, self.max_workers
        if (low is None) != (high is None):
            given, missing = ("min_workers", "max_workers") if high is None else ("max_workers", "min_workers")
            raise ValueError(
                f"{given} = {low or high} without {missing}: a pool that follows the load needs both; set {missing}, or set workers alone "
                f"for a fixed pool"
            )
        if low is not None and high is not None:
            if low > high:
                raise ValueError(f"min_workers = {low} is more than max_workers = {high}: lower the one or raise the other")
            if not low <= self.workers <= high:
                raise ValueError(
                    f"workers = {self.workers}, which the run would begin with, is not between min_workers = {low} and max_workers = "
                    f"{high}: change it, or leave it out"
                )
        return self

    @property
    def is_elastic(self) -> bool:
        """The pool follows the load."""
        return self.max_workers is not None

    @property
    def fewest_workers(self) -> int:
        return self.min_workers or self.workers

    @property
    def most_workers(self) -> int:
        return self.max_workers or self.workers


# --- task -----------------------------------------------------------------------------------------------------------


class _Task(Settings):
    """What every kind of task has."""

    seed: int = 0
    """Which questions are drawn, and in which order. The split into training and held-out does not depend on it."""
    prompt_template: str = "{question}"
    """Text of the user turn; {question} is replaced by the task's question."""
    system_prompt: str | None = None
    """Text of a system turn before the question; empty: none."""
    apply_chat_template: bool = True
    """Apply the tokenizer's chat template to the question; false: the bare text, for a base model without a template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Handed to the chat template, e.g. {enable_thinking: false} for Qwen3."""
    held_out_size: PositiveInt = Field(default=512, le=10**7)
    """Distinct questions to keep for evaluation, at most; a number that is given is warned about where there are fewer."""
    held_out_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of all distinct questions that may be held out; a hash of the question's text decides which."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are skipped and counted; empty: whatever max_tokens leaves of the engine's context."""

    @field_validator("prompt_template")
    @classmethod
    def _has_a_place_for_the_question(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError(f"prompt_template = {template!r} lacks {{question}}: every prompt would be the same; put it in")
        return template


class ReasoningGymTask(_Task):
    """Questions of a procedural data set of the reasoning-gym package; there is no end of them."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Which kind of task this is."""
    dataset: str
    """Name of the data set, e.g. chain_sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the data set, as its own config class names them, e.g. {min_terms: 2, max_terms: 2}."""

    @field_validator("options")
    @classmethod
    def _leaves_seed_and_size_alone(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, instead in (("seed", "rollout.task.seed"), ("size", "rollout.task.held_out_size; training questions have no end")):
            if name in options:
                raise ValueError(f"options.{name} = {options[name]!r}: evenkeel sets it, so that the streams stay disjoint; use {instead}")
        return options


class _RowsTask(_Task):
    prompt_field: str = "prompt"
    """Column of the question: text, or turns with role and content; a dot leads to a field within a column."""
    answer_field: str | None = "answer"
    """Column of the reference answer, as in reward_model.ground_truth; empty for a reward that needs none."""
    demonstration_field: str | None = None
    """Column of a worked answer for the supervised warm-up; empty: the reference answer itself."""
    distinct: bool = False
    """Take each question once, however often the rows repeat it."""
    shuffle: bool = True
    """A new order in every epoch; false: the order of the file, every time."""


class FileTask(_RowsTask):
    """Rows of a .jsonl, .json or .parquet file."""

    kind: Literal["file"] = "file"
    """Which kind of task this is."""
    path: Path
    """The file of training rows."""
    held_out_path: Path | None = None
    """A file of held-out rows; empty: some of the training file's distinct questions are kept back."""


class HuggingFaceTask(_RowsTask):
    """Rows of a Hugging Face data set: a name on the hub, a folder of data files, or one written by save_to_disk."""

    kind: Literal["huggingface"] = "huggingface"
    """Which kind of task this is."""
    path: str
    """Name or folder, as datasets.load_dataset takes it."""
    subset: str | None = None
    """The data set's configuration name, where it has several."""
    revision: str | None = None
    """Branch, tag or commit of a data set of the hub; a run's recipe.yaml has the commit that it took."""
    split: str = "train"
    """Split of the training rows."""
    held_out_split: str | None = None
    """Split of the held-out rows; empty: some of the training split's distinct questions are kept back."""


TaskConfig = Annotated[ReasoningGymTask | FileTask | HuggingFaceTask, Field(discriminator="kind")]

# --- reward ---------------------------------------------------------------------------------------------------------


class WholeText(Settings):
    """The scorer sees the whole completion."""

    kind: Literal["whole"] = "whole"
    """Which part of the completion is the answer."""


class LastLine(Settings):
    """The last line that is not blank."""

    kind: Literal["last_line"] = "last_line"
    """Which part of the completion is the answer."""


class AfterMarker(Settings):
    """What follows the last occurrence of a marker; nothing when the marker is missing."""

    kind: Literal["after"] = "after"
    """Which part of the completion is the answer."""
    marker: str = Field(min_length=1)
    """E.g. "####" or "</think>"."""


class RegexMatch(Settings):
    """The last match of a pattern (its first group, if it has one); nothing without a match."""

    kind: Literal["regex"] = "regex"
    """Which part of the completion is the answer."""
    pattern: str
    """Python regular expression, in DOTALL mode, e.g. "<answer>(.*?)</answer>"."""

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern = {pattern!r} is no regular expression: {error}") from error
        return pattern


Extraction = Annotated[WholeText | LastLine | AfterMarker | RegexMatch, Field(discriminator="kind")]


class _Reward(Settings):
    """What every kind of reward has."""

    extraction: Extraction = Field(default_factory=WholeText)
    """Which part of the completion the scorer is given, stripped of blanks at both ends (the whole text stays as it is)."""
    deadline_s: PositiveFloat = 10.0
    """Longest time for one completion; then the scoring process is killed and the trajectory counts as failed."""
    start_deadline_s: PositiveFloat = 60.0
    """Longest time for a scoring process to import what it needs."""
    processes: PositiveInt = Field(default=2, le=1024)
    """Scoring processes of each rollout worker: how many completions it scores at the same time."""
    memory_gib: PositiveFloat | None = 4.0
    """Memory of a scoring process and all that it starts, GiB. Beyond it the scoring call fails, and not the machine; empty: no limit."""


class ReasoningGymReward(_Reward):
    """The scorer of the reasoning-gym data set that made the question."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Which scorer."""
    dataset: str | None = None
    """The data set that made the questions, if they are rows that `evenkeel filter` wrote; empty: the task's own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """With dataset: its settings, as they were when it made the questions."""


class MathVerifyReward(_Reward):
    """1 if math-verify finds completion and reference answer equal as mathematics, else 0."""

    kind: Literal["math_verify"] = "math_verify"
    """Which scorer."""
    float_rounding: int = Field(default=6, ge=0, le=300)
    """Decimal places to which numbers are compared."""


class ExactMatchReward(_Reward):
    """1 if the answer is the reference answer, blanks at both ends aside, else 0."""

    kind: Literal["exact_match"] = "exact_match"
    """Which scorer."""
    ignore_case: bool = False
    """Ignore the difference between upper and lower case."""


class FunctionReward(_Reward):
    """A function of your own, plain or async. It may take prompt, completion, answer and metadata (any of them, by name)
    and returns a number, or a dict of named parts: each is a metric, their sum trains."""

    kind: Literal["function"] = "function"
    """Which scorer."""
    path: str
    """module:function; the module lies in `folder`, or is installed."""
    folder: Path | None = None
    """Where the module lies. Empty: where the run is started, which a resume from another folder remembers."""

    @field_validator("path")
    @classmethod
    def _is_module_and_function(cls, path: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", path):
            file, _, function = path.partition(":")
            module, name = re.sub(r"\W", "_", Path(file).stem) or "my_rewards", re.sub(r"\W", "_", function) or "score"
            raise ValueError(
                f"rollout.reward.path = {path!r}: it takes MODULE:FUNCTION, e.g. {module}:{name} for the function {name} in {module}.py; "
                f"the run starts where that file lies"
            )
        return path


RewardConfig = Annotated[ReasoningGymReward | MathVerifyReward | ExactMatchReward | FunctionReward, Field(discriminator="kind")]

# --- sampling and packing -------------------------------------------------------------------------------------------

_OF_A_PART = "tokens would come from a part of the vocabulary, but their logprobs from the whole of it"
_PENALISED = "tokens would be drawn from penalised logits, but the learner knows no penalty"
# Sampling parameters of SGLang that evenkeel doesn't use: for each the one value that is allowed, and why no other is.
_BIASING = {
    "top_p": (1.0, _OF_A_PART),
    "top_k": (-1, _OF_A_PART),
    "min_p": (0.0, _OF_A_PART),
    "repetition_penalty": (1.0, _PENALISED),
    "frequency_penalty": (0.0, _PENALISED),
    "presence_penalty": (0.0, _PENALISED),
    "min_tokens": (0, "the end of the answer would be forbidden in the engine, but not in the learner"),
}


class SamplingConfig(Settings):
    """How engines sample while training: from the whole distribution. What would bias ratios (top_p, top_k, min_p ...) is refused."""

    temperature: PositiveFloat = Field(default=1.0, le=100.0)
    """Logits are divided by it, in the engine and in the learner alike."""
    max_tokens: PositiveInt = Field(default=256, le=10**8)
    """Longest answer, tokens. Longer ones are cut there, counted, and treated as rollout.overlong says."""
    samples_per_group: int = Field(default=8, ge=2, le=10**5)
    """Answers to each prompt. They are a group, whose mean reward is the baseline of each, so at least 2."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_bias_the_ratios(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        for name, (neutral, reason) in _BIASING.items():
            value = settings.get(name, neutral)
            if value != neutral:
                raise ValueError(f"{name} = {value}: {reason}, and every importance ratio would be biased. Set {name}: {neutral}")
        return {name: value for name, value in settings.items() if name not in _BIASING}


class AnswerSampling(Settings):
    """How questions are answered where nothing is trained on the answers: in evaluations and in filters.

    top_p is offered here alone. A training sample's logprob is that of the whole distribution, which is what the learner computes: under
    top-p the token would come from a part of it, and every importance ratio would be off by that part's mass (SamplingConfig refuses it).
    """

    samples: int = Field(default=1, ge=1, le=10**4)
    """Answers to each question; more than one give pass@k in addition to the mean, and need a temperature above 0."""
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """Sampling temperature of the answers; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the likeliest tokens that hold this share of the probability; 1 is the whole vocabulary, as in training."""

    @model_validator(mode="after")
    def _has_something_to_sample(self) -> AnswerSampling:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples = {self.samples} with temperature = 0: greedy answers to a question are all the same; raise the temperature, "
                f"or set samples: 1"
            )
        if self.temperature == 0 and self.top_p < 1:
            raise ValueError(
                f"top_p = {self.top_p} with temperature = 0: the likeliest token is taken whatever top_p says; raise the temperature, "
                f"or set top_p: 1"
            )
        return self

    @property
    def description(self) -> str:
        """Words for people: "greedy", or "8 answers each, sampled at temperature 0.7, top-p 0.95"."""
        if self.temperature == 0:
            return "greedy"
        cut = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        several = f"{self.samples} answers each, " if self.samples > 1 else ""
        return f"{several}sampled at temperature {self.temperature:g}{cut}"


class TrainOverlong(Settings):
    """Answers cut at max_tokens are trained like any other, with the reward that they got."""

    kind: Literal["train"] = "train"
    """What becomes of an answer cut at max_tokens."""


class MaskOverlong(Settings):
    """Answers cut at max_tokens are left out of the loss; their rewards stay in the group's baseline (DAPO's overlong filtering)."""

    kind: Literal["mask"] = "mask"
    """What becomes of an answer cut at max_tokens."""


class PenaliseOverlong(Settings):
    """Answers cut at max_tokens get a lower reward; with ramp_tokens, so do answers almost as long (DAPO's soft overlong punishment)."""

    kind: Literal["penalise"] = "penalise"
    """What becomes of an answer cut at max_tokens."""
    penalty: PositiveFloat = 1.0
    """Taken off the reward of a cut answer."""
    ramp_tokens: int = Field(default=0, ge=0)
    """Number of tokens before max_tokens over which the penalty grows linearly from 0; finished answers of that length pay it too."""


OverlongConfig = Annotated[TrainOverlong | MaskOverlong | PenaliseOverlong, Field(discriminator="kind")]


class RolloutConfig(PoolSizeConfig):
    """What happens to a prompt."""

    DERIVED: ClassVar[frozenset[str]] = frozenset({"slots"})

    gpus_per_worker: PositiveFloat = Field(default=1.0, le=1)
    """Share of a GPU that a worker asks for. Below 1, a learner's rank or another worker can use the same GPU. Not used on a CPU; must be 1
    with engine.tensor_parallel above 1."""
    slots: PositiveInt | None = None
    """Most groups that a worker works on at once. Unset: twice as many as fit into max_running_requests, so that its batch stays full."""
    task: TaskConfig
    """Where the questions come from."""
    reward: RewardConfig
    """How an answer is scored."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """How answers are sampled for training."""
    overlong: OverlongConfig = Field(default_factory=TrainOverlong)
    """Answers cut at max_tokens. train, as in GRPO: they rarely score, so the policy learns to finish in time. mask: left out of the loss,
    which punishes none that might have become right, but nothing keeps answers short. penalise: a lower reward presses harder."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The SGLang engine of each worker."""

    @model_validator(mode="after")
    def _scorer_knows_the_questions(self) -> RolloutConfig:
        if self.reward.kind != "reasoning_gym":
            return self
        if self.task.kind != "reasoning_gym" and self.reward.dataset is None:
            raise ValueError(
                f"reward.kind = reasoning_gym with task.kind = {self.task.kind}: reasoning-gym scores only the questions that it made. "
                "Set reward.dataset, if they are rows that `evenkeel filter` wrote, or reward.kind to exact_match, math_verify or function"
            )
        if self.task.kind == "reasoning_gym" and (self.reward.dataset is not None or self.reward.options):
            raise ValueError(
                f"reward.dataset = {self.reward.dataset} with task.dataset = {self.task.dataset}: the task says whose scorer it is. "
                "Leave reward.dataset and reward.options out"
            )
        return self

    @model_validator(mode="after")
    def _context_leaves_room_for_a_prompt(self) -> RolloutConfig:
        if self.engine.context_length is not None and self.engine.lengths.longest_prompt(self.sampling.max_tokens) < 1:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in {self.engine.room_text}; "
                f"lower the one or raise the other"
            )
        if isinstance(self.overlong, PenaliseOverlong) and self.overlong.ramp_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"overlong.ramp_tokens = {self.overlong.ramp_tokens} is more than sampling.max_tokens = {self.sampling.max_tokens}: "
                "even an empty answer would be punished; lower it"
            )
        return self

    @property
    def gpus_of_a_worker(self) -> float:
        """GPUs that a worker asks Ray for, if its engine computes on GPUs."""
        return self.gpus_per_worker * self.engine.tensor_parallel

    @property
    def slots_per_worker(self) -> int:
        """Most groups that a worker has under way."""
        return self.slots or 2 * -(-self.engine.max_running_requests // self.sampling.samples_per_group)

    def with_context(self, model_context: int) -> Self:
        """These settings with the context of the engines decided. Args, Raises: as EngineConfig.with_context."""
        return self.model_copy(update={"engine": self.engine.with_context(model_context)})

    @property
    def longest_prompt(self) -> int:
        """Longest prompt that can be asked, tokens: task.max_prompt_tokens, or what max_tokens leaves of what the engine takes.

        Raises: ConfigError if no room is left, or the context isn't decided yet.
        """
        longest = self.engine.lengths.longest_prompt(self.sampling.max_tokens)
        if longest < 1:
            said = f"rollout.sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt"
            raise ConfigError(f"{said} in {self.engine.room_text}", remedy="lower it")
        return min(longest, self.task.max_prompt_tokens or longest)

    @property
    def prompt_limit(self) -> str:
        """What longest_prompt comes from, for people. Raises: as that."""
        if self.longest_prompt == self.task.max_prompt_tokens:
            return "rollout.task.max_prompt_tokens"
        return f"what rollout.sampling.max_tokens = {self.sampling.max_tokens} leaves of {self.engine.room_text}"
