"""Settings of everything between a prompt and its scored group: task, reward, sampling, engine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from evenkeel.correction.errors import ConfigError, EvenkeelError
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


class _DrawnTask(_Task):
    distinct: bool = False
    """Take each question once, however often the rows repeat it."""
    shuffle: bool = True
    """A new order in every epoch; false: the order of the file, every time."""


class _RowsTask(_DrawnTask):
    prompt_field: str = "prompt"
    """Column of the question: text, or turns with role and content; a dot leads to a field within a column."""
    answer_field: str | None = "answer"
    """Column of the reference answer, as in reward_model.ground_truth; empty for a reward that needs none."""
    demonstration_field: str | None = None
    """Column of a worked answer for the supervised warm-up: a text, or turns that begin and end with the model's; empty: the reference
    answer itself."""


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


class FoldersTask(_DrawnTask):
    """Task folders as Harbor has them: an instruction, files, tests that give the reward. Each rollout has a sandbox (docs/agents.md)."""

    prompt_field: ClassVar[str] = "instruction"
    answer_field: ClassVar[None] = None
    demonstration_field: ClassVar[str] = "solution"

    kind: Literal["folders"] = "folders"
    """Which kind of task this is."""
    path: Path
    """The folder in which the task folders lie, on every node."""
    held_out_path: Path | None = None
    """A folder of held-out ones; empty: some of the others are kept back."""
    container: Literal["docker", "podman"] | None = None
    """What runs a folder's image; empty: a sandbox without one, of this machine's programs (bubblewrap)."""
    programs: tuple[Path, ...] = ()
    """Without a container: folders of programs that a sandbox sees beside /usr, read-only; their bin/ comes first in its PATH."""
    command_s: PositiveFloat = 10.0
    """Longest time for a command, seconds; then it is ended, and the model is told so."""
    longest_output: PositiveInt = Field(default=4000, le=1 << 19)
    """Bytes of a command's output that the model reads; of more the middle is left out."""

    @property
    def sandbox(self) -> dict[str, Any]:
        """Settings of its sandboxes, as JSON can hold them."""
        given = self.model_dump(include={"container", "command_s", "longest_output"})
        return given | {"programs": [str(folder.absolute()) for folder in self.programs]}


TaskConfig = Annotated[ReasoningGymTask | FileTask | HuggingFaceTask | FoldersTask, Field(discriminator="kind")]

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


MODULE_AND_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class _Processes(Settings):
    """Limits of the processes in which the user's code runs."""

    start_deadline_s: PositiveFloat = 60.0
    """Longest time for a process to import what it needs."""
    memory_gib: PositiveFloat | None = 4.0
    """Memory of a process and all that it starts, GiB. Beyond it the call fails, and not the machine; empty: no limit."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that it gets beside the usual ones, e.g. [OPENAI_API_KEY]; those have no keys (docs/security.md)."""


class _OwnCode(Settings):
    """Code of the user's."""

    _PLACE: ClassVar[tuple[str, str, str, str, str]]
    """Section; and of an example: what it is, its module, its name, both as words of a path."""

    path: str
    """module:name; the module lies in `folder`, or is installed."""
    folder: Path | None = None
    """Where the module lies. Empty: where the run is started, which a resume from another folder remembers."""

    @field_validator("path")
    @classmethod
    def _is_module_and_name(cls, path: str) -> str:
        if not MODULE_AND_NAME.fullmatch(path):
            section, kind, own_module, own_name, form = cls._PLACE
            file, _, given = path.partition(":")
            module, name = re.sub(r"\W", "_", Path(file).stem) or own_module, re.sub(r"\W", "_", given) or own_name
            raise ValueError(
                f"{section}.path = {path!r}: it takes {form}, e.g. {module}:{name} for the {kind} {name} in {module}.py; the run starts "
                "where that file lies"
            )
        return path


class _Reward(_Processes):
    """What every kind of reward has that scores completions."""

    extraction: Extraction = Field(default_factory=WholeText)
    """Which part of the completion the scorer is given, stripped of blanks at both ends (the whole text stays as it is)."""
    deadline_s: PositiveFloat = 10.0
    """Longest time for one completion; then the scoring process is killed and the trajectory counts as failed."""
    processes: PositiveInt = Field(default=2, le=1024)
    """Scoring processes of each rollout worker: how many completions it scores at the same time."""


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


