"""Behaviour logprobs as the learner computes them, and tokens that depend on these and on the request's own seed alone.

Logprobs are log_softmax(logits / temperature) in float32, over the whole vocabulary, or over the tokens that top-p, top-k and min-p have
left of it: the kept set, which is reported with the token. SGLang's own sampler returns log(softmax(x)) of the whole, which differs in the
last bits and is minus infinity below the smallest float32; its switch SGLANG_RETURN_ORIGINAL_LOGPROB leaves the temperature out; it draws
from a kept set unseeded, or without min-p, and which of several equal tokens are in it goes by the sort. Hence a sampler of ours, in
SGLang's registry of samplers. How a kept set goes from there to the answer is SGLang's (return_sampling_mask).

The random number of a token comes from its request's `sampling_seed` and its position, so that neither batch-mates nor retraction change
what is drawn. SGLang puts seeds into a batch in its deterministic inference only, and there draws by `multinomial_with_seed`: one number
for each entry of the vocabulary, which on a CPU takes more than ten times as long as the one number a token needs here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import SamplingMaskOutput, SamplingMaskStatus
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from evenkeel.engines.machine import SUMMED
from evenkeel.engines.operators import restrict
from evenkeel.rollout.sglang_plugin.compiled import compiled

BACKEND = "pytorch"
"""Value of SGLang's `sampling_backend` that selects our sampler; on a CPU SGLang sets this name whatever is asked for."""

LISTED = 128
"""Likeliest tokens that are sorted to find kept sets; eight times as many as long as a set isn't among them."""
SOURCE = Path(__file__).with_name("draw.c")


def register(*, is_compiled: bool) -> None:
    """Args: is_compiled: draw by draw.c, on a CPU. Raises: EngineError without a working C compiler."""
    if is_compiled:
        SeededSampler.draw = CompiledDraw()
    register_sampler_backend(BACKEND, SeededSampler)
    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    HookRegistry.register(f"{batch}.adjusted_from_schedule_batch", _give_seeds, HookType.AFTER)  # SGLang's own placeholder for overrides


