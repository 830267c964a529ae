"""Which experts a mixture of experts sends each token to: its own choice, or one that is given (routing replay).

Engine and learner compute the router's logits with different kernels and precision; where two experts are nearly equal they choose
differently, and such a token's logprob jumps. Replay takes the choice from elsewhere and leaves the rest to the router: its
probabilities of those experts, and the gradient through them.

* R3, rollout: the engine's choice, while it sampled. R2, recompute: the learner's own, from the forward of the proximal logprobs.

A choice is [rows, layers, k] of expert numbers in the smallest integer type, `routed_experts` of a PackedBatch; row j belongs to the
forward pass that reads token j, so that the last token of a sequence has none.
Source: Ma et al. (2025), "Stabilizing MoE reinforcement learning by aligning training and inference routers" (R3); Zheng et al. (2025),
"Stabilizing reinforcement learning with LLMs: formulation and practices" (R2 beside R3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from correction.batch import PackedBatch
from learner.parallel import Placement


def smallest_type(experts: int) -> torch.dtype:
    """Of an expert's number."""
    return torch.uint8 if experts <= 256 else torch.int16


@dataclass(slots=True)
class RouterChoice:
    """One layer's choice of experts; stands in Megatron's slot `router_replay`, which asks `get_replay_topk` for the top k.

    Megatron's own RouterReplay for that slot puts the routers of all models of a process into one list, a reference's too, and doesn't
    say what a router that replays would have chosen.
    """

    given: Tensor | None = None
    """[rows, k] int64: to be taken in the next forward pass; None: the router chooses."""
    taken: Tensor | None = None
    """[rows, k] int64: of the last forward pass."""
    own: Tensor | None = None
    """[rows, k] int64: what the router itself chose then."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Scores [rows, k], with gradient, and numbers [rows, k] of the experts taken, of scores [rows, experts]."""
        values, self.own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.taken = self.own if self.given is None else self.given
        return (values if self.given is None else scores.gather(1, self.given)), self.taken


class Routing:
    """The routers of a model; [rows, layers, k] of all its layers at once."""

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: a PolicyModel whose every layer has a router.
        """
        self._choices = [RouterChoice() for _ in model.decoder.layers]
        self._type = smallest_type(model.config.num_moe_experts)
        for layer, choice in zip(model.decoder.layers, self._choices, strict=True):
            layer.mlp.router.router_replay = choice

    def replay(self, routed_experts: Tensor | None) -> None:
        """In the next forward pass take these experts; None: the routers' own."""
        for layer, choice in enumerate(self._choices):
            choice.given = None if routed_experts is None else routed_experts[:, layer].long()

    def taken(self) -> Tensor:
        """Of the last forward pass."""
        return self._stacked([choice.taken for choice in self._choices]).to(self._type)

    def agreement(self) -> Tensor:
        """[rows] float32: share of layers in which the routers' own choice was the one taken, in whatever order."""
        own, taken = (self._stacked([getattr(choice, name) for choice in self._choices]).sort(-1).values for name in ("own", "taken"))
        return (own == taken).all(-1).float().mean(-1)

    def forget(self) -> None:
        """Between batches, so that nothing keeps their memory."""
        for choice in self._choices:
            choice.given = choice.taken = choice.own = None

    @staticmethod
    def _stacked(choices: Sequence[Tensor | None]) -> Tensor:
        return torch.stack([choice for choice in choices if choice is not None], 1)


@dataclass(frozen=True, slots=True)
class Routes:
    """What is kept of the routing of one micro-batch of R rows."""

    taken: Tensor | None
    """[R, layers, k]."""
    agreement: Tensor
    """[R] as Routing.agreement."""


def gather_taken(
    routes: Sequence[Routes], row_of_token: Sequence[Tensor], parts: Sequence[Sequence[int]], batch: PackedBatch, placement: Placement
) -> Tensor:
    """[N, layers, k], CPU: where the tokens of a batch were sent, complete on every rank; experts 0 to k - 1 where none was read.

    Args:
        routes, row_of_token: of this rank's micro-batches, with the row in which each token of them is read, or -1.
        parts: the sequences of each.
    """
    first = routes[0].taken
    assert first is not None
    placed = torch.zeros(batch.num_tokens, *first.shape[1:], dtype=torch.int32, device=first.device)  # gloo adds up no int16
    for one, rows, part in zip(routes, row_of_token, parts, strict=True):
        if part and one.taken is not None:
            index = batch.token_index(part).to(rows.device)
            placed[index[rows >= 0]] = one.taken[rows[rows >= 0]].int() + 1  # 0: not read on this rank
    placed = placement.sum_over_data(placed)
    nowhere = torch.arange(placed.shape[-1], dtype=torch.int32, device=placed.device)
    return torch.where(placed > 0, placed - 1, nowhere).to(first.dtype).cpu()


def mean_agreement(routes: Sequence[Routes], parts: Sequence[Sequence[int]], placement: Placement) -> float:
    """Over all rows of all ranks' micro-batches, without those that only keep the others company."""
    sums = torch.zeros(2, dtype=torch.float64, device=placement.device)
    for one, part in zip(routes, parts, strict=True):
        if part:
            sums += torch.stack([one.agreement.double().sum(), sums.new_tensor(len(one.agreement))])
    total, rows = placement.sum_over_data(sums)
    return float(total / rows.clamp(min=1.0))
