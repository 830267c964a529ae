"""The rows that the model must read to predict the trained tokens of a batch: no more, and a group's prompt only once.

A sequence is read up to the token before its last trained one; later tokens predict nothing that is trained. Sequences of one group
that begin with the same tokens share a prefix: it is read once, and each of them goes on from there. A prefix may hold trained tokens, of
the one sequence that sampled them, where a rollout has several sequences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.errors import DataError
from evenkeel.learner.model.balance import SharedPrefix

LEAST_SAVED = 0.1
"""A prefix is shared only if that saves more than this share of the rows, because attention to a shared prefix takes about that much
longer."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the R rows that the model reads are connected: T sequences, then C continuations of some of them, all end to end."""

    sequences: tuple[int, ...]
    """[T] rows of each, none 0. It starts at position 0 and attends to itself."""
    continuations: tuple[int, ...] = ()
    """[C] rows of each, none 0. It attends to the whole of the sequence that it goes on from, and to itself."""
    continued: tuple[int, ...] = ()
    """[C] the sequence that each goes on from, ascending."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """R rows for the model, and the M predictions to be made from them."""

    token_ids: Tensor
    """[R] int64."""
    layout: RowLayout
    """Which rows attend to which."""
    predicted: Tensor
    """[M] int64: indices in the batch of the tokens in the loss mask, ascending."""
    predicting_row: Tensor
    """[M] int64: the row before each of them, which predicts it. The last row of a shared prompt predicts the first token of every
    answer."""
    row_of_token: Tensor
    """[N] int64: the row in which each token of the batch is read; -1 where none is."""
    routed_experts: Tensor | None = None
    """[R, layers, k]: where each row is sent, if the batch says so."""

    @classmethod
    def of(cls, batch: PackedBatch, *, share_prompts: bool = True, row_multiple: int = 1) -> ModelInputs:
        """The rows to read for a batch.

        Args:
            row_multiple: R becomes a multiple of it, padded by a sequence that predicts nothing.
        Raises: DataError if the loss mask holds a sequence's first token, which nothing predicts.
        """
        # Longest first, so that beginnings of equal length are neighbours: attention takes them in one call.
        prefixes = sorted((p for p in find_shared_prefixes(batch, share_prompts=share_prompts) if p.tokens > 0), key=lambda p: -p.shared)
        continuing = [
            (t, i, rows) for t, prefix in enumerate(prefixes) for i, rows in zip(prefix.members, prefix.rows, strict=True) if rows
        ]
        filling = -sum(prefix.tokens for prefix in prefixes) % row_multiple
        layout = RowLayout(
            tuple(prefix.shared for prefix in prefixes) + (filling,) * (filling > 0),
            tuple(rows for _, _, rows in continuing),
            tuple(t for t, _, _ in continuing),
        )
        starts = batch.offsets.tolist()
        row_of = [-1] * batch.num_tokens
        row = 0
        for prefix in prefixes:
            for i in prefix.members:
                row_of[starts[i] : starts[i] + prefix.shared] = range(row, row + prefix.shared)
            row += prefix.shared
        row += filling
        for t, i, rows in continuing:
            start = starts[i] + prefixes[t].shared
            row_of[start : start + rows] = range(row, row + rows)
            row += rows
        rows_of_tokens = torch.tensor(row_of, dtype=torch.int64)
        is_read = rows_of_tokens >= 0

        def of_rows(per_token: Tensor, filler: Tensor) -> Tensor:
            values = filler.to(per_token.dtype).expand(row, *per_token.shape[1:]).clone()
            values[rows_of_tokens[is_read]] = per_token[is_read]  # members write the same into the rows that they share
            return values

        predicted = batch.loss_mask.nonzero()[:, 0]
        return cls(
            of_rows(batch.token_ids, torch.tensor(0)),
            layout,
            predicted,
            rows_of_tokens[predicted - 1],
            rows_of_tokens,
            None if batch.routed_experts is None else of_rows(batch.routed_experts, torch.arange(batch.routed_experts.shape[-1])),
        )

    def to(self, device: torch.device) -> ModelInputs:
        """The same with its tensors on `device`."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **moved)


