"""Megatron's optimizer and learning-rate schedule, in the steps that a guarded update needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.model.megatron import (
    DistributedDataParallel,
    DistributedOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
    param_is_not_shared,
    param_is_not_tensor_parallel_duplicate,
)
from evenkeel.learner.model.model import unwrap
from evenkeel.learner.results import ParameterGroup, SkipReason

GROUPS = {
    ParameterGroup.ROUTER: ".router.",
    ParameterGroup.NORMS: "layernorm",
    ParameterGroup.ATTENTION: ".self_attention.",
    ParameterGroup.MLP: ".mlp.",
    ParameterGroup.EMBEDDING: "embedding.",
    ParameterGroup.LM_HEAD: "output_layer.",
}
"""Groups of parameters -> a part of their Megatron names; the first group that fits counts."""


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one accumulated gradient: applied or skipped. Equal on all ranks."""

    group_norms: dict[str, float]
    """L2 norm of the gradient before clipping, by group of parameters (GROUPS); groups that the model lacks, such as router, are left
    out."""
    skipped: SkipReason | None
    """Why the gradient was not applied; None: it was. After an overflow the norms have no meaning."""

    @property
    def norm(self) -> float:
        """L2 norm of the whole gradient."""
        return math.sqrt(math.fsum(norm * norm for norm in self.group_norms.values()))


def mean_norms(updates: Sequence[Update]) -> dict[str, float]:
    """Mean norm by group of parameters, over the updates whose gradient did not overflow; empty if all did."""
    measured = [update.group_norms for update in updates if update.skipped is not SkipReason.OVERFLOW]
    return {name: math.fsum(norms[name] for norms in measured) / len(measured) for name in (measured[0] if measured else ())}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this rank keeps the optimizer's state of a parameter."""

    adam: torch.optim.Optimizer
    master: Tensor
    """What Adam updates: the parameter, its float32 copy, or a piece of either, laid flat."""
    start: int
    """Index, in the flat parameter, of the first element of `master`."""


