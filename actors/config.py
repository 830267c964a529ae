"""RunConfig: one model a package, composed once, and the checks that need more than one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from correction.config import CorrectionConfig
from correction.errors import ConfigError
from correction.monitor import MonitorConfig
from correction.replacement import check_replaceable, reason_of, switched, tightened
from correction.schedule import fold_obstacle, needs_proximal_forward
from learner.config import LearnerConfig
from learner.nano import NanoModelConfig
from learner.warmup import WarmupConfig
from rollout.config import RolloutConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class InitConfig(_Section):
    """The model that `evenkeel init-model` makes when there are no weights to start from."""

    architecture: NanoModelConfig = Field(default_factory=NanoModelConfig)
    """Shape of the model and its tokenizer."""
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    """Supervised start on demonstrations of the task, so that RL begins with a policy that is sometimes right."""
    learner: LearnerConfig = Field(default_factory=lambda: LearnerConfig(learning_rate=1e-3, warmup_steps=20))
    """Optimizer of the supervised start."""
    tokenizer_texts: PositiveInt = 2000
    """Questions from which the tokenizer learns its words."""


class RayConfig(_Section):
    """Which Ray cluster the actors live on."""

    address: str | None = None
    """Address of a running cluster ("auto", "host:port", "ray://..."); empty starts a private one on this machine."""
    num_cpus: PositiveInt | None = None
    """Logical CPUs of a private cluster; empty: as many as the actors of this run ask for."""
    temp_dir: Path | None = None
    """Where a private cluster keeps its sessions; empty: Ray's default. Keep it short: sockets live there."""
    rollout_resource: str = "rollout"
    """Custom resource that a rollout worker asks for; an autoscaled node type offers it."""
    include_dashboard: bool = False
    """Start Ray's dashboard with a private cluster."""


class WeightSyncConfig(_Section):
    """How new weights reach the engines."""

    transport: Literal["object_store", "broadcast"] = "object_store"
    """object_store: for any pool, workers may come and go. broadcast: torch.distributed, for a fixed pool (NCCL on GPUs, gloo on CPUs)."""
    bucket_bytes: PositiveInt = 256 << 20
    """Weights travel in buckets of about this many bytes."""
    max_probe_difference: PositiveFloat = 1e-3
    """Largest |log p(engine) - log p(learner)| of the probe prompt before the run warns; at float32 about 1e-6 is usual."""


class EvaluationConfig(_Section):
    """Held-out accuracy, beside training."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps, without stopping training; 0: before the first and after the last step only."""
    problems: PositiveInt = 512
    """Held-out questions of the first and the last evaluation."""
    problems_between: PositiveInt = 128
    """Held-out questions of those in between, which share the engines with training."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature of evaluations; 0 is greedy."""
    correct_at: float = 1.0
    """A reward of at least this counts as a right answer."""


class CheckpointConfig(_Section):
    """What survives a crash."""

    every_steps: int = Field(default=25, ge=0)
    """Save after every so many steps; 0: at the end and at Ctrl-C only."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; the one with the best held-out accuracy stays too, if its step was evaluated (evaluation.every_steps)."""


class DeadlinesConfig(_Section):
    """No wait without an end; the error names phase, actor and version."""

    start_s: PositiveFloat = 600.0
    """Engines and learner ranks have to be up by then."""
    batch_s: PositiveFloat = 600.0
    """A training batch has to be whole."""
    step_s: PositiveFloat = 1800.0
    """An optimizer step, or a forward of the learner."""
    sync_s: PositiveFloat = 120.0
    """An engine's receipt for new weights."""
    checkpoint_s: PositiveFloat = 600.0
    """A checkpoint has to be on disk."""
    evaluation_s: PositiveFloat = 900.0
    """The last evaluation has to be complete."""
    notice_s: PositiveFloat = 30.0
    """A waiting part says what it waits for, this often."""


class MetricsConfig(_Section):
    """Where numbers go besides the run folder."""

    bind: str = "127.0.0.1"
    """Address that the Prometheus endpoints listen on; on a cluster the node's own ("node")."""
    discovery_port: int = Field(default=0, ge=0, le=65535)
    """Port of the controller's HTTP service discovery for Prometheus; 0: any free one, written to the run's events."""
    wandb_project: str | None = None
    """Weights & Biases project; empty: off. Needs the extra "wandb"."""
    trajectories_per_step: int = Field(default=4, ge=0)
    """Groups of which one trajectory is kept as text, every step."""