def find_shared_prefixes(batch: PackedBatch, *, share_prompts: bool) -> list[SharedPrefix]:
    """The prefixes that a batch's sequences share, each sequence in exactly one, with the rows that it takes to read them.

    Tokens are shared only among members of one group whose tokens are equal, and, but for rollouts of several sequences, only those before
    the first trained one. Routed experts must be equal too, if the batch has them or their keys: a prompt that was prefilled at two weight
    versions was routed twice.
    Raises: DataError if the loss mask holds a sequence's first token, which nothing predicts.
    """
    lengths, prompts = _extents(batch)
    if not share_prompts:
        return [SharedPrefix.alone(i, length) for i, length in enumerate(lengths)]
    token_ids, starts = batch.token_ids.tolist(), batch.offsets.tolist()
    keys = [place.route_keys or () for place in batch.wide] if batch.wide is not None and batch.has_routes else None
    prefixes, groups = [], defaultdict(list)
    for i, group in enumerate(batch.group_ids.tolist()):
        if prompts[i]:
            groups[group].append(i)
        else:  # nothing is trained in it
            prefixes.append(SharedPrefix.alone(i, lengths[i]))
    rollouts = range(batch.num_sequences) if batch.rollout_ids is None else batch.rollout_ids.tolist()
    sizes = Counter(rollouts)
    for members in groups.values():
        has_branches = any(sizes[rollouts[i]] > 1 for i in members)
        ends = {i: lengths[i] if sizes[rollouts[i]] > 1 else prompts[i] for i in members}
        texts: dict[int, list[Any]] = {i: token_ids[starts[i] : starts[i] + ends[i]] for i in members}
        if keys is not None:
            texts = {i: list(zip(text, keys[i], strict=False)) for i, text in texts.items()}
        elif batch.routed_experts is not None:
            texts = {i: _with_routes(text, batch.routed_experts[starts[i] :]) for i, text in texts.items()}
        whole = [(members, _common_length(min(texts.values()), max(texts.values())))]
        for part, shared in _parts(members, texts) if has_branches else whole:
            if (len(part) - 1) * shared > LEAST_SAVED * sum(lengths[i] for i in part):
                prefixes.append(SharedPrefix(tuple(part), shared, tuple(lengths[i] - shared for i in part)))
            else:
                prefixes += [SharedPrefix.alone(i, lengths[i]) for i in part]
    return prefixes


def _parts(members: Sequence[int], texts: Mapping[int, list[Any]]) -> list[tuple[list[int], int]]:
    """The parts of a group that share a prefix, with its length: all of it, or else, if that saves more tokens, parts of those that go on
    alike, and so on; a thousand times where each sequence of a rollout goes on from the one before."""
    # Each part in the order of its texts, the length that is known to be shared, and the place in this list of what it is a part of.
    tree: list[tuple[list[int], int, int]] = [(sorted(members, key=texts.__getitem__), 0, -1)]
    lengths = []
    for place, (part, known, _) in enumerate(tree):
        shared = _common_length(texts[part[0]], texts[part[-1]], known)
        lengths.append(shared)
        by_next = defaultdict(list)
        for i in part:
            by_next[texts[i][shared] if shared < len(texts[i]) else None].append(i)
        if 1 < len(by_next) < len(part):
            tree += [(alike, shared, place) for alike in by_next.values()]
    saved, found = Counter[int](), defaultdict[int, list[tuple[list[int], int]]](list)
    for place in reversed(range(len(tree))):
        part, _, parent = tree[place]
        if saved[place] <= (together := (len(part) - 1) * lengths[place]):
            saved[place], found[place] = together, [(sorted(part), lengths[place])]
        saved[parent] += saved[place]
        found[parent] += found.pop(place)
    return sorted(found[-1])


def _extents(batch: PackedBatch) -> tuple[list[int], list[int]]:
    """[S] tokens to be read of each sequence, and [S] tokens before its first trained one; both 0 where none is trained."""
    trained = batch.loss_mask.nonzero()[:, 0]
    sequence = torch.searchsorted(batch.offsets, trained, right=True) - 1
    place = trained - batch.offsets[sequence]
    if bool((place == 0).any()):
        first = int(sequence[place == 0][0])
        raise DataError(f"PackedBatch.loss_mask is True for the first token of sequence {first}: no token before it predicts it")
    none = torch.zeros_like(batch.lengths)
    lengths = none.scatter_reduce(0, sequence, place, "amax")
    prompts = none.scatter_reduce(0, sequence, place, "amin", include_self=False)
    if len(trained) == 0:  # nothing to predict: read one token all the same, so that there is a pass
        lengths[int(batch.lengths.argmax())] = 1
    return lengths.tolist(), prompts.tolist()


def _with_routes(text: list[int], routed_experts: Tensor) -> list[tuple[int, bytes]]:
    """Each token with its experts in all layers; routed_experts: [at least as many rows, layers, k]."""
    return [(token, routes.tobytes()) for token, routes in zip(text, routed_experts[: len(text)].numpy(), strict=True)]


def _common_length(low: list[Any], high: list[Any], known: int = 0) -> int:
    """Length of the longest common prefix of all texts from the first to the last in lexicographic order, of which `known` is known."""
    shorter = min(len(low), len(high))
    return next((i for i in range(known, shorter) if low[i] != high[i]), shorter)