class GuardedOptimizer:
    """Adam under Megatron's wrapper. Life of a step: `zero_grad`, backward passes, `finish` (norm, guard, clip, update)."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: LearnerConfig):
        self._chunks = list(chunks)
        self._optimizer = get_megatron_optimizer(_optimizer_config(config), self._chunks)
        self._optimizer.reload_model_params()  # float32 master weights, where they are apart, from the weights just loaded
        self._schedule = _schedule(self._optimizer, config)
        for optimizer in self._optimizer.chained_optimizers:
            if isinstance(optimizer.optimizer, torch.optim.AdamW):
                for group in optimizer.param_groups:
                    group["fused"] = True  # one pass over the weights instead of about ten
        self._warmup_steps = config.warmup_steps
        # The objective that Adam's averages were made under; None: not known.
        self._objective: str | None = None
        # Number of updates made before the averages were last restarted.
        self._begun_at = 0

    @torch.no_grad()
    def set_masters(self, rounded: Iterable[tuple[torch.nn.Parameter, Tensor]]) -> None:
        """Give the float32 masters of parameters in half precision their weights as they were before they were rounded.

        Masters that begin with rounded weights all stand in the middle between two steps of the rounding: nothing that the model computes
        with would change before half a step has added up, which in bfloat16 takes a weight of 0.05 ten updates of 1e-5.
        """
        for parameter, weight in rounded:
            place = self._places.get(parameter)
            if place is not None:  # else all of it is on other data-parallel ranks
                place.master.copy_(weight.flatten()[place.start : place.start + place.master.numel()].view_as(place.master))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Megatron's own: parameters, rates and further options of each group; changed in place."""
        return list(self._optimizer.param_groups)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update."""
        return float(self.param_groups[0]["lr"])

    @property
    def steps(self) -> int:
        """Number of updates made; skipped ones don't count."""
        return int(self._schedule.num_steps)

    @property
    def loss_scale(self) -> float | None:
        """Factor on the next loss; the gradient is divided by it before it is used. None in other types than float16."""
        return None if self._scaler is None else float(self._scaler.scale)

    @property
    def _scaler(self) -> Any:
        """Megatron's loss scaler in float16; None in other types. A model without experts, the only kind in float16, has one optimizer."""
        return getattr(self._optimizer.chained_optimizers[0], "grad_scaler", None)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times loss_scale: Megatron's schedule begins the backward pass with it."""
        return loss if self._scaler is None else loss * self._scaler.scale

    def zero_grad(self) -> None:
        """Clear the gradients in Megatron's buffer and in the optimizer.

        Megatron accumulates in its own buffer, and the optimizer leaves `param.grad` pointing into that buffer. Clearing only the
        buffer lets autograd add the next gradient into it a second time: from the second step on all gradients are doubled, which
        clipping and Adam hide for a while.
        """
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def follow(self, objective: str) -> None:
        """Restart Adam's averages if the coming gradients are of another objective than those so far.

        After an alarm the averages hold the gradients that led to it, and the first average would push on in their direction for 1 / (1 -
        beta1) steps. A fresh Adam moves every weight by the whole learning rate whatever its gradient, so the warm-up starts again, too.
        Source: Asadi, Fakoor, Sabach (2023), Resetting the Optimizer in Deep RL; the warm-up: Ma and Yarats (2021).
        """
        if self._objective not in (None, objective):
            for optimizer in self._optimizer.chained_optimizers:
                for averages in optimizer.optimizer.state.values():
                    for name in averages.keys() & {"exp_avg", "exp_avg_sq", "step"}:
                        averages[name].zero_()
            self._begun_at = self.steps
        self._objective = objective

    @torch.no_grad()
    def finish(self, *, gradient_scale: float = 1.0, rate_scale: float = 1.0, loss_is_finite: bool = True) -> Update:
        """Scale, measure, clip and apply the accumulated gradient, or skip it.

        Skipped are gradients that are not finite, and a gradient that is 0 everywhere, as of a batch whose tokens were all rejected: Adam's
        averages would still move the weights in the direction of earlier steps. (With a balancing loss the gradient isn't 0.)
        In float16 the gradient is first divided by the loss scale, and Megatron's scaler adapts that by what it found.
        The decision rests on numbers that are equal on all ranks (the norm is reduced), so all ranks skip together or none does.
        Args:
            gradient_scale: factor on the gradient that was known only after the last micro-batch.
            rate_scale: factor on the learning rate of this update alone; the schedule's own rate goes on as if it were 1.
        """
        if gradient_scale != 1.0:
            for chunk in self._chunks:
                chunk.scale_gradients(gradient_scale)
        scale = self.loss_scale or 1.0  # by now; what is not finite makes it smaller
        found_infinity = self._optimizer.prepare_grads()
        update = Update(self._group_norms(), None)
        if found_infinity or not loss_is_finite or not math.isfinite(update.norm):
            is_overflow = found_infinity and loss_is_finite and scale > 1.0
            return replace(update, skipped=SkipReason.OVERFLOW if is_overflow else SkipReason.NOT_FINITE)
        if update.norm == 0.0:
            return replace(update, skipped=SkipReason.NO_GRADIENT)
        self._clip(update.norm)
        self._schedule.step(1)  # before the update, so that the first one has a rate above zero
        if self._begun_at and self.steps - self._begun_at < self._warmup_steps:
            reached = min(self.steps, self._warmup_steps)  # the first warm-up may not be over: its factor gives way to the second's
            for group in self.param_groups:
                group["lr"] *= (self.steps - self._begun_at) / reached
        for group in self.param_groups:
            group["lr"] *= rate_scale  # the schedule sets it anew before the next update
        self._optimizer.step_with_ready_grads()  # True: what it could refuse is refused above
        return update

    def _group_norms(self) -> dict[str, float]:
        """L2 norms of the gradients that `prepare_grads` left. Squares are added over ranks; a parameter that several ranks hold counts
        once."""
        sums = torch.zeros(2, len(GROUPS), dtype=torch.float64)  # of squares, and of parameters
        index = {name: i for i, name in enumerate(GROUPS)}
        for optimizer in self._optimizer.chained_optimizers:
            tensor_group = getattr(optimizer, "tp_group", None)
            parameters = [
                p
                for p in optimizer.get_parameters()
                if p.grad is not None and param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, tensor_group)
            ]
            part = sums.new_zeros(sums.shape)
            if parameters:
                norms = torch.stack(torch._foreach_norm([p.grad for p in parameters])).double().cpu()
                groups = torch.tensor([index[self._groups[id(p)]] for p in parameters])
                part[0].index_add_(0, groups, norms.square())
                part[1].index_add_(0, groups, torch.ones_like(norms))
            group = optimizer.get_grad_stats_parallel_group()
            if dist.get_world_size(group) > 1:
                part = part.to(next(self._chunks[0].parameters()).device)
                dist.all_reduce(part, group=group)
            sums += part.cpu()
        return {name.value: math.sqrt(sums[0, i]) for name, i in index.items() if sums[1, i]}  # plain strings, as files hold them

    @cached_property
    def _groups(self) -> dict[int, ParameterGroup]:
        """id() of the tensor that Adam updates -> the group of its parameter."""
        names = {parameter: name for chunk in self._chunks for name, parameter in unwrap(chunk).named_parameters()}
        return {id(place.master): _group_of(names[parameter]) for parameter, place in self._places.items()}

    # What a checkpoint keeps

    @property
    def is_distributed(self) -> bool:
        """Whether data-parallel ranks have different parts of the state."""
        return any(isinstance(one, DistributedOptimizer) for one in self._optimizer.chained_optimizers)

    def state_of(self, parameter: torch.nn.Parameter) -> tuple[int, dict[str, Tensor]]:
        """The state that this rank keeps for a parameter, by kind, and the index of the parameter's first element that it is for.

        Kinds: Adam's averages and its number of updates (a scalar), and `master` where the weight itself is in half precision.
        """
        place = self._places.get(parameter)
        if place is None:  # all of it is on other data-parallel ranks
            return 0, {}
        states = {kind: value for kind, value in place.adam.state.get(place.master, {}).items() if isinstance(value, Tensor)}
        if place.master.dtype != parameter.dtype:
            states["master"] = place.master
        return place.start, states

    @torch.no_grad()
    def set_state(self, parameter: torch.nn.Parameter, states: dict[str, Tensor]) -> None:
        """Set a parameter's state; to be called after its weight is set. The states are for the whole parameter; this rank takes its
        piece."""
        place = self._places.get(parameter)
        if place is None:
            return
        stop = place.start + place.master.numel()

        def kept(whole: Tensor) -> Tensor:
            return whole.flatten()[place.start : stop].view_as(place.master)

        place.master.copy_(kept(states.pop("master", parameter)))
        place.adam.state[place.master] = {
            kind: (kept(value) if value.dim() else value).to(place.master.device, copy=True) for kind, value in states.items()
        }

    def schedule_state(self) -> dict[str, Any]:
        """State of the learning rate, the objective of Adam's averages, and the loss scale, as plain values."""
        state = {**self._schedule.state_dict(), "objective": self._objective, "begun_at": self._begun_at}
        if self._scaler is not None:
            state["loss_scale"] = self._scaler.state_dict() | {"scale": self.loss_scale}
        return state

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        self._schedule.num_steps = 0  # load_state_dict adds the saved number; the present recipe wins over the saved one
        self._schedule.load_state_dict(state)
        self._objective, self._begun_at = state.get("objective"), state.get("begun_at", 0)
        if self._scaler is not None and "loss_scale" in state:  # of a checkpoint in another type there is none
            scale = torch.tensor([state["loss_scale"]["scale"]], dtype=torch.float32)
            self._scaler.load_state_dict(state["loss_scale"] | {"scale": scale})

    @cached_property
    def _places(self) -> dict[torch.nn.Parameter, _Place]:
        """Where this rank keeps the state of each parameter."""
        places = {}
        for one in self._optimizer.chained_optimizers:
            if isinstance(one, DistributedOptimizer):
                for parameter, (group, index) in one.model_param_group_index_map.items():
                    start = one._get_model_param_range_map(parameter)["param"].start
                    places[parameter] = _Place(one.optimizer, one.optimizer.param_groups[group]["params"][index], start)
            else:
                masters = {id(master) for group in one.optimizer.param_groups for master in group["params"]}
                for parameter in chain.from_iterable(chunk.parameters() for chunk in self._chunks):
                    master = getattr(parameter, "main_param", parameter)
                    if id(master) in masters:
                        places[parameter] = _Place(one.optimizer, master, 0)
        return places

    def _clip(self, norm: float) -> None:
        for optimizer in self._optimizer.chained_optimizers:
            if optimizer.config.clip_grad > 0 and not optimizer.is_stub_optimizer:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), optimizer.config.clip_grad, norm)


def _group_of(name: str) -> ParameterGroup:
    """The group of a Megatron parameter."""
    return next(group for group, part in GROUPS.items() if part in name)


def _optimizer_config(config: LearnerConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.resolved_dtype == "bfloat16",
        fp16=config.resolved_dtype == "float16",
        initial_loss_scale=config.initial_loss_scale,
        params_dtype=config.torch_dtype,
        use_distributed_optimizer=config.distributed_optimizer,
    )


def _schedule(optimizer: Any, config: LearnerConfig) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps or config.warmup_steps + 1,  # unused by a constant rate, but it must exceed the warm-up
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # on resume the recipe's settings win, and the step count is kept
    )
