"""What two engines computed at each operator, for the same tokens: where they differ, and by how much.

A capture maps a place, such as the attention of layer 3, to what its operator made of each token. Operators are named alike on both
sides (`ORDER`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from evenkeel.correction.errors import EngineError, counted

ORDER = (
    "embedding",
    "residual", "norm", "qkv", "q_norm", "k_norm", "rotary_q", "rotary_k", "attention", "projection", "attention_norm",
    "mlp_residual", "mlp_norm", "gate_up", "silu", "down", "feed_forward_norm",
    "final_residual", "final_norm", "logits",
)  # fmt: skip
"""Operators in the order of computation, the middle ones in each layer: "residual" is the sum that enters a norm before the attention (not
the first), rotary_q and rotary_k are what enters the attention. Norms are those that a family has; of a mixture of experts nothing is
between mlp_norm and the next layer."""

FUSED = frozenset({"q_norm", "k_norm"})
"""Operators that SGLang may compute by one kernel for queries and keys on a GPU, and in some families everywhere, without calling their
modules: hooks don't see them."""


class OperatorPlace(NamedTuple):
    """Where in the model something is computed."""

    operator: str
    """One of ORDER."""
    layer: int | None = None
    """None: before or after the layers."""

    def __str__(self) -> str:
        return self.operator if self.layer is None else f"layers.{self.layer}.{self.operator}"


def _order(place: OperatorPlace) -> tuple[int, int]:
    """Sorts places in the order of computation."""
    operator = ORDER.index(place.operator)
    if place.layer is not None:
        return place.layer, operator
    return (-1, operator) if operator == 0 else (10**9, operator)


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """What one operator made of R tokens, one of them perhaps several times."""

    token: Tensor
    """[R] int64: index of each in the packed batch."""
    values: Tensor
    """[R, width]."""


Capture = Mapping[OperatorPlace, CapturedRows]


@dataclass(frozen=True, slots=True)
class OperatorGap:
    """One place of both captures."""

    place: OperatorPlace
    rows: int
    """Compared."""
    differing: int
    """Rows that are not equal bit by bit."""
    largest: float
    """Largest absolute difference; infinite if one side is not a number."""
    first_token: int | None
    """Index in the packed batch of the first row that differs."""


def compare_captures(engine: Capture, learner: Capture, fused: Collection[str] = ()) -> list[OperatorGap]:
    """Gaps in the order of computation; the first that differs is the operator where the difference begins.

    Args:
        engine: tokens in any order, some perhaps several times; learner: each token at most once.
        fused: operators that the engine need not show. They aren't compared then: their difference is in the next one.
    Raises: EngineError if another place is on one side only, or the sides have no token in common there.
    """
    alone = engine.keys() ^ learner.keys()
    if others := [place for place in alone if place in engine or place.operator not in fused]:
        first, engines = min(others, key=_order), sum(place in engine for place in others)
        where = f"{counted(engines, 'place')} in SGLang alone, {len(others) - engines} in Megatron alone"
        raise EngineError(f"captures: {where}, the first is {first}: the model's layers have other names than expected")
    return [_gap(place, engine[place], learner[place]) for place in sorted(engine, key=_order)]


def _gap(place: OperatorPlace, engine: CapturedRows, learner: CapturedRows) -> OperatorGap:
    row_of = torch.full((1 + int(torch.cat([engine.token, learner.token]).max()),), -1)
    row_of[learner.token] = torch.arange(len(learner.token))
    other = row_of[engine.token]
    token, left, right = engine.token[other >= 0], engine.values[other >= 0], learner.values[other[other >= 0]]
    if len(token) == 0 or left.shape != right.shape:
        raise EngineError(f"captures: {place}: {tuple(left.shape)} against {tuple(right.shape)}: no common tokens, or other widths")
    differs = (left != right).any(-1)  # by value: the two zeros are one number, and not-a-number equals nothing
    largest = (left.double() - right.double()).abs().nan_to_num(nan=torch.inf)[differs]
    return OperatorGap(
        place,
        rows=len(token),
        differing=int(differs.sum()),
        largest=float(largest.max()) if len(largest) else 0.0,
        first_token=int(token[differs].min()) if len(largest) else None,
    )


def sequence_start(sequences: Sequence[Sequence[int]], positions: Sequence[int], token_ids: Sequence[int]) -> int | None:
    """First index, in the packed batch, of the sequence that has these tokens at these positions; None if there is none."""
    start = 0
    for tokens in sequences:
        if max(positions) < len(tokens) and all(tokens[at] == token for at, token in zip(positions, token_ids, strict=True)):
            return start
        start += len(tokens)
    return None