class FunctionReward(_OwnCode, _Reward):
    """A function of your own, plain or async. It may take prompt, completion, answer and metadata (any of them, by name)
    and returns a number, or a dict of named parts: each is a metric, their sum trains."""

    _PLACE: ClassVar = ("rollout.reward", "function", "my_rewards", "score", "MODULE:FUNCTION")

    kind: Literal["function"] = "function"
    """Which scorer."""
    at_once: PositiveInt = Field(default=1, le=10**4)
    """Calls of an `async def` function that each process has under way at a time: for one that waits for others, a judge on a server above
    all. 1: one after the other."""


class EnvironmentReward(Settings):
    """What the steps of rollout.environment return, added up."""

    extraction: ClassVar[WholeText] = WholeText()

    kind: Literal["environment"] = "environment"
    """Which scorer."""


class AgentReward(Settings):
    """What the program of rollout.agent writes to a file: a number, or an object of named parts, whose sum trains."""

    extraction: ClassVar[WholeText] = WholeText()

    kind: Literal["agent"] = "agent"
    """Which scorer."""


RewardConfig = Annotated[
    ReasoningGymReward | MathVerifyReward | ExactMatchReward | FunctionReward | EnvironmentReward | AgentReward,
    Field(discriminator="kind"),
]

# --- environment ------------------------------------------------------------------------------------------------------


class EnvironmentConfig(_OwnCode, _Processes):
    """A class of your own that answers the model's turns: a tool, a game, another program (docs/agents.md)."""

    _PLACE: ClassVar = ("rollout.environment", "class", "my_environment", "Calculator", "MODULE:CLASS")

    tool_parser: str | None = None
    """With tools of the class: SGLang's name of the form in which the model calls them, e.g. qwen25, hermes, llama3."""
    max_turns: PositiveInt = Field(default=8, le=10**4)
    """Most turns of the model in a rollout; one that isn't done then is cut."""
    max_sequences: PositiveInt = Field(default=8, le=1000)
    """Most conversations of a rollout, each with sampling.max_tokens of its own: an environment may begin it anew. One more, and the
    rollout is cut."""
    max_turn_tokens: PositiveInt | None = Field(default=None, le=10**8)
    """Longest turn, tokens; a longer one is cut, and the rollout with it. Empty: what sampling.max_tokens leaves, which is of all that
    follows the prompt, tool outputs included."""
    max_tool_s: PositiveFloat = 600.0
    """Most seconds that the environment may take in one rollout; one that takes more is cut."""
    deadline_s: PositiveFloat = 30.0
    """Longest time for a reset or a step; then the rollout counts as failed."""
    processes: PositiveInt = Field(default=2, le=1024)
    """Processes of each rollout worker. Each has many environments at a time."""


# --- agent ------------------------------------------------------------------------------------------------------------


NODE = "node"
"""In place of an address: the node's own."""
BEYOND_LOOPBACK = (
    "the agents' door listens beyond loopback, and there is no TLS: who can read that network can read the sessions' keys, and all that is "
    "said; keep it private"
)


class AgentConfig(_Processes):
    """A program of your own that plays a rollout: it talks to a base URL as to any served model (docs/agents.md)."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; it is started once for each rollout, in `folder`."""
    folder: Path | None = None
    """Where the program runs. Empty: where the run is started, which a resume from another folder remembers."""
    bind: str = "127.0.0.1"
    """Address that the worker's door listens on. "node": the node's own, as Ray knows it, for programs that run elsewhere, in a container
    say. Beyond loopback there is no TLS: who can read that network can read keys and texts."""
    tool_parser: str | None = None
    """SGLang's name of the form in which the model calls tools, e.g. qwen25, hermes, llama3. Empty: all that it says is text."""
    max_turns: PositiveInt = Field(default=64, le=10**4)
    """Most turns of the model in a rollout; then it is cut."""
    max_sequences: PositiveInt = Field(default=8, le=1000)
    """Most conversations of a rollout, each with sampling.max_tokens of its own: of sub-agents, with a history made short, or going back to
    an earlier turn. A request that would be one more is refused."""
    deadline_s: PositiveFloat = 600.0
    """Longest time for a rollout; then the program is killed, and the rollout counts as failed."""
    processes: PositiveInt = Field(default=16, le=1024)
    """Programs that a rollout worker runs at a time."""

    @field_validator("bind")
    @classmethod
    def _is_an_address(cls, bind: str) -> str:
        with contextlib.suppress(ValueError):
            if bind == NODE:
                return bind
            address = ip_address(bind)
            if not address.is_unspecified and getattr(address, "scope_id", None) is None:  # one with a scope stands in no URL
                return str(address)  # as clients write it into their Host header
        raise ValueError(f"bind = {bind!r}: programs need an address that they can reach; give one of this machine, or {NODE}")

    @property
    def is_beyond_loopback(self) -> bool:
        """Whether others than this machine's users may reach the door."""
        return self.bind == NODE or not ip_address(self.bind).is_loopback