def _give_seeds(_result: None, info: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Each request's seed into the batch, where SGLang filters and merges it; a request without one has one of its random id, which is the
    same in all ranks of an engine."""
    given = [(request.sampling_params.sampling_seed, request.rid) for request in batch.reqs]
    seeds = torch.tensor([_seed_of(rid) if seed is None else seed for seed, rid in given], dtype=torch.int64)
    info.sampling_seed = seeds.to(info.device)


def _seed_of(request_id: str) -> int:
    """A number in [0, 2^63), the same for the same id."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1


def draw(probabilities: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token a row, by inversion: the first whose cumulative probability exceeds a uniform number of the seed and position.

    Args:
        probabilities: [B, V] float32, of any sum.
        seeds: [B] int64. positions: [B], of the last token that is known.
    Returns: [B] int64. A row's token depends on that row alone: on a CPU, sums along a row go from left to right, in float64. Of a row that
        is not finite it is any token: its logprob isn't finite either, for which its request is refused, and the batch-mates live.
    """
    rows, words = probabilities.shape
    share, nothing = uniform(seeds, positions)[:, None], probabilities.new_zeros(rows, dtype=torch.float64)
    if words <= SUMMED:
        cumulative = _cumulative(probabilities, nothing)
        return torch.searchsorted(cumulative, share * cumulative[:, -1:], right=True)[:, 0].clamp(max=words - 1)
    ends = [nothing]
    for part in torch.split(probabilities, SUMMED, -1):  # all of a large vocabulary in float64 is gigabytes with many requests
        ends.append(_cumulative(part, ends[-1])[:, -1].clone())
    bounds = torch.stack(ends, -1)
    below = share * bounds[:, -1:]
    part_of_row = torch.searchsorted(bounds[:, 1:].contiguous(), below, right=True).clamp(max=len(ends) - 2)
    columns = (SUMMED * part_of_row + torch.arange(SUMMED, device=probabilities.device)).clamp_(max=words - 1)
    cumulative = _cumulative(probabilities.gather(-1, columns), bounds.gather(-1, part_of_row)[:, 0])
    return (SUMMED * part_of_row + torch.searchsorted(cumulative, below, right=True))[:, 0].clamp(max=words - 1)


def _cumulative(part: Tensor, before: Tensor) -> Tensor:
    """[B, n] float64: sums of a part of a row from its left and what stands `before` it, [B]; on a CPU the whole row's, bit for bit."""
    sums = part.to(torch.float64, copy=True)
    sums[:, 0] += before
    return sums.cumsum_(-1)


class CompiledDraw:
    """`draw` on a CPU by draw.c: the same tokens. Of a large vocabulary torch's sums take longer than all else that a sampler does."""

    def __init__(self) -> None:
        """Raises: EngineError without a working C compiler."""
        self._draw = compiled(SOURCE, []).draw
        self._draw.argtypes, self._draw.restype = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2], None

    def __call__(self, probabilities: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """As `draw`."""
        probabilities, shares = probabilities.contiguous(), uniform(seeds, positions)
        tokens = torch.empty(len(probabilities), dtype=torch.int64)
        self._draw(probabilities.data_ptr(), shares.data_ptr(), tokens.data_ptr(), *probabilities.shape)
        return tokens


def kept_sets(probabilities: Tensor, top_ps: Tensor, top_ks: Tensor, min_ps: Tensor, *, width: int = LISTED) -> tuple[Tensor, Tensor]:
    """What top-p, top-k and min-p together leave of each row: a token stays if all three keep it, by its place among the likeliest.

    In the order of falling probability, of equal ones the smaller id first: top-p keeps a token if those before it hold no more than this
    share of the whole, top-k the first k, min-p those with at least this share of the first one's probability.
    Args:
        probabilities: [R, V] float32, of sum 1. top_ps, min_ps: [R] float32; 1 and 0 keep all. top_ks: [R] integers; V or more keeps all.
        width: likeliest tokens that are listed at first; a row with a longer set is listed again, alone.
    Returns: ids [R, W] int64, and [R] how many of them are kept: the first ones, at least one; 0 of a row that is not finite.
    """
    limits, width = (top_ps, top_ks, min_ps), min(width, probabilities.shape[-1])
    ids, counts, is_enough = _listed_sets(probabilities, *(limit[:, None] for limit in limits), width=width)
    (rows,) = torch.where(~is_enough)
    if width < probabilities.shape[-1] and len(rows):
        longer, counts[rows] = kept_sets(probabilities[rows], *(limit[rows] for limit in limits), width=8 * width)
        ids = F.pad(ids, (0, max(0, int(counts.amax()) - width)))
        ids[rows] = longer[:, : ids.shape[1]]
    return ids, counts


def _listed_sets(probabilities: Tensor, top_ps: Tensor, top_ks: Tensor, min_ps: Tensor, *, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kept_sets` of what is among the `width` likeliest tokens of each row, and [R] whether nothing can be missing from it."""
    ids = probabilities.topk(width).indices.sort(-1).values
    ordered, places = probabilities.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.double().cumsum(-1)[:, :-1], (1, 0))
    is_likely = ((before <= top_ps) | (top_ps == 1)) & (ordered >= min_ps * ordered[:, :1])
    counts = (is_likely & (torch.arange(width, device=ids.device) < top_ks)).sum(-1, keepdim=True)
    # More are listed than kept, and all that are as likely as the last one kept: which of equal ones `topk` lists is its own choice.
    is_enough = (ordered.gather(-1, (counts - 1).clamp(min=0)) > ordered[:, -1:]) | (counts == 0)
    return ids.gather(-1, places), counts[:, 0], is_enough[:, 0]


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[B] float64 in (0, 1): number `position` (from 0) of the generator SplitMix64 that starts at the seed, both [B] int64.

    Its first 50 bits: times a sum of probabilities, the largest of these numbers is still below that sum.
    Source: Steele, Lea and Flood (2014), Fast splittable pseudorandom number generators. Products are modulo 2^64, as int64's are.
    """
    state = seeds + (positions.to(torch.int64) + 1) * _signed(0x9E3779B97F4A7C15)
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, bits)) * _signed(factor)
    return (_shifted(state ^ _shifted(state, 31), 14).double() + 0.5) / 2**50


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; int64's own repeats the sign."""
    shifted: Tensor = (word >> bits) & (2 ** (64 - bits) - 1)
    return shifted


@dataclasses.dataclass(frozen=True, slots=True)
class KeptRows:
    """The kept sets of those rows of a batch that have one."""

    rows: Tensor
    """[R] int64 of the batch."""
    ids: Tensor
    """[R, W] int64: the kept ones first."""
    counts: Tensor
    """[R] int64: how many of them are kept; 0: all of the vocabulary."""

    @classmethod
    def of(cls, scaled: Tensor, info: Any) -> KeptRows | None:
        """Args: scaled: [B, V] float32, logits over temperatures. info: SGLang's SamplingBatchInfo. Returns: None if no row has one."""
        if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
            return None
        words = scaled.shape[-1]
        is_partial = (info.top_ps < 1) | (info.top_ks < words) | (info.min_ps > 0)
        (rows,) = torch.where(is_partial & (info.top_ks != 1))  # SGLang's sign of a greedy request
        if not len(rows):
            return None
        chosen = scaled if len(rows) == len(scaled) else scaled[rows]  # a copy of all takes as long as the softmax
        ids, counts = kept_sets(torch.softmax(chosen, -1), info.top_ps[rows], info.top_ks[rows], info.min_ps[rows])
        return cls(rows, ids, torch.where(counts < words, counts, 0))

    @property
    def is_kept(self) -> Tensor:
        """[R, W] bool."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.counts[:, None]

    def restrict(self, scaled: Tensor) -> None:
        """Make logits outside of the kept sets minus infinity, in place; other rows stay as they are, bit for bit."""
        restrict(scaled, self.counts.new_zeros(len(scaled)).index_copy(0, self.rows, self.counts), self.ids[self.is_kept])

    def reported(self, logprobs: Tensor, asked: Tensor) -> SamplingMaskOutput:
        """Args: logprobs: [B] of the tokens drawn. asked: [A] int64, rows of the batch whose requests want to know."""
        counts = asked.new_zeros(len(logprobs)).index_copy(0, self.rows, self.counts)[asked]
        width = max(1, int(counts.amax()))
        ids = asked.new_zeros(len(logprobs), width).index_copy(0, self.rows, self.ids[:, :width])
        return SamplingMaskOutput(
            token_ids=ids[asked].int(),
            lengths=counts.int(),
            selected_logprobs=logprobs[asked],
            support_logprobs=None,
            statuses=torch.full_like(counts, SamplingMaskStatus.OK, dtype=torch.int32),
        )


class SeededSampler(Sampler):  # type: ignore[misc]  # SGLang has no types
    """Samples from exp(logprobs) of the very logprobs that it reports: the whole vocabulary's, or those of a kept set.

    Batches of greedy requests alone stay SGLang's.
    """

    draw: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(draw)

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        """Token ids [B] int32 for logits_output.next_token_logits [B, vocabulary]; logprobs and kept sets are written to logits_output."""
        if sampling_info.is_all_greedy:
            unseeded = dataclasses.replace(sampling_info, sampling_seed=None)
            return self._stock(logits_output, unseeded, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        scaled = logits.float() / sampling_info.temperatures
        if (kept := KeptRows.of(scaled, sampling_info)) is not None:
            kept.restrict(scaled)
        logprobs = torch.log_softmax(scaled, dim=-1)
        token_ids = self.draw(logprobs.exp(), sampling_info.sampling_seed, positions)
        if sampling_info.is_any_greedy:
            token_ids = torch.where(sampling_info.top_ks == 1, logits.argmax(-1), token_ids)
        token_ids = token_ids.to(torch.int32)
        self._sync_token_ids_across_tp(token_ids, sampling_info)  # before logprobs: they are of the token that all ranks take
        if return_logprob:
            result = self.output_logprob_processor.compute_logprobs(logprobs, top_logprobs_nums, token_ids_logprobs, token_ids)
            result.write_output_to(logits_output)
        if kept is not None and (asked := sampling_info.sampling_mask_batch_indices) is not None:
            drawn = logprobs.gather(-1, token_ids[:, None].long())[:, 0]
            logits_output.sampling_mask_output = kept.reported(drawn, asked)
        return token_ids

    def _stock(self, *arguments: Any) -> Tensor:
        token_ids: Tensor = super().forward(*arguments)
        return token_ids
