"""Settings of the learner: how many ranks, on what, with which optimizer, in pieces of what size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from evenkeel.correction.settings.base import Settings
from evenkeel.correction.settings.parts import CorrectionSettings
from evenkeel.correction.settings.schedule import defers, needs_proximal_forward
from evenkeel.engines.machine import Device, Dtype, DtypeSetting, decided, device_of, dtype_of, is_open

if TYPE_CHECKING:  # reading settings must not cost the import of torch
    import torch


# Settings of Megatron that the learner doesn't support, with the reason; only 1 is allowed.
_NOT_BUILT = {
    "context_parallel": "a sequence's keys are all on one rank: rows of packed sequences and of shared prompts can't be spread over ranks. "
    "Leave it out; for long sequences use tensor_parallel with sequence_parallel: true, and recompute_activations: true",
}


class LearnerConfig(Settings):
    """How a corrected batch becomes new weights."""

    DERIVED: ClassVar[frozenset[str]] = frozenset(
        {"dtype", "layers", "batch_invariant", "distributed_optimizer", "learning_rate", "tokens_per_microbatch", "threads"}
    )
    ALWAYS_DERIVED: ClassVar[frozenset[str]] = frozenset({"collective_timeout_s"})

    data_parallel: int = Field(default=1, ge=1, le=10**5)
    """Copies of the model that share a batch; each rank takes whole sequences of about equal cost."""
    distributed_optimizer: bool = False
    """Divide Adam's averages and the master weights over the data-parallel ranks, instead of keeping all on each: with R ranks 1/R of the
    memory; experts over those that hold the same ones. Unset: on for a run on GPUs where several ranks hold the same."""
    tensor_parallel: int = Field(default=1, ge=1, le=10**4)
    """Ranks over which one copy's matrices are split."""
    sequence_parallel: bool = False
    """Between the matrix products, also split the tokens of a pass over the tensor-parallel ranks; this saves activation memory."""
    pipeline_parallel: int = Field(default=1, ge=1, le=10**4)
    """Stages, of equally many layers, that one copy is cut into; micro-batches pass through them (1F1B)."""
    virtual_pipeline: int = Field(default=1, ge=1, le=10**4)
    """Chunks of layers in each stage (interleaved 1F1B): with V chunks the stages wait 1/V as long, and send V times as much."""
    expert_parallel: int = Field(default=1, ge=1, le=10**5)
    """Ranks of a stage over which its experts are spread; tokens travel to them. Divides data_parallel * tensor_parallel."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a rank computes; auto is cuda where this machine, or the cluster of ray.address, has a GPU. A run decides that when it
    starts, and its config.yaml has what was decided: a resumed run computes where it computed."""
    gpus_per_rank: float = Field(default=1.0, gt=0, le=1)
    """Share of a GPU that a rank asks for, and the share of its memory that it may take. Below 1 an engine fits on the same GPU."""
    dtype: DtypeSetting = "auto"
    """Type of weights and activations; auto is bfloat16 on a GPU and float32 on a CPU, bfloat16_if_fast also on a CPU that multiplies in it
    (avx512_bf16, AMX), which takes half of float32's time: engine and learner then differ by more, and the correction bears it. In half
    precision the optimizer keeps float32 master weights. float16 has eight times bfloat16's precision but a small range: the loss is
    multiplied by a scale that adapts, and updates whose gradient overflows are skipped."""
    initial_loss_scale: float = Field(default=2.0**16, ge=1.0, le=2.0**32)
    """float16: factor on the loss at the start. Megatron's scaler halves it after overflows and doubles it after 1,000 updates without."""
    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    """Norms and linear layers: Megatron's own (local), or TransformerEngine's. auto takes TransformerEngine's for bfloat16 and float16 on
    a GPU, if they are installed and can honour the other settings."""
    float32_head: bool = False
    """Compute the output head in float32 even if the weights are bfloat16; this takes a float32 copy of the head's matrix during a pass."""
    batch_invariant: bool = False
    """Batch-invariant operators, for true on-policy training. In a run this follows from true_on_policy, for engines and learner alike."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each rank. Unset: 1, for ranks and engines share cores; in a synchronous run on this machine, where they take turns,
    all of up to 8 cores, over the ranks."""
    seed: int = 1234
    """Seed of the ranks' random generators and of the split into minibatches."""

    learning_rate: float = Field(default=1e-4, ge=0, le=1.0)
    """Peak learning rate: about how far Adam moves each weight in a step. Unset: a run has 1e-4 for a model that `evenkeel init-model` has
    made from nothing, and 1e-6 for any other, which counts as pretrained (docs/tasks.md has usual values)."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    warmup_steps: int = Field(default=0, ge=0, le=10**9)
    """Optimizer steps over which the rate rises linearly; step k of them uses learning_rate * k / warmup_steps."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    decay_steps: int | None = Field(default=None, ge=1, le=10**9)
    """Optimizer step, warm-up included, at which min_learning_rate is reached; needed unless decay is constant."""
    weight_decay: float = Field(default=0.0, ge=0, le=1.0)
    """Decoupled weight decay of matrices; biases and norms have none."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's averaging factors. 0.99 rather than 0.999: RL gradients change within tens of steps."""
    adam_eps: float = Field(default=1e-8, gt=0, le=1.0)
    """Adam's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient; 0 never clips."""
    reset_optimizer_on_switch: bool = False
    """Restart Adam's averages and the warm-up when the correction of the batches changes, as after an alarm that replaces it."""

    optimizer_steps_per_batch: int = Field(default=1, ge=1, le=10**6)
    """Minibatches, of whole groups, that a batch is split into; each is one optimizer step."""
    epochs_per_batch: int = Field(default=1, ge=1, le=1000)
    """Passes over each batch; 2 epochs of 4 minibatches are 8 optimizer steps."""
    tokens_per_microbatch: int = Field(default=2048, ge=1)
    """Positions computed in one forward and backward pass on a rank; a sequence is never split, so a longer one is a pass of its own. A run
    on GPUs has 8,192 unless this is set."""
    recompute_activations: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again: a third more work, far less memory."""
    shared_prompts: bool = True
    """Compute the prompt of a group once for all its answers; not on GPUs in half precision."""
    moe_aux_loss_coefficient: float = Field(default=0.0, ge=0)
    """Weight of Megatron's load-balancing loss, of each micro-batch's routing, in the loss of a mixture of experts; 0: none."""
    routing_replay: Literal["none", "rollout", "recompute"] = "none"
    """How a mixture of experts routes tokens in the proximal forward and in training. none: the learner's own choice each time. rollout
    (R3): the engine's choice while it sampled. recompute (R2): training repeats the choice of the proximal forward."""
    report_kl_every: int = Field(default=0, ge=0, le=10**9)
    """Report the KL to the model that the run began with every so many steps; each report takes a forward pass of that model over the
    batch. 0: never. It isn't part of the loss. With a KL penalty on that model (correction.kl) the penalty's own KL is reported, at every
    step."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Number of tokens whose logits are in memory at the same time; bounds the memory of the output head."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a collective fails if some rank has not joined it: in a run a minute more than a step or a checkpoint may take,
    so that no rank fails while it waits for a slower one."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, settings: Any) -> Any:
        for name, reason in _NOT_BUILT.items():
            if isinstance(settings, dict) and settings.get(name) not in (None, 1):
                raise ValueError(f"{name} = {settings[name]}: {reason}")
        return {name: value for name, value in settings.items() if name not in _NOT_BUILT} if isinstance(settings, dict) else settings

    @model_validator(mode="after")
    def _check_sequence_parallel(self) -> Self:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel = true with tensor_parallel = 1: there are no ranks to share rows; set it to false")
        return self

    @model_validator(mode="after")
    def _check_virtual_pipeline(self) -> Self:
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline = {self.virtual_pipeline} with pipeline_parallel = 1: one stage has nobody to wait for; set it to 1"
            )
        return self

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{betas}: an average needs factors of at least 0 and below 1")
        return betas

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(f"decay = {self.decay} needs decay_steps: the optimizer step at which min_learning_rate is reached")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps = {self.decay_steps} must exceed warmup_steps = {self.warmup_steps}: it counts from the start")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate = {self.min_learning_rate} is above learning_rate = {self.learning_rate}")
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.data_parallel * self.tensor_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel = {self.expert_parallel} must divide data_parallel x tensor_parallel = {self.data_parallel} x "
                f"{self.tensor_parallel}: a stage's experts are spread over its ranks"
            )
        return self

    @model_validator(mode="after")
    def _check_batch_invariant(self) -> Self:
        if self.batch_invariant and self.sequence_parallel:
            raise ValueError("batch_invariant = true with sequence_parallel = true is not supported; set sequence_parallel: false")
        if self.batch_invariant and self.float32_head:
            raise ValueError("batch_invariant = true with float32_head = true: the engines have no float32 head; set float32_head: false")
        if self.batch_invariant and self.dtype == "float16":
            raise ValueError("batch_invariant = true with dtype = float16: only float32 and bfloat16 are supported; set dtype: bfloat16")
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.layers == "transformer_engine" and not is_open(self.dtype) and self.needs_local_layers:  # otherwise when that is decided
            raise ValueError(f"layers = transformer_engine: {self.needs_local_layers}. Or set layers: auto")
        return self

    @property
    def needs_local_layers(self) -> str | None:
        """The setting that TransformerEngine's layers can't honour, with the reason; None if they can honour all."""
        if self.batch_invariant:
            return "batch_invariant = true (true_on_policy): its products and norms are not batch-invariant"
        if self.resolved_dtype == "float32":
            return "dtype = float32: it multiplies float32 matrices in TF32, with 10 bits of mantissa. Set dtype: bfloat16"
        return None

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that hold the same experts: data-parallel and tensor-parallel ones, of which each has whole experts."""
        return self.data_parallel * self.tensor_parallel // self.expert_parallel

    def has_copies(self, *, has_experts: bool) -> bool:
        """Whether several ranks hold the same parameters, over which an optimizer can be divided. Args: has_experts: of the model."""
        return self.data_parallel > 1 or (has_experts and self.expert_copies > 1)

    @property
    def total_optimizer_steps_per_batch(self) -> int:
        """Optimizer steps that one batch takes: minibatches times epochs."""
        return self.optimizer_steps_per_batch * self.epochs_per_batch

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether the model adds a loss of its own (balancing of experts)."""
        return self.moe_aux_loss_coefficient > 0

    def needs_proximal_forward(self, correction: CorrectionSettings) -> bool:
        """Whether a batch of this correction needs a forward of its own for the proximal logprobs."""
        return needs_proximal_forward(correction, self.total_optimizer_steps_per_batch, has_auxiliary_loss=self.has_auxiliary_loss)

    def defers(self, correction: CorrectionSettings) -> bool:
        """Whether a batch of this correction is deferred: the training forward gives its proximal logprobs."""
        return defers(correction, self.total_optimizer_steps_per_batch, has_auxiliary_loss=self.has_auxiliary_loss)

    @property
    def resolved_device(self) -> Device:
        """The device, once it is decided: by a run for all ranks, before any of them starts. Raises: ConfigError before."""
        return decided(self.device, "learner.device")

    @property
    def resolved_dtype(self) -> Dtype:
        """The dtype, once it is decided. Raises: ConfigError before."""
        return decided(self.dtype, "learner.dtype")

    def on_this_machine(self) -> Self:
        """These settings for a learner without a run: device and dtype, where they are auto, by what this process finds."""
        if not is_open(self.device, self.dtype):
            return self
        device = device_of(self.device)
        return self.model_copy(update={"device": device, "dtype": dtype_of(self.dtype, device)})

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.resolved_dtype)
        return dtype
