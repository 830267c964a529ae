"""One rank of the learner: what an actor wraps. Every rank makes the same calls with the same arguments, in the same order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from evenkeel.correction.batch import CorrectedBatch, PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.correction.loss import broken_tokens, loss_metrics, policy_scale, step_size_factor
from evenkeel.engines import machine as host_memory
from evenkeel.engines.agreement import Processor
from evenkeel.engines.capture import Capture
from evenkeel.engines.operators import head_logits
from evenkeel.learner import model_capture
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf import folder as hf_folder
from evenkeel.learner.hf.folder import is_surplus_allowed
from evenkeel.learner.model import model, parallel
from evenkeel.learner.model.megatron import DistributedDataParallel
from evenkeel.learner.results import Proximal, SkipReason, StepResult, StepValues
from evenkeel.learner.training.logprobs import scaled_logits
from evenkeel.learner.training.optimizer import GuardedOptimizer, Update, mean_norms
from evenkeel.learner.training.step import (
    Abort,
    ObjectiveFunction,
    PassResult,
    attach_schedule,
    correction_objective,
    demonstration_batch,
    first_values,
    optimizer_steps,
    run_microbatches,
    sequences_read,
    settled,
    supervised_objective,
    train_step,
    uncorrected,
)
from evenkeel.learner.weights import checkpoint, convert, export


@dataclass(slots=True)
class _Loaded:
    """What `load` loads or builds."""

    folder: Path
    """Folder that messages name: it may be gone after the load."""
    side_files: dict[str, bytes]
    """Config, tokenizer and the like, for the model folders that rank 0 writes; empty on other ranks."""
    hf_config: Any
    chunks: list[DistributedDataParallel]
    """This rank's part of the model: one chunk of layers, or virtual_pipeline of them."""
    optimizer: GuardedOptimizer