# --- sampling and packing -------------------------------------------------------------------------------------------

_PENALISED = "tokens would be drawn from penalised logits, but the learner knows no penalty"
# Sampling parameters of SGLang that evenkeel doesn't use: for each the one value that is allowed, and why no other is.
_BIASING = {
    "repetition_penalty": (1.0, _PENALISED),
    "frequency_penalty": (0.0, _PENALISED),
    "presence_penalty": (0.0, _PENALISED),
    "min_tokens": (0, "the end of the answer would be forbidden in the engine, but not in the learner"),
}


class Truncation(Settings):
    """Of which tokens one is drawn: those that top_p, top_k and min_p all keep."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """The likeliest tokens that hold this share of the probability; 1: all."""
    top_k: int | None = Field(default=None, ge=2)
    """So many of the likeliest tokens, of equal ones those with the smaller ids. Unset: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1.0)
    """Tokens with at least this share of the likeliest one's probability; 0: all."""

    @field_validator("top_k", mode="before")
    @classmethod
    def _is_more_than_the_likeliest(cls, top_k: Any) -> Any:
        if top_k in (-1, 0):
            raise ValueError(f"top_k = {top_k}: leave it out, and tokens are drawn from the whole vocabulary")
        if top_k == 1:
            raise ValueError("top_k = 1: greedy answers to a question are all the same; take 2 or more, or leave it out")
        return top_k

    def of(self, vocabulary: int) -> Self:
        """The same without a top_k that leaves no token out. Args: vocabulary: its size."""
        return self if self.top_k is None or self.top_k < vocabulary else self.model_copy(update={"top_k": None})

    @property
    def is_partial(self) -> bool:
        """Whether tokens may come from a part of the vocabulary."""
        return bool(self.request)

    @property
    def request(self) -> dict[str, Any]:
        """What isn't neutral, as SGLang's sampling parameters."""
        return self.model_dump(include=set(Truncation.model_fields), exclude_defaults=True)

    @property
    def truncation_text(self) -> str:
        """Words for people: ", top-p 0.95, top-k 20"; empty for the whole vocabulary."""
        return "".join(f", {name.replace('_', '-')} {value:g}" for name, value in self.request.items())


WHOLE_VOCABULARY = Truncation()


class SamplingConfig(Truncation):
    """How engines sample while training. With top_p, top_k or min_p each token takes along those that it was drawn from, over which all
    policies are then normalised. What would bias ratios (penalties, min_tokens) is refused."""

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


class AnswerSampling(Truncation):
    """How questions are answered where nothing is trained on the answers: in evaluations and in filters."""

    samples: int = Field(default=1, ge=1, le=10**4)
    """Answers to each question; more than one give pass@k in addition to the mean, and need a temperature above 0."""
    temperature: float = Field(default=0.0, ge=0, le=100.0)
    """Sampling temperature of the answers; 0 is greedy."""

    @model_validator(mode="after")
    def _has_something_to_sample(self) -> AnswerSampling:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples = {self.samples} with temperature = 0: greedy answers to a question are all the same; raise the temperature, "
                f"or set samples: 1"
            )
        if self.temperature == 0 and self.is_partial:
            name, value = next(iter(self.request.items()))
            raise ValueError(
                f"{name} = {value} with temperature = 0: the likeliest token is taken whatever {name} says; raise the temperature, "
                f"or leave {name} out"
            )
        return self

    @property
    def description(self) -> str:
        """Words for people: "greedy", or "8 answers each, sampled at temperature 0.7, top-p 0.95"."""
        if self.temperature == 0:
            return "greedy"
        several = f"{self.samples} answers each, " if self.samples > 1 else ""
        return f"{several}sampled at temperature {self.temperature:g}{self.truncation_text}"


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
    """Number of tokens before max_tokens over which the penalty grows linearly from 0; finished answers of that length pay it too.
    Of a rollout with several sequences the longest one counts."""


OverlongConfig = Annotated[TrainOverlong | MaskOverlong | PenaliseOverlong, Field(discriminator="kind")]


_ONE_POLICY = "the tokens of a batch are corrected under one temperature and one truncation, and its groups have one size"


