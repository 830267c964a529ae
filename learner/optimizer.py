"""Megatron's optimizer and learning-rate schedule, in the steps that a guarded update needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from learner.config import LearnerConfig
from learner.megatron import (
    DistributedDataParallel,
    DistributedOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter's state is kept."""

    adam: torch.optim.Optimizer
    master: Tensor
    """What Adam updates: the parameter, its float32 copy, or a piece of either, laid flat."""
    start: int
    """First element of the parameter that `master` is for."""


class GuardedOptimizer:
    """Adam under Megatron's wrapper. Life of a step: `zero_grad`, backward passes, `finish` (norm, guard, clip, update)."""

    def __init__(self, model: DistributedDataParallel, config: LearnerConfig):
        self._model = model
        self._optimizer = get_megatron_optimizer(_optimizer_config(config), [model])
        self._optimizer.reload_model_params()  # float32 master weights, where they are apart, from the weights just loaded
        self._schedule = _schedule(self._optimizer, config)

    @property
    def learning_rate(self) -> float:
        """Of the last update."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def steps(self) -> int:
        """Updates made; a skipped step is none."""
        return int(self._schedule.num_steps)

    def zero_grad(self) -> None:
        """Forget all gradients: both of them.

        Megatron accumulates in its own buffer, and the optimizer leaves `param.grad` pointing into that buffer. Clearing only the
        buffer lets autograd add the next gradient into it a second time: from the second step on all gradients are doubled, which
        clipping and Adam hide for a while.
        """
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def finish(self, *, gradient_scale: float = 1.0, loss_is_finite: bool = True) -> tuple[float, bool]:
        """Scale, measure, clip and apply the accumulated gradient, or skip it.

        Skipped is what is not finite, and a gradient that is 0 everywhere, of a batch that was rejected to the last token: there is nothing
        to learn from it, but Adam's averages would go on in the direction of earlier steps.
        The decision rests on numbers that are equal on all ranks (the norm is reduced), so all ranks skip together or none does.
        Args:
            gradient_scale: factor on the gradient that was known only after the last micro-batch.
        Returns: norm of the whole gradient before clipping, and whether the weights changed.
        """
        if gradient_scale != 1.0:
            self._model.scale_gradients(gradient_scale)
        found_infinity = self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if found_infinity or not loss_is_finite or not math.isfinite(norm) or norm == 0.0:
            return norm, False
        self._clip(norm)
        self._schedule.step(1)  # before the update, so that the first one has a rate above zero
        return norm, bool(self._optimizer.step_with_ready_grads())

    # What a checkpoint keeps

    @property
    def is_distributed(self) -> bool:
        """Whether data-parallel ranks have different parts of the state."""
        return any(isinstance(one, DistributedOptimizer) for one in self._optimizer.chained_optimizers)

    def state_of(self, parameter: torch.nn.Parameter) -> tuple[int, dict[str, Tensor]]:
        """What this rank keeps for a parameter, by kind, and the first element of it that this is for.

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
        """The inverse, after the weight itself; the states are for the whole parameter, of which this rank takes what it keeps."""
        place = self._places.get(parameter)
        if place is None:
            return
        stop = place.start + place.master.numel()

        def kept(whole: Tensor) -> Tensor:
            return whole.flatten()[place.start : stop].view_as(place.master)

        place.master.copy_(kept(states.pop("master", parameter)))
        place.adam.state[place.master] = {
            kind: value.clone() if value.dim() == 0 else kept(value).to(place.master.device, copy=True) for kind, value in states.items()
        }

    def schedule_state(self) -> dict[str, Any]:
        """Of the learning rate; plain numbers."""
        return dict(self._schedule.state_dict())

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        self._schedule.num_steps = 0  # it adds the saved ones; and what a recipe says now wins over what it said then
        self._schedule.load_state_dict(state)

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
                for parameter in self._model.parameters():
                    master = getattr(parameter, "main_param", parameter)
                    if id(master) in masters:
                        places[parameter] = _Place(one.optimizer, master, 0)
        return places

    def _clip(self, norm: float) -> None:
        for optimizer in self._optimizer.chained_optimizers:
            if optimizer.config.clip_grad > 0 and not optimizer.is_stub_optimizer:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), optimizer.config.clip_grad, norm)


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
        bf16=config.dtype == "bfloat16",
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