class EarlyWarningConfig(_Section):
    """The monitor follows the correction's diagnostics and says when they drift off; by itself it does no more than that."""

    on_alarm: Literal["none", "switch_preset", "tighten", "stop"] = "none"
    """What the first alarm sets off: nothing; the correction of `preset`; the run's own with narrower bounds; a checkpoint and the end."""
    preset: str | None = None
    """For switch_preset: the correction to go on with. The run's advantages, KL and entropy terms stay unless the preset has its own."""
    tighten_factor: float = Field(default=0.5, gt=0, lt=1)
    """For tighten: power of bounds on ratios (0.5: an upper one of 2 becomes 1.41), factor on clips and divergences."""
    detailed: bool = True
    """Quantiles and numbers by probability too, which tell where a symptom sits. They sort the batch's tokens, beside training."""
    thresholds: MonitorConfig = Field(default_factory=MonitorConfig)
    """From when on a change is a watch or an alarm."""

    @model_validator(mode="after")
    def _preset_goes_with_its_action(self) -> EarlyWarningConfig:
        if self.on_alarm == "switch_preset" and self.preset is None:
            raise ConfigError("monitor.on_alarm = switch_preset: to which? Set monitor.preset; `evenkeel presets` lists them")
        if self.on_alarm != "switch_preset" and self.preset is not None:
            raise ConfigError(
                f"monitor.preset = {self.preset} with monitor.on_alarm = {self.on_alarm}: nothing would switch to it. "
                f"Set monitor.on_alarm: switch_preset, or leave the preset out"
            )
        return self


class RunConfig(_Section):
    """One run: a recipe, its overrides and the defaults of everything else."""

    name: str = "run"
    """Becomes part of the run folder's name."""
    model: Path
    """Hugging Face folder of the policy to train: config.json, safetensors, tokenizer."""
    run_dir: Path | None = None
    """Folder of the run; empty: runs/NAME-DATE-TIME."""
    steps: PositiveInt
    """Training batches; the weight version grows by one with each."""
    groups_per_step: PositiveInt
    """Prompts (groups) in a training batch."""
    max_staleness: int = Field(default=1, ge=0)
    """Versions by which the oldest token of a batch may trail the learner; 0 is synchronous training."""
    dynamic_sampling: bool = False
    """Replace groups whose valid rewards are all alike (they carry no gradient) by new ones before the step."""
    true_on_policy: bool = False
    """Sampled and trained logprobs of equal weights are the same bits: operators of fixed order in engines and learner, and a check of
    every batch. Dense models in float32 or bfloat16 on CPUs of one kind; docs/true_on_policy.md."""
    true_on_policy_on_difference: Literal["stop", "correct"] = "stop"
    """At the first token whose bits differ: end the run with its name, or warn and go on with the correction as configured."""
    seed: int = 0
    """Of the samples: a token is drawn by this seed, its prompt's id, the sample's number in its group, and its position. Questions are
    ordered by rollout.task.seed, minibatches split by learner.seed."""
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
    """For `evenkeel init-model`: how to make the model folder from nothing; empty: the folder has to be there."""

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
        learner, balances = self.learner, self.learner.moe_aux_loss_coefficient > 0
        steps = learner.total_optimizer_steps_per_batch
        has_forward = needs_proximal_forward(self.correction, steps, has_auxiliary_loss=balances)
        if learner.routing_replay == "recompute" and not has_forward:
            raise ValueError(
                f"learner.routing_replay = recompute with {steps} optimizer step{'s' * (steps > 1)} per batch and correction.proximal = "
                f"{self.correction.proximal}: no proximal forward runs before training whose routing could be replayed. Set "
                "learner.routing_replay: rollout or none, or have several optimizer steps per batch and correction.proximal: recompute"
            )
        obstacle = fold_obstacle(self.correction, is_deferred=not has_forward and steps == 1, has_auxiliary_loss=True)
        if balances and obstacle is not None:
            raise ValueError(
                f"learner.moe_aux_loss_coefficient = {learner.moe_aux_loss_coefficient} with this correction: {obstacle}. Set it to 0, or "
                "turn batch normalisation and kept counts off"
            )
        return self

    @model_validator(mode="after")
    def _an_alarm_finds_a_valid_correction(self) -> RunConfig:
        """What an alarm would switch to has to fit this run as if it had been configured from the start."""
        place = f"monitor.on_alarm = {self.monitor.on_alarm}" + (f", monitor.preset = {self.monitor.preset}" if self.monitor.preset else "")
        try:
            replacement = self.correction_after_alarm()
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

    def correction_after_alarm(self) -> CorrectionConfig | None:
        """What `monitor.on_alarm` would go on with; None where it changes nothing. Raises: ConfigError if there is no such correction."""
        monitor = self.monitor
        if monitor.on_alarm == "switch_preset" and monitor.preset is not None:
            return switched(self.correction, monitor.preset)
        if monitor.on_alarm == "tighten":
            return tightened(self.correction, monitor.tighten_factor)
        return None

    def batch_arithmetic(self) -> str:
        """How many of what make a step, in one sentence."""
        samples = self.rollout.sampling.samples_per_group
        minibatches = self.learner.optimizer_steps_per_batch
        per_update = self.groups_per_step * samples // minibatches
        updates = "one optimizer step" if minibatches == 1 else f"{minibatches} optimizer steps of {per_update}"
        return (
            f"Each of {self.steps} steps trains on {self.groups_per_step} prompts x {samples} samples = "
            f"{self.groups_per_step * samples} trajectories of up to {self.rollout.sampling.max_tokens} tokens in {updates}; "
            f"at most {(self.max_staleness + 1) * self.groups_per_step} prompts are under way, "
            f"so no token is more than {self.max_staleness} version{'s' * (self.max_staleness != 1)} old."
        )