class TaskSampling(Settings):
    """What may differ from rollout.sampling in one of several tasks."""

    max_tokens: PositiveInt | None = Field(default=None, le=10**8)
    """Longest answer, tokens; at most that of rollout.sampling, which is the default."""

    @model_validator(mode="before")
    @classmethod
    def _is_of_one_policy(cls, settings: Any) -> Any:
        for name in SamplingConfig.model_fields:
            if isinstance(settings, dict) and name in settings and name not in cls.model_fields:
                raise ValueError(f"sampling.{name} = {settings[name]}: {_ONE_POLICY}. Set it for all tasks: rollout.sampling.{name}")
        return settings


class TaskEntry(Settings):
    """One task of a run: its questions, and how they are answered and scored."""

    name: str = Field(pattern=r"^[A-Za-z][\w-]*$", max_length=40)
    """What its prompts, metrics and evaluations are called by."""
    weight: NonNegativeFloat | dict[NonNegativeInt, NonNegativeFloat] = 1.0
    """Its part of the prompts, in proportion to those of the other tasks; or, by the step from which each holds, several: {0: 1, 50: 3}."""
    task: TaskConfig
    """Where the questions come from."""
    reward: RewardConfig
    """How an answer is scored."""
    environment: EnvironmentConfig | None = None
    """What answers the model's turns; empty: an answer is one turn."""
    agent: AgentConfig | None = None
    """A program that plays each rollout; empty: a rollout is an answer, or played in an environment."""
    sampling: TaskSampling = Field(default_factory=TaskSampling)
    """What differs from rollout.sampling."""
    correct_at: float | None = None
    """A reward of at least this counts as a right answer; empty: evaluation.correct_at."""

    @field_validator("weight")
    @classmethod
    def _holds_from_the_first_step(cls, weight: float | dict[int, float]) -> float | dict[int, float]:
        if isinstance(weight, dict) and 0 not in weight:
            raise ValueError(f"weight = {weight}: none is given for the first steps; add the one from step 0 on, e.g. 0: 1")
        return weight

    @model_validator(mode="after")
    def _is_scored_as_it_is_played(self) -> TaskEntry:
        check_played(self.task, self.reward, self.environment, self.agent)
        return self

    def weight_at(self, step: int) -> float:
        """Args: step: steps before, counted in prompts."""
        if not isinstance(self.weight, dict):
            return self.weight
        return self.weight[max(first for first in self.weight if first <= step)]


def check_played(task: TaskConfig, reward: RewardConfig, environment: EnvironmentConfig | None, agent: AgentConfig | None) -> None:
    """Raises: ValueError for a reward that doesn't know these questions, or doesn't score rollouts that are played so."""
    if reward.kind == "reasoning_gym":
        if task.kind != "reasoning_gym" and reward.dataset is None:
            raise ValueError(
                f"reward.kind = reasoning_gym with task.kind = {task.kind}: reasoning-gym scores only the questions that it made. "
                "Set reward.dataset, if they are rows that `evenkeel filter` wrote, or reward.kind to exact_match, math_verify or function"
            )
        if task.kind == "reasoning_gym" and (reward.dataset is not None or reward.options):
            raise ValueError(
                f"reward.dataset = {reward.dataset} with task.dataset = {task.dataset}: the task says whose scorer it is. "
                "Leave reward.dataset and reward.options out"
            )
    if environment is None and reward.kind == "environment":
        raise ValueError("reward.kind = environment without rollout.environment: nothing would return a reward; say which class it is")
    if environment is not None and reward.kind != "environment":
        raise ValueError(
            f"reward.kind = {reward.kind} with rollout.environment: a rollout of several turns has the rewards that the steps of "
            "its environment return. Set reward: {kind: environment}, and return the score from step"
        )
    if task.kind == "folders" and environment is None and agent is None:
        raise ValueError(
            "task.kind = folders without rollout.environment: nothing would play in their sandboxes; set environment: {path: "
            '"evenkeel.rollout.environments.shell:Shell"} and reward: {kind: environment}, or take an agent of your own'
        )
    if task.kind == "folders" and environment is not None and task.command_s >= environment.deadline_s:
        raise ValueError(
            f"task.command_s = {task.command_s:g} with environment.deadline_s = {environment.deadline_s:g}: a long command would end its "
            "rollout, and not be ended for the model to read why; raise environment.deadline_s, or lower task.command_s"
        )
    if agent is None and reward.kind == "agent":
        raise ValueError("reward.kind = agent without rollout.agent: nothing would write a reward; say which program it is")
    if agent is not None and environment is not None:
        raise ValueError("agent and environment: one of the two plays a rollout; leave the other out")
    if agent is not None and not task.apply_chat_template:
        raise ValueError("agent with task.apply_chat_template = false: an agent talks in messages, and needs the chat template")


