"""Behaviour logprobs as the learner computes them, and tokens that depend on these and on the request's own seed alone.

Logprobs are log_softmax(logits / temperature) in float32, over the whole vocabulary. SGLang's own sampler returns log(softmax(x)), which
differs in the last bits and is minus infinity below the smallest float32; its switch SGLANG_RETURN_ORIGINAL_LOGPROB leaves the temperature
out. Hence a sampler of ours, in SGLang's registry of samplers.

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
from sglang.srt.layers.sampler import Sampler, register_sampler_backend, top_p_normalize_probs_torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from evenkeel.engines.machine import SUMMED
from evenkeel.rollout.sglang_plugin.compiled import compiled

BACKEND = "pytorch"
"""Value of SGLang's `sampling_backend` that selects our sampler; on a CPU SGLang sets this name whatever is asked for."""

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


def nucleus(probabilities: Tensor, top_ps: Tensor) -> Tensor:
    """[B, V] float32: rows with a top_p below 1 keep the likeliest tokens that hold this share; other rows stay as they are, bit for bit.

    Training samples, which have a top_p of 1, may be in one batch with those of an evaluation.
    Args:
        probabilities: [B, V] float32. top_ps: [B] float32 in (0, 1].
    """
    (rows,) = torch.where(top_ps < 1)
    return probabilities.index_copy(0, rows, top_p_normalize_probs_torch(probabilities[rows], top_ps[rows]))


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


class SeededSampler(Sampler):  # type: ignore[misc]  # SGLang has no types
    """Samples from exp(logprobs) of the very logprobs that it reports; of a request of an evaluation with top_p below 1 from a part of it.

    Batches of greedy requests alone, and sampling masks, stay SGLang's.
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
        """Token ids [B] int32 for logits_output.next_token_logits [B, vocabulary]; logprobs are written to logits_output."""
        if sampling_info.is_all_greedy or sampling_info.sampling_mask_batch_indices is not None:
            unseeded = dataclasses.replace(sampling_info, sampling_seed=None)
            return self._stock(logits_output, unseeded, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        logprobs = torch.log_softmax(logits.float() / sampling_info.temperatures, dim=-1)
        probabilities = logprobs.exp()
        if sampling_info.need_top_p_sampling:
            probabilities = nucleus(probabilities, sampling_info.top_ps)
        token_ids = self.draw(probabilities, sampling_info.sampling_seed, positions)
        if sampling_info.is_any_greedy:
            token_ids = torch.where(sampling_info.top_ks == 1, logits.argmax(-1), token_ids)
        token_ids = token_ids.to(torch.int32)
        self._sync_token_ids_across_tp(token_ids, sampling_info)  # before logprobs: they are of the token that all ranks take
        if return_logprob:
            result = self.output_logprob_processor.compute_logprobs(logprobs, top_logprobs_nums, token_ids_logprobs, token_ids)
            result.write_output_to(logits_output)
        return token_ids

    def _stock(self, *arguments: Any) -> Tensor:
        token_ids: Tensor = super().forward(*arguments)
        return token_ids