class LearnerRank:
    """A Megatron rank: its model and optimizer, and all calls on them.

    Life: constructed (joins the process group), `load`ed, then any of the other calls, `close`d. The ranks work together in nearly every
    call: one that is not called lets the others wait until collective_timeout_s.
    """

    def __init__(self, config: LearnerConfig, rank: int = 0, world_size: int = 1, master_addr: str = "127.0.0.1", master_port: int = 0):
        """Join the group of ranks.

        Args:
            master_addr, master_port: where rank 0 listens; unused when world_size is 1.
        Raises: ConfigError if the world has another size than the config, or the device isn't there.
        """
        self.config = config.on_this_machine()
        self.placement = parallel.join(self.config, rank, world_size, master_addr, master_port)
        self._loaded: _Loaded | None = None
        self._reference: list[Tensor] | None = None
        self._saving: Future[None] | None = None
        self.abort = Abort()

    # Weights in

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Build the model of a Hugging Face folder with its weights, and a fresh optimizer.

        Raises: DataError naming file, tensor or option if the folder can't be trained.
        """
        hf_config, policies, rounded = self._read(folder)
        chunks = [model.wrap(policy, self.config) for policy in policies]
        optimizer = GuardedOptimizer(chunks, self.config)
        optimizer.set_masters(rounded)
        attach_schedule(chunks, optimizer)
        side_files = hf_folder.side_files(folder) if self.placement.rank == 0 else {}
        self._loaded = _Loaded(Path(folder), side_files, hf_config, chunks, optimizer)
        self._reference = None

    def load_reference(self, folder: str | os.PathLike[str]) -> None:
        """Keep the weights of another folder of the same shape on the CPU, for `reference_logprobs`."""
        parameters = _parameters(self._read(folder, keeps_rounded=False)[1])
        if [parameter.shape for parameter in parameters] != [parameter.shape for parameter in _parameters(self._policies)]:
            raise DataError(f"{folder}: the reference model has other shapes than the model in training, {self._require().folder}")
        dtype = self.config.torch_dtype
        self._reference = [parameter.detach().to("cpu", dtype) for parameter in parameters]

    # What the model says

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """[N] float32, CPU: log pi_theta of each token in the loss mask under the batch's temperature, 0 elsewhere.

        Raises: DataError if the mask holds a sequence's first token.
        """
        return self._forward(batch).logprobs

    def proximal(self, batch: PackedBatch) -> Proximal:
        """What the batch's update is to be anchored to: `logprobs`, and with routing_replay recompute the routing that gave them.

        Raises: DataError as `logprobs`, and if the engine's routing is to be replayed and the batch has none.
        """
        self._check_routes(batch)
        done = self._forward(batch, keep_routes=self.config.routing_replay == "recompute")
        return Proximal(done.logprobs, done.routed_experts, done.routing_agreement)

    def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """[N] float32, CPU: the same under the reference's weights and by its own routing.

        Raises: ConfigError without `load_reference`.
        """
        if self._reference is None:
            raise ConfigError("reference_logprobs: no reference model; call load_reference(folder) first")
        return self.logprobs_with(self._reference, batch.without_routes())

    def logprobs_with(self, weights: list[Tensor], batch: PackedBatch) -> Tensor:
        """`logprobs` under other weights of the model, as `weights_copy` gives them; its own come back untouched."""
        with self._swapped(weights):
            return self._forward(batch).logprobs

    def weights_copy(self) -> list[Tensor]:
        """This rank's own part of the weights, on the CPU."""
        return [parameter.detach().to("cpu", copy=True) for parameter in _parameters(self._policies)]

    def capture(self, batch: PackedBatch) -> tuple[Tensor, Capture]:
        """`logprobs`, and what each operator made of each token, for a comparison with an engine; on one rank."""
        (policy,), settings = self._policies, self.config
        weight = policy.head_weight[: policy.real_vocab_size]

        @torch.no_grad()
        def head(hidden: Tensor) -> Tensor:
            logits = head_logits if settings.batch_invariant else partial(scaled_logits, temperature=1.0)
            return torch.cat([logits(part, weight) for part in torch.split(hidden, settings.logprob_chunk_tokens)])

        self.config = settings.model_copy(update={"shared_prompts": False})
        try:
            return model_capture.capture(policy, convert.HeadShape.of(self._require().hf_config), batch, lambda: self.logprobs(batch), head)
        finally:
            self.config = settings

    def processor(self) -> Processor:
        """What this rank computes with; for true on-policy it has to be what the engines compute with.

        Raises: ConfigError if products depend on the number of rows here.
        """
        return Processor.of_this_process()

    # Training

    def step(self, corrected: CorrectedBatch, correction_config: CorrectionConfig, *, step: int, rate_scale: float = 1.0) -> StepResult:
        """Train on one whole batch; every rank is given all of it and takes its share.

        A batch has optimizer_steps_per_batch minibatches of whole groups; each is one optimizer step, whose denominator is counted on
        the minibatch (correction.for_step), so that each step has a loss of the size of a batch's. A deferred batch has one.
        Args:
            step: number of this batch; with the seed it decides the split into minibatches.
            rate_scale: factor on the learning rate of its optimizer steps, beside that of correction.step_size.
        Raises: ConfigError if a deferred batch is to have several optimizer steps, or a balancing loss would be scaled with the policy's.
        """
        state = self._require()
        if corrected.batch.num_tokens == 0:
            return StepResult.of_nothing(
                step,
                correction_config,
                updates=self.config.total_optimizer_steps_per_batch,
                learning_rate=state.optimizer.learning_rate,
                loss_scale=state.optimizer.loss_scale,
            )
        self._check_routes(corrected.batch, is_training=True)
        shares = optimizer_steps(corrected, correction_config, self.config, step=step)
        objective = correction_objective(correction_config)
        if self.config.reset_optimizer_on_switch:
            state.optimizer.follow(correction_config.model_dump_json())

        def rate_factor(sums: Tensor) -> float:
            return rate_scale * step_size_factor(sums, correction_config)

        factors = partial(policy_scale, config=correction_config), rate_factor
        ready = (settled(one, correction_config, self.logprobs, is_first=number == 0) for number, (_, one) in enumerate(shares))
        done = [self._train(share, objective, *factors, lambda sums: loss_metrics(sums, correction_config)["loss"]) for share in ready]
        first_epoch = len(shares) // self.config.epochs_per_batch
        logprobs, entropies, decided = first_values(corrected, shares[:first_epoch], [one[0] for one in done])
        trained = entropies[corrected.batch.loss_mask]
        sums = torch.stack([one[0].sums for one in done if one[0].sums is not None]).sum(0)
        metrics, updates = loss_metrics(sums, correction_config), [update for _, _, update in done]
        if "step_size_factor" in metrics:  # of the steps, and not that of all of them together
            applied = [step_size_factor(one[0].sums, correction_config) for one in done if one[0].sums is not None]
            metrics["step_size_factor"] = sum(applied) / len(applied)
        host_memory.give_back_now_and_then()
        if self.placement.device.type == "cuda":
            torch.cuda.synchronize(self.placement.device)  # whoever times this call has the optimizer's time in it
        return StepResult(
            step=step,
            loss=sum(loss for _, loss, _ in done) / len(done),
            metrics={name: value for name, value in metrics.items() if name != "loss"},
            values=StepValues(logprobs, decided, entropies),
            entropy=float(trained.double().mean()) if len(trained) else None,
            grad_norms=tuple(update.norm for update in updates if update.skipped is not SkipReason.OVERFLOW),
            group_norms=mean_norms(updates),
            learning_rate=state.optimizer.learning_rate,
            tokens=corrected.batch.num_tokens,
            trained_tokens=int(corrected.batch.loss_mask.sum()),
            kept_tokens=int(decided.keep_mask.sum()),
            broken_tokens=sum(broken_tokens(one[0].sums) for one in done[:first_epoch] if one[0].sums is not None),
            optimizer_steps=sum(update.skipped is None for update in updates),
            skipped=tuple(update.skipped for update in updates if update.skipped is not None),
            loss_scale=state.optimizer.loss_scale,
            microbatches=sum(one[0].microbatches for one in done),
            routing_agreement=_mean([one[0].routing_agreement for one in done[:first_epoch]]),
        )

    def sequences_read(self, batch: PackedBatch | CorrectedBatch, correction: CorrectionConfig | None = None, *, step: int) -> list[int]:
        """Indices of the sequences that this rank computes with: in `step`, by a correction, or in a forward pass over a PackedBatch."""
        return sequences_read(self._require().chunks[0].config, batch, correction, self.config, self.placement, step=step)

    def supervised_step(self, token_ids: Tensor, offsets: Tensor, loss_mask: Tensor) -> float:
        """One optimizer step on the mean cross-entropy of the tokens whose loss_mask is True.

        Args:
            token_ids: [N] int64; offsets: [S + 1] int64; loss_mask: [N] bool, False at first tokens.
        Returns: the loss before the step, nats per token.
        """
        corrected = demonstration_batch(token_ids, offsets, loss_mask)
        return self._train(corrected, supervised_objective, lambda _: 1.0, lambda _: 1.0, lambda sums: float(sums[0]))[1]

    # Weights out

    def weights(self, bucket_bytes: int = 2**28) -> Iterator[dict[str, Tensor]]:
        """All weights under HF names, in pieces of up to bucket_bytes; on ranks other than 0 those of the rank's pipeline stage. Every rank
        must go through all that it is given.

        They may share memory with the model's: nobody may train before they are done with.
        """
        return export.in_pieces(self._weights(), bucket_bytes)

    def weight_checksums(self) -> dict[str, str]:
        """HF name -> checksum, to be compared with an engine's own; on ranks other than 0 those of the rank's pipeline stage."""
        return export.weight_checksums(self._weights())

    def save_hf(self, folder: str | os.PathLike[str]) -> None:
        """Write a Hugging Face folder with the present weights; rank 0 writes, all ranks call."""
        if self.placement.rank == 0:
            export.write_hf_folder(self._weights(), self._require().side_files, folder)
        else:
            deque(self._weights(), maxlen=0)
        self.placement.barrier()

    # Checkpoints

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything that an exact continuation needs, and wait until all ranks have.

        Raises: DataError if the folder is a complete checkpoint already, or can't be written.
        """
        self.begin_save(folder)
        self.is_saved(wait=True)
        self.placement.barrier()

    def begin_save(self, folder: str | os.PathLike[str], hf_folder: str | os.PathLike[str] | None = None) -> None:
        """The same from a copy, written while the ranks go on; all ranks call. An earlier save is waited for, however it ends.

        Args:
            hf_folder: also write a Hugging Face folder, on rank 0, whose memory holds a copy of all weights meanwhile.
        Raises: DataError if the folder is a complete checkpoint already.
        """
        wait([self._saving] if self._saving else [])  # is_saved reports how it ended; raised here, on one rank, the others would wait
        state = self._require()
        write_hf: Callable[[], None] | None = None
        if hf_folder is not None:
            write_hf = export.hf_folder_of_copies(self.weights(), state.side_files, hf_folder, is_writer=self.placement.rank == 0)
        self._saving = checkpoint.save(folder, state.chunks, state.optimizer, state.hf_config, self.placement, afterwards=write_hf)

    def is_saved(self, *, wait: bool = False) -> bool:
        """Whether this rank has finished its last save. Raises: DataError if that save failed; again at each call until the next save."""
        if self._saving is None or not (wait or self._saving.done()):
            return self._saving is None
        try:
            self._saving.result()
        except (OSError, SafetensorError) as error:
            raise DataError(f"learner rank {self.placement.rank}: a checkpoint could not be written: {error}") from error
        return True

    def checkpoint_bytes(self) -> int:
        """Bytes that this rank would write now, and its share of a Hugging Face folder."""
        state = self._require()
        return checkpoint.size_of(state.chunks, state.optimizer, state.hf_config, self.placement)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint of the same model, saved by any layout of ranks; `load` comes first (of any folder of that model).

        Raises: DataError if the folder is no complete checkpoint, or of other shapes.
        """
        state = self._require()
        checkpoint.restore(folder, state.chunks, state.optimizer, state.hf_config, self.placement)

    def close(self) -> None:
        """Free the model and leave the process group; a save under way is finished."""
        self.is_saved(wait=True)
        self._loaded, self._reference = None, None
        parallel.leave()

    @property
    def optimizer(self) -> GuardedOptimizer:
        """The optimizer of the model that is loaded. Raises: ConfigError if there is none."""
        return self._require().optimizer

    # Inside

    def _require(self) -> _Loaded:
        if self._loaded is None:
            raise ConfigError("LearnerRank: no model yet; call load(folder) first")
        return self._loaded

    @property
    def _policies(self) -> list[model.PolicyModel]:
        return [model.unwrap(chunk) for chunk in self._require().chunks]

    def _read(
        self, folder: str | os.PathLike[str], *, keeps_rounded: bool = True
    ) -> tuple[Any, list[model.PolicyModel], list[convert.Rounded]]:
        hf_config, weights = hf_folder.read_config(folder), hf_folder.HFWeights(folder)
        policies = model.build(hf_config, self.config, self.placement)
        rounded = []
        for policy in policies:
            rounded += convert.load(policy, hf_config, weights.__getitem__, self.placement, keeps_rounded=keeps_rounded)
        unread = {name for name in weights.unread if not is_surplus_allowed(name, hf_config)}
        if unread := self.placement.common_to_all(unread):  # a pipeline stage reads its own
            raise DataError(f"{folder}: {len(unread)} tensors have no place in the model, the first is {min(unread)}")
        return hf_config, policies, rounded

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        hf_config = self._require().hf_config
        own = chain.from_iterable(convert.export(policy, hf_config, self.placement) for policy in self._policies)
        return export.of_all_stages(own, self.placement)

    def _check_routes(self, batch: PackedBatch, *, is_training: bool = False) -> None:
        """Raises: DataError if routing is to be replayed, and the batch doesn't have it."""
        source = self.config.routing_replay
        if not batch.has_routes and (source == "rollout" or (source == "recompute" and is_training)):
            giver = "the engine's completions (rollout.engine.return_routed_experts)" if source == "rollout" else "LearnerRank.proximal"
            raise DataError(f"learner.routing_replay = {source}: the batch has no routed_experts to replay; they come from {giver}")

    def _train(
        self,
        corrected: CorrectedBatch,
        objective: ObjectiveFunction,
        gradient_scale: Callable[[Tensor], float],
        rate_scale: Callable[[Tensor], float],
        loss_of: Callable[[Tensor], float],
    ) -> tuple[PassResult, float, Update]:
        """One optimizer step, as learner.training.step.train_step."""
        state = self._require()
        return train_step(
            state.chunks,
            state.optimizer,
            corrected,
            objective,
            gradient_scale=gradient_scale,
            rate_scale=rate_scale,
            loss_of=loss_of,
            config=self.config,
            placement=self.placement,
            abort=self.abort,
        )

    def _forward(self, batch: PackedBatch, *, keep_routes: bool = False) -> PassResult:
        return run_microbatches(
            self._require().chunks,
            uncorrected(replace(batch, topk_ids=None, topk_logprobs=None)),  # nobody asks for them here
            None,
            config=self.config,
            placement=self.placement,
            abort=self.abort,
            keep_routes=keep_routes,
        )

    @contextmanager
    def _swapped(self, weights: list[Tensor]) -> Iterator[None]:
        """A block within which the model has other weights; its own come back untouched, also after an error."""
        parameters = _parameters(self._policies)
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, other in zip(parameters, weights, strict=True):
                parameter.data = other.to(parameter.device)
            yield
        finally:
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = data


def _parameters(policies: list[model.PolicyModel]) -> list[torch.nn.Parameter]:
    return [parameter for policy in policies for parameter in policy.parameters()]


def _mean(values: list[float | None]) -> float | None:
    """Mean of the values that are not None; None if there are none."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