@contextlib.contextmanager
def named(entry: TaskEntry) -> Iterator[None]:
    """What goes wrong within begins with the task's name, where a run has several."""
    try:
        yield
    except EvenkeelError as error:
        if entry.name and error.args:
            error.args = (f"task {entry.name}: {error.args[0]}", *error.args[1:])
        raise


_PLAYED = ("task", "reward", "environment", "agent")


class RolloutConfig(PoolSizeConfig):
    """What happens to a prompt."""

    DERIVED: ClassVar[frozenset[str]] = frozenset({"slots"})

    gpus_per_worker: PositiveFloat = Field(default=1.0, le=1)
    """Share of a GPU that a worker asks for. Below 1, a learner's rank or another worker can use the same GPU. Not used on a CPU; must be 1
    with engine.tensor_parallel above 1."""
    slots: PositiveInt | None = None
    """Most groups that a worker works on at once. Unset: twice as many as fit into max_running_requests, so that its batch stays full, or
    into agent.processes, if they are more. With an environment or an agent: most groups' answers in the engine, too, where a rollout that
    waits for it takes no place; with an environment a worker works on as many as admission allows."""
    task: TaskConfig | None
    """Where the questions come from."""
    reward: RewardConfig | None
    """How an answer is scored."""
    environment: EnvironmentConfig | None = None
    """What answers the model's turns; empty: an answer is one turn."""
    agent: AgentConfig | None = None
    """A program that plays each rollout; empty: a rollout is an answer, or played in an environment."""
    tasks: tuple[TaskEntry, ...] = ()
    """Several tasks in place of task, reward, environment and agent: each has its own. A group is of one task (docs/tasks.md)."""
    solve_rate_floor: float | None = Field(default=None, gt=0, le=1)
    """Given: the weight of each of several tasks is multiplied by 4 p (1 - p), where p is its share of right answers lately, or by this
    where that is less: tasks that are neither always nor never solved get more prompts."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """How answers are sampled for training."""
    overlong: OverlongConfig = Field(default_factory=TrainOverlong)
    """Answers cut at max_tokens. train, as in GRPO: they rarely score, so the policy learns to finish in time. mask: left out of the loss,
    which punishes none that might have become right, but nothing keeps answers short. penalise: a lower reward presses harder."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The SGLang engine of each worker."""

    @model_validator(mode="before")
    @classmethod
    def _several_tasks_take_the_place_of_one(cls, settings: Any) -> Any:
        return {"task": None, "reward": None} | settings if isinstance(settings, dict) and settings.get("tasks") else settings

    @model_validator(mode="after")
    def _has_one_task_or_several(self) -> RolloutConfig:
        if not self.tasks:
            if self.task is None or self.reward is None:
                raise ValueError(
                    "task and reward: null without tasks: nothing would be asked; say where questions come from, or list tasks"
                )
            check_played(self.task, self.reward, self.environment, self.agent)
            if self.solve_rate_floor is not None:
                raise ValueError(f"solve_rate_floor = {self.solve_rate_floor:g} without rollout.tasks: there is nothing to choose from")
            return self
        if both := [name for name in _PLAYED if getattr(self, name) is not None]:
            raise ValueError(f"rollout.tasks and rollout.{both[0]}: each of several tasks has its own; leave rollout.{both[0]} out")
        if twice := [entry.name for number, entry in enumerate(self.tasks) if entry.name in [one.name for one in self.tasks[:number]]]:
            raise ValueError(f"rollout.tasks: two of them have the name {twice[0]}, by which prompts and metrics are known; rename one")
        for step in sorted({first for entry in self.tasks if isinstance(entry.weight, dict) for first in entry.weight} | {0}):
            if not any(entry.weight_at(step) for entry in self.tasks):
                raise ValueError(f"rollout.tasks: from step {step} on no task has a weight above 0, so no prompt could be asked; raise one")
        for entry in self.tasks:
            if (entry.sampling.max_tokens or 0) > self.sampling.max_tokens:
                raise ValueError(
                    f"rollout.tasks, {entry.name}: sampling.max_tokens = {entry.sampling.max_tokens} is more than "
                    f"rollout.sampling.max_tokens = {self.sampling.max_tokens}, by which memory and time are planned; raise that"
                )
        return self

    @model_validator(mode="after")
    def _context_leaves_room_for_a_prompt(self) -> RolloutConfig:
        if self.engine.context_length is not None and self.engine.lengths.longest_prompt(self.sampling.max_tokens) < 1:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in {self.engine.room_text}; "
                f"lower the one or raise the other"
            )
        shortest = min(entry.sampling.max_tokens or self.sampling.max_tokens for entry in self.entries)
        if isinstance(self.overlong, PenaliseOverlong) and self.overlong.ramp_tokens > shortest:
            raise ValueError(
                f"overlong.ramp_tokens = {self.overlong.ramp_tokens} is more than sampling.max_tokens = {shortest}: "
                "even an empty answer would be punished; lower it"
            )
        return self

    @property
    def gpus_of_a_worker(self) -> float:
        """GPUs that a worker asks Ray for, if its engine computes on GPUs."""
        return self.gpus_per_worker * self.engine.tensor_parallel

    @property
    def slots_per_worker(self) -> int:
        """Most groups of a worker at a time whose answers are in its engine, or are played by programs; those in environments take none."""
        programs = [entry.agent.processes for entry in self.entries if entry.agent is not None]
        return self.slots or 2 * -(-max(self.engine.max_running_requests, *programs, 0) // self.sampling.samples_per_group)

    def with_context(self, model_context: int) -> Self:
        """These settings with the context of the engines decided. Args, Raises: as EngineConfig.with_context."""
        return self.model_copy(update={"engine": self.engine.with_context(model_context)})

    @property
    def entries(self) -> tuple[TaskEntry, ...]:
        """The tasks of the run; of one with rollout.task that one, without a name."""
        if self.tasks:
            return self.tasks
        played = {name: getattr(self, name) for name in _PLAYED}
        return (TaskEntry.model_construct(name="", weight=1.0, sampling=TaskSampling(), **played),)

    @property
    def only_entry(self) -> TaskEntry:
        """The task of a run that has one. Raises: ConfigError if there are several."""
        if len(self.entries) > 1:
            raise ConfigError(
                f"rollout.tasks has {len(self.entries)} tasks, and this takes one", remedy="name a recipe that has one, as rollout.task"
            )
        return self.entries[0]

    def with_entries(self, change: Callable[[TaskEntry], TaskEntry]) -> Self:
        """These settings with each of the tasks changed."""
        changed = tuple(map(change, self.entries))
        update = {"tasks": changed} if self.tasks else {name: getattr(changed[0], name) for name in _PLAYED}
        return self.model_copy(update=update)

    def sampling_of(self, task: str) -> SamplingConfig:
        """How a task's answers are sampled. Args: task: its name."""
        longest = next(entry.sampling.max_tokens for entry in self.entries if entry.name == task)
        return self.sampling if longest is None else self.sampling.model_copy(update={"max_tokens": longest})

    @property
    def limit_of_answers(self) -> str:
        """rollout.sampling.max_tokens for a message, with the tasks that have one of their own."""
        own = [f"task {entry.name}: {entry.sampling.max_tokens}" for entry in self.entries if entry.sampling.max_tokens is not None]
        return f"rollout.sampling.max_tokens = {self.sampling.max_tokens}" + (f" ({', '.join(own)})" if own else "")

    def longest_prompt(self, entry: TaskEntry) -> int:
        """Longest prompt of a task that can be asked, tokens: task.max_prompt_tokens, or what max_tokens leaves of what the engine takes.

        Raises: ConfigError if no room is left, or the context isn't decided yet.
        """
        max_tokens = self.sampling_of(entry.name).max_tokens
        longest = self.engine.lengths.longest_prompt(max_tokens)
        if longest < 1:
            said = f"rollout.sampling.max_tokens = {max_tokens} leaves no room for a prompt"
            raise ConfigError(f"{said} in {self.engine.room_text}", remedy="lower it")
        return min(longest, entry.task.max_prompt_tokens or longest)

    def prompt_limit(self, entry: TaskEntry) -> str:
        """What longest_prompt comes from, for people. Raises: as that."""
        if self.longest_prompt(entry) == entry.task.max_prompt_tokens:
            return "rollout.task.max_prompt_tokens"
        return f"what rollout.sampling.max_tokens = {self.sampling_of(entry.name).max_tokens} leaves of {self.engine.room_text}"
