"""The packed batch: what rollouts hand over, what the correction annotates, what the learner trains on.

Sequences lie end to end in flat tensors: N tokens in all, S sequences, sequence i is [offsets[i], offsets[i + 1]).
A per-token value belongs to the token at its own index: behavior_logprobs[j] is log mu(token j | tokens before j).
Nothing is changed in place after hand-over; `replace` and `select` make new batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .checks import VERSIONS, check_batch_shapes, check_decision_shapes, check_not_positive, largest_logprob
from .errors import DataError
from .padding import pack_like, to_padded
from .settings.parts import AdvantageConfig, CorrectionSettings
from .wide import WidePlace, check_fields, kept_of, kept_rows, routed_experts_of, topk_of

_LOGPROBS = ("behavior_logprobs", "at_sampling_logprobs", "proximal_logprobs", "reference_logprobs", "topk_logprobs")
NO_VERSION = -1
"""weight_versions of a token that no weights sampled."""
CPU_TOKENS = 2**19
"""About how many tokens `batch_slices` puts in a part on a CPU: smaller parts cost more in calls than they save in cache misses."""
_NOT_PER_TOKEN = ("offsets", "group_ids", "rollout_ids", "kept_counts", "kept_ids")
_COUNTED_FROM_0 = "counted from 0 (-1: no weights sampled the token). Number the weights by their updates, not by time"
UNIT_COUNTS = ("units", "truncated", "truncated_positive", "truncated_negative", "masked", "masked_positive", "masked_negative")
"""Units that have an importance weight; those whose weight was cut to a bound, or set to 0; of these, by the sign of the advantage."""


def _detach(record: Any) -> None:
    """Take gradients off the tensors of a frozen dataclass: they are data. One through pi_prox would cancel the surrogate's own, and one
    through advantages would train a critic with the policy's loss, while the loss stays the same number."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor) and value.requires_grad:
            object.__setattr__(record, field.name, value.detach())


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """S sequences of prompt and response, N tokens in all. Tensors are detached on the way in."""

    token_ids: Tensor
    """[N] int64."""
    offsets: Tensor
    """[S + 1] int64, first 0, last N, not decreasing."""
    loss_mask: Tensor
    """[N] bool: tokens that the policy produced and that are trained; prompt and tool tokens are False."""
    behavior_logprobs: Tensor
    """[N] float32, nats, under the sampling temperature; any value where loss_mask is False."""
    advantages: Tensor
    """[N] float32, constant over a sequence unless the estimator says otherwise."""
    weight_versions: Tensor
    """[N] int32: version of the weights that sampled the token; NO_VERSION where none did."""
    group_ids: Tensor
    """[S] int64: sequences of one prompt share an id."""
    rollout_ids: Tensor | None = None
    """[S] int64: sequences of one rollout, as of a sub-agent or after a history was compacted, share an id, and lie in one shard. A token
    is in the loss mask of the sequence that sampled it alone, not where another one goes on from it. None: each sequence is a rollout."""
    learner_version: int = 0
    """Version of the weights from which the update starts."""
    temperature: float = 1.0
    """Sampling temperature; the learner divides its logits by it."""
    proximal_logprobs: Tensor | None = None
    """[N] float32: log pi_prox, recomputed by the learner; None before that, or when bypassed."""
    at_sampling_logprobs: Tensor | None = None
    """[N] float32: log pi_v, the learner's with the weights that sampled the token, where a part tells mismatch and staleness apart; NaN
    where the learner has no copy of them, or they are the present ones: pi_prox stands for it."""
    reference_logprobs: Tensor | None = None
    """[N] float32: log pi_ref, for a KL penalty."""
    turn_ids: Tensor | None = None
    """[N] int32: index of the model turn inside its trajectory; None: one turn."""
    topk_ids: Tensor | None = None
    """[N, K] int64: the sampler's K most likely tokens."""
    topk_logprobs: Tensor | None = None
    """[N, K] float32: their logprobs under the behaviour policy."""
    kept_counts: Tensor | None = None
    """[N] int32: size of the kept set, from which top-p, top-k and min-p let a token be drawn; 0: the whole vocabulary. Logprobs are of a
    softmax over this set, of all policies; it is constant in an update. None: all tokens were drawn from the whole vocabulary."""
    kept_ids: Tensor | None = None
    """[sum of kept_counts] int32: the tokens of the kept sets, one set after the other."""
    advantages_by: AdvantageConfig | Literal["own"] | None = None
    """How the advantages were made: these settings, or "own" if they were made otherwise on purpose. None: not stated."""
    routed_experts: Tensor | None = None
    """[N, layers, k] uint8 or int16: experts that a token was sent to when the model read it, to be replayed; no meaning at a sequence's
    last token, which nothing reads."""
    wide: tuple[WidePlace, ...] | None = None
    """[S] where the wide fields of each sequence are (wide.py), if it has some that aren't in the batch."""

    def __post_init__(self) -> None:
        _detach(self)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.offsets.shape[0]) - 1

    @property
    def lengths(self) -> Tensor:
        """[S] int64: tokens of each sequence."""
        return self.offsets.diff()

    @property
    def has_routes(self) -> bool:
        """Whether the batch has routed experts, as a tensor or by reference in `wide`."""
        return self.routed_experts is not None or (self.wide is not None and all(one.route_keys is not None for one in self.wide))

    def holding(self, read: Mapping[Any, Any]) -> PackedBatch:
        """A copy whose references in `wide` are replaced by what was read for them, as check_wide_fields and with_wide_fields need it."""
        return self if self.wide is None else replace(self, wide=tuple(place.holding(read) for place in self.wide))

    def check_wide_fields(self) -> None:
        """Raises: DataError if the wide fields don't fit the tokens, or were not read."""
        if self.wide is not None:
            check_fields([place.fields() for place in self.wide], self.lengths.tolist(), self.loss_mask)

    def without_routes(self) -> PackedBatch:
        """A copy whose routed experts, if there are any, are not replayed."""
        places = None if self.wide is None else tuple(replace(place, has_routes=False) for place in self.wide)
        return replace(self, routed_experts=None, wide=places)

    def with_wide_fields(self, *, has_topk: bool = True) -> PackedBatch:
        """The batch with its wide fields as tensors of its own, and `wide` None.

        Args: has_topk: False: leave out the likeliest tokens.
        Raises: DataError if the wide fields don't fit the tokens, or were not read.
        """
        if self.wide is None:
            return self
        found = [place.fields() for place in self.wide]
        topk_ids, topk_logprobs = topk_of(found, self.loss_mask) if has_topk else (None, None)
        kept_counts, kept_ids = kept_of(found, self.loss_mask)
        return replace(
            self,
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            routed_experts=routed_experts_of(found, self.lengths.tolist()),
            kept_counts=kept_counts,
            kept_ids=kept_ids,
            wide=None,
        )

    def validate(self) -> PackedBatch:
        """Check shapes, types, offsets, versions and the sign of logprobs; return self.

        Raises: DataError naming the field.
        """
        check_batch_shapes(self)
        n = self.num_tokens
        if self.learner_version not in VERSIONS:
            raise DataError(f"PackedBatch.learner_version = {self.learner_version}: versions are int32, {_COUNTED_FROM_0}")
        logprobs = [(name, values) for name in _LOGPROBS if (values := getattr(self, name)) is not None]
        numbers = [self.offsets[0], self.offsets[-1], self.lengths.amin() if self.num_sequences else self.offsets[0]]
        numbers += self.weight_versions.aminmax() if n else (self.offsets[0], self.offsets[0])
        numbers += [largest_logprob(values, self.loss_mask) for _, values in logprobs]
        first, last, shortest, oldest, newest, *largest = torch.stack([number.double() for number in numbers]).tolist()
        if (first, last) != (0, n) or shortest < 0:
            raise DataError(f"PackedBatch.offsets must rise from 0 to {n} (the number of tokens), got {self.offsets[:3].tolist()}...")
        if oldest < NO_VERSION:
            raise DataError(f"PackedBatch.weight_versions has {oldest:.0f}: versions are int32, {_COUNTED_FROM_0}")
        if newest > self.learner_version:
            raise DataError(
                f"PackedBatch.weight_versions reach {newest:.0f}, and learner_version is {self.learner_version}: no token can be of "
                "weights that the learner doesn't have yet. Set learner_version to the version from which the update starts"
            )
        check_not_positive("PackedBatch.", dict(zip((name for name, _ in logprobs), largest, strict=True)))
        return self

    def sequences_of_groups(self) -> dict[int, list[int]]:
        """Group id -> indices of its sequences, ascending."""
        found: dict[int, list[int]] = {}
        for i, group in enumerate(self.group_ids.tolist()):
            found.setdefault(group, []).append(i)
        return found

    def token_index(self, sequences: Sequence[int]) -> Tensor:
        """[n] int64: flat positions of the tokens of the given sequences, in the order given."""
        bounds = self.offsets.tolist()
        parts = [torch.arange(bounds[i], bounds[i + 1], device=self.token_ids.device) for i in sequences]
        return torch.cat(parts) if parts else self.token_ids.new_zeros(0)

    def select(self, sequences: Sequence[int]) -> PackedBatch:
        """The batch of the given sequences alone, in the order given (a micro-batch, a rank's share)."""
        index = self.token_index(sequences)
        picked = torch.as_tensor(list(sequences), dtype=torch.int64, device=self.offsets.device)
        offsets = torch.cat([self.offsets.new_zeros(1), self.lengths[picked].cumsum(0)])
        changes: dict[str, Any] = {"offsets": offsets, "group_ids": self.group_ids[picked]}
        if self.rollout_ids is not None:
            changes["rollout_ids"] = self.rollout_ids[picked]
        if self.wide is not None:
            changes["wide"] = tuple(self.wide[i] for i in sequences)
        if self.kept_counts is not None and self.kept_ids is not None:
            changes["kept_ids"] = kept_rows(self.kept_counts, self.kept_ids, index)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name not in changes:
                changes[field.name] = value[index]
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch with every tensor on `device`."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class DecisionCounts:
    """How often each criterion and each bound took hold: sums, which add up over the stages and over any split of a batch."""

    labels: tuple[str, ...]
    """Names of the C criteria, in the config's order, all different; "veto" at the end if there is one."""
    values: Tensor
    """[2 C + len(UNIT_COUNTS)] float64: tokens that each criterion looked at, tokens that it drops, and UNIT_COUNTS."""

    def __add__(self, other: DecisionCounts) -> DecisionCounts:
        return DecisionCounts(self.labels, self.values + other.values.to(self.values.device))

    def by_criterion(self) -> dict[str, tuple[int, int]]:
        """Label -> (tokens that it looked at, tokens that it drops); one that hasn't run is left out."""
        count = len(self.labels)
        looked_at, dropped = self.values[:count].tolist(), self.values[count : 2 * count].tolist()
        return {name: (int(n), int(k)) for name, n, k in zip(self.labels, looked_at, dropped, strict=True) if n > 0}

    def by_unit(self) -> dict[str, int]:
        """The entries of UNIT_COUNTS."""
        return dict(zip(UNIT_COUNTS, map(int, self.values[2 * len(self.labels) :].tolist()), strict=True))


