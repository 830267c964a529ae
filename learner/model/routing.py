"""Which experts a mixture of experts sends each token to: its own choice, or one that is given (routing replay).

Engine and learner compute the router's logits with different kernels and precision; where two experts are nearly equal they choose
differently, and such a token's logprob jumps. Replay takes the choice from elsewhere and leaves the rest to the router: its
probabilities of those experts, and the gradient through them.

* R3, rollout: the engine's choice, while it sampled. R2, recompute: the learner's own, from the forward of the proximal logprobs.

A choice is [rows, layers, k] of expert numbers in the smallest integer type, `routed_experts` of a PackedBatch; row j belongs to the
forward pass that reads token j, so that the last token of a sequence has none.
Source: Ma et al. (2025), "Stabilizing MoE reinforcement learning by aligning training and inference routers" (R3); Zheng et al. (2025),
"Stabilizing reinforcement learning with LLMs: formulation and practices" (R2 compared with R3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.learner.model.parallel import Placement


def smallest_type(experts: int) -> torch.dtype:
    """The smallest integer type that holds the index of an expert."""
    return torch.uint8 if experts <= 256 else torch.int16


@dataclass(slots=True)
class Routes:
    """The experts of one micro-batch on this rank: those that its routers are given, and those that they took.

    Passed through the model with the rows, because a pipeline's schedule and the recomputation of activations come back to a micro-batch
    in an order of their own.
    """

    rows: range
    """Rows of the micro-batch that this rank's routers see."""
    given: Tensor | None
    """[rows, layers, k]: the experts to be taken; None: the routers choose."""
    keeps_taken: bool
    taken: dict[int, Tensor] = field(default_factory=dict)
    """Experts by layer of the whole model: [rows, k], where they are kept."""
    agrees: dict[int, Tensor] = field(default_factory=dict)
    """Agreement by layer: [rows] bool, whether the router's own choice was the one taken, in whatever order."""

    @classmethod
    def of(cls, given: Tensor | None, rows: int, placement: Placement, *, shares_rows: bool, keeps_taken: bool) -> Routes:
        """
        Args:
            given: [R, layers, k] of all R = `rows` rows of the micro-batch.
            shares_rows: tensor-parallel ranks see a part of them each.
        """
        count = rows // placement.tensor_parallel if shares_rows else rows
        first = placement.tensor_rank * count if shares_rows else 0
        own = range(first, first + count)
        return cls(own, None if given is None else given[own.start : own.stop], keeps_taken)

    def are_here(self, rows: Tensor) -> Tensor:
        """[n] bool: which of the micro-batch's rows are among this rank's."""
        return (rows >= self.rows.start) & (rows < self.rows.stop)


@dataclass(slots=True)
class RouterChoice:
    """One layer's choice of experts; stands in Megatron's slot `router_replay`, which asks `get_replay_topk` for the top k.

    Megatron's own RouterReplay for that slot puts the routers of all models of a process into one list, a reference's too, and doesn't
    say what a router that replays would have chosen.
    """

    layer: int
    """Index in the whole model."""
    type: torch.dtype
    """Integer type in which the experts' indices are kept."""
    routes: Routes | None = None
    """The experts of the rows that the layer reads; None: nobody asks for them or gives them."""

    def attach(self, layer: torch.nn.Module) -> None:
        """Attach this to a transformer layer with a router."""

        def read_routes(_: Any, inputs: Any, options: dict[str, Any]) -> None:
            self.routes = options["packed_seq_params"].routes

        layer.register_forward_pre_hook(read_routes, with_kwargs=True)
        layer.mlp.router.router_replay = self  # type: ignore[union-attr]

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Scores [rows, k], with gradient, and numbers [rows, k] of the experts taken, of scores [rows, experts]."""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes, self.routes = self.routes, None
        assert routes is not None, "read_routes has run"
        taken = own if routes.given is None else routes.given[:, self.layer].long()
        routes.agrees[self.layer] = (own.sort(-1).values == taken.sort(-1).values).all(-1)
        if routes.keeps_taken:
            routes.taken[self.layer] = taken.to(self.type)
        return (values if routes.given is None else scores.gather(1, taken)), taken


def gather_taken(
    routes: Sequence[Routes],
    row_of_token: Sequence[Tensor],
    parts: Sequence[Sequence[int]],
    batch: PackedBatch,
    layers: int,
    placement: Placement,
) -> Tensor:
    """[N, layers, k], CPU: experts that each token of a batch was routed to, complete on every rank; 0 to k - 1 for a token that wasn't
    read.

    Args:
        routes, row_of_token: of this rank's micro-batches, with the row in which each token of them is read, or -1.
        parts: the sequences of each.
        layers: of the whole model.
    """
    first = next(iter(routes[0].taken.values()))
    placed = torch.zeros(batch.num_tokens, layers, first.shape[-1], dtype=torch.int32, device=first.device)  # gloo adds up no int16
    for one, rows, part in zip(routes, row_of_token, parts, strict=True):
        if part:
            here = one.are_here(rows)
            index, own = batch.token_index(part).to(rows.device)[here], rows[here] - one.rows.start
            for layer, taken in one.taken.items():
                placed[index, layer] = taken[own].int() + 1  # 0: not read on this rank
    placed = placement.sum_over_all(placed)  # a row of a layer is on one rank
    nowhere = torch.arange(placed.shape[-1], dtype=torch.int32, device=placed.device)
    return torch.where(placed > 0, placed - 1, nowhere).to(first.dtype).cpu()


def mean_agreement(routes: Sequence[Routes], row_of_token: Sequence[Tensor], parts: Sequence[Sequence[int]], placement: Placement) -> float:
    """Mean of `agrees` over layers and over the rows of all ranks' micro-batches in which a token is read; padding rows don't count."""
    sums = torch.zeros(2, dtype=torch.float64, device=placement.device)
    for one, rows, part in zip(routes, row_of_token, parts, strict=True):
        if part:
            own = torch.unique(rows[one.are_here(rows)]) - one.rows.start
            agrees = torch.stack([of_layer[own] for of_layer in one.agrees.values()])
            sums += torch.stack([agrees.double().sum(), sums.new_tensor(agrees.numel())])
    total, count = placement.sum_over_all(sums)
    return float(total / count.clamp(min=1.0))