@dataclass(frozen=True, slots=True)
class FinalDecision:
    """What the tokens were trained with, late parts included: made by `policy_loss`, read by `diagnose`."""

    keep_mask: Tensor
    """[N] bool, a subset of the corrected batch's: what is in the loss."""
    importance_weights: Tensor
    """[N] float32, detached, with all that was known before the step; `policy_loss` leaves a late normaliser out."""
    counts: DecisionCounts
    """Counts of the late parts alone; the corrected batch has those of the early ones."""
    coefficients: Tensor | None = None
    """[N] float32: the objective's factor on A grad log pi of a token, without its weight; 0 where A is 0. None: not known."""
    is_clipped: Tensor | None = None
    """[N] bool: the objective's clip or gate removed the token's gradient, whether or not the token is kept. None: not known."""
    proximal_logprobs: Tensor | None = None
    """[N] float32, detached: log pi_prox as the loss had it, so mu in bypass and a mixture with `interpolate`. None: not known."""
    before_update: Tensor | None = None
    """[N] bool: the token's forward pass came before the first of the batch's optimizer steps; None: that of all tokens did."""

    def of_loss(self) -> tuple[Tensor, Tensor, Tensor]:
        """(coefficients, is_clipped, proximal_logprobs), [N] each, which `policy_loss` gives. Raises: ValueError if it hasn't made this."""
        if self.coefficients is None or self.is_clipped is None or self.proximal_logprobs is None:
            raise ValueError("FinalDecision: it is not from policy_loss, so coefficients, clips and proximal logprobs are not known")
        return self.coefficients, self.is_clipped, self.proximal_logprobs

    def of_slice(self, piece: BatchSlice) -> FinalDecision:
        """The share of a part of the batch; counts stay those of the whole."""
        rows = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: row[piece.tokens] for name, row in rows.items()})


@dataclass(frozen=True, slots=True)
class CorrectedBatch:
    """A packed batch with what the correction decided: the learner's input.

    The policy loss is  sum over kept tokens of  token_scale * importance_weights * l(token),  with l from the objective.
    """

    batch: PackedBatch
    """What was corrected."""
    importance_weights: Tensor
    """[N] float32, detached; 1 where no weight applies. Batch normalisation is already in."""
    keep_mask: Tensor
    """[N] bool, a subset of batch.loss_mask: what rejection and veto left."""
    token_scale: Tensor
    """[N] float32: one over the loss denominator of the *global* batch, so that sums over any split of it add up."""
    is_deferred: bool = False
    """True: the parts on rho run inside the training forward, with proximal = detached current logprobs."""
    counts: DecisionCounts | None = None
    """Counts of the parts that ran in the service; None for a share of a batch, which has no counts of its own."""
    plain_weights: Tensor | None = None
    """[N] float32: importance_weights without config.modulation, which a late mean weight leaves out; None: they are the same."""
    settled: Tensor | None = None
    """[N] bool: what a criterion on the target policy of a whole optimizer step keeps, or the tokens that weren't chosen by covariance, as
    `settle` decided; None: not decided, or none."""
    config: CorrectionSettings | None = None
    """The settings that corrected it, which its loss has to have; None: not known, as after from_padded."""

    def __post_init__(self) -> None:
        _detach(self)

    def select(self, sequences: Sequence[int]) -> CorrectedBatch:
        """The given sequences alone; scales stay those of the global batch."""
        index = self.batch.token_index(sequences)
        return replace(
            self,
            batch=self.batch.select(sequences),
            importance_weights=self.importance_weights[index],
            keep_mask=self.keep_mask[index],
            token_scale=self.token_scale[index],
            counts=None,
            plain_weights=None if self.plain_weights is None else self.plain_weights[index],
            settled=None if self.settled is None else self.settled[index],
        )

    def to(self, device: torch.device | str) -> CorrectedBatch:
        return replace(
            self,
            batch=self.batch.to(device),
            importance_weights=self.importance_weights.to(device),
            keep_mask=self.keep_mask.to(device),
            token_scale=self.token_scale.to(device),
            plain_weights=None if self.plain_weights is None else self.plain_weights.to(device),
            settled=None if self.settled is None else self.settled.to(device),
        )

    def holding(self, read: Mapping[Any, Any]) -> CorrectedBatch:
        """The batch of PackedBatch.holding, for the packed batch inside."""
        return replace(self, batch=self.batch.holding(read))

    def to_padded(self, attention_mask: Tensor) -> dict[str, Tensor]:
        """The decisions as padded tensors [B, T], in addition to those that a trainer has: importance_weights, keep_mask, token_scale, and
        plain_weights where there are any.

        Args:
            attention_mask: [B, T], the one that the batch was made with.
        """
        names = ("importance_weights", "keep_mask", "token_scale", *(("plain_weights",) if self.plain_weights is not None else ()))
        return {name: to_padded(getattr(self, name), attention_mask) for name in names}

    @classmethod
    def from_padded(
        cls,
        batch: PackedBatch,
        attention_mask: Tensor,
        *,
        importance_weights: Tensor,
        keep_mask: Tensor,
        token_scale: Tensor,
        plain_weights: Tensor | None = None,
        is_deferred: bool = False,
    ) -> CorrectedBatch:
        """The inverse of `to_padded`, for some of the rows in any order; scales stay those of the global batch.

        Args:
            batch: of these rows, packed with attention_mask [B, T].
            importance_weights, keep_mask, token_scale, plain_weights: [B, T], rows of `to_padded`.
        Raises: DataError if a shape differs.
        """
        weights, keep, scale = (pack_like(values, attention_mask) for values in (importance_weights, keep_mask.bool(), token_scale))
        if weights.shape[0] != batch.num_tokens:
            raise DataError(f"CorrectedBatch.from_padded: attention_mask has {weights.shape[0]} tokens, and batch {batch.num_tokens}")
        plain = None if plain_weights is None else pack_like(plain_weights, attention_mask)
        made = cls(batch, weights, keep, scale, is_deferred=is_deferred, plain_weights=plain)
        check_decision_shapes(made)
        return made


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Sequences first to last, exclusive, of a batch."""

    sequences: slice
    """First to last of S, exclusive."""
    tokens: slice
    """Their tokens, of N."""

    def of_batch(self, batch: PackedBatch) -> PackedBatch:
        """The part's own batch, its offsets counted from its first token; without kept sets, which no decision reads."""
        wide = None if batch.wide is None else batch.wide[self.sequences]
        changes: dict[str, Any] = {"wide": wide, "kept_counts": None, "kept_ids": None}
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor) and field.name not in _NOT_PER_TOKEN:
                changes[field.name] = value[self.tokens]
        bounds = batch.offsets[self.sequences.start : self.sequences.stop + 1]
        changes |= {"offsets": bounds - self.tokens.start, "group_ids": batch.group_ids[self.sequences]}
        changes["rollout_ids"] = None if batch.rollout_ids is None else batch.rollout_ids[self.sequences]
        return replace(batch, **changes)

    def of_tokens(self, values: Tensor | None) -> Tensor | None:
        """The part's share of per-token values [N]."""
        return None if values is None else values[self.tokens]


def batch_slices(batch: PackedBatch, *, is_divisible: bool = True) -> Iterator[BatchSlice]:
    """The batch cut into consecutive parts of about CPU_TOKENS tokens on a CPU; on other devices one part.

    Args:
        is_divisible: False: one part, for calculations that look at all tokens together.
    """
    inner: list[int] = []
    if is_divisible and batch.offsets.device.type == "cpu" and batch.num_tokens > CPU_TOKENS:
        wanted = torch.arange(CPU_TOKENS, batch.num_tokens, CPU_TOKENS)
        inner = sorted(set(torch.searchsorted(batch.offsets, wanted).tolist()) - {0, batch.num_sequences})
    edges = [0, *inner, batch.num_sequences]
    tokens = batch.offsets[torch.tensor(edges, device=batch.offsets.device)].tolist()
    for k in range(len(edges) - 1):
        yield BatchSlice(slice(edges[k], edges[k + 1]), slice(tokens[k], tokens[k + 1]))
