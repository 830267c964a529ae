"""Models, batches and independent computations for the learner's tests."""

from __future__ import annotations

import io
import itertools
import multiprocessing as mp
import os
import signal
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import CorrectedBatch, PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import HeadShape, Rule, family_of
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.model import unwrap
from evenkeel.learner.weights.convert import bind, to_hf
from lab.ports import free_port
from lab.weight_buckets import weight_buckets
from tests.tiny_models import save_tiny_model

VOCAB = 96
TIS = CorrectionConfig(preset="tis-token")


def save_model(folder: Path, family: str = "qwen3", *, tie: bool = True, seed: int = 0, **shape: Any) -> Path:
    """A Hugging Face folder of a few ten thousand parameters; without a padding token, whose embedding transformers would not train."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256} | shape
    return save_tiny_model(folder, family, tie=tie, seed=seed, pad_token_id=None, **sizes)


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def random_batch(seed: int = 0, *, groups: int = 6, samples: int = 4, temperature: float = 1.0, longest: int = 30) -> PackedBatch:
    """Ragged sequences of 3 to `longest` tokens, with responses of at least one token; some have a tool's tokens in between."""
    generator = torch.Generator().manual_seed(seed)
    count = groups * samples
    lengths = torch.randint(3, longest + 1, (count,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n = int(offsets[-1])
    loss_mask = torch.zeros(n, dtype=torch.bool)
    for start, length in zip(offsets.tolist(), lengths.tolist(), strict=False):
        prompt = int(torch.randint(1, length, (1,), generator=generator))
        loss_mask[start + prompt : start + length] = True
        if length - prompt > 6:
            loss_mask[start + prompt + 2 : start + prompt + 4] = False
    return PackedBatch(
        token_ids=torch.randint(0, VOCAB, (n,), generator=generator),
        offsets=offsets,
        loss_mask=loss_mask,
        behavior_logprobs=torch.zeros(n),
        advantages=torch.repeat_interleave(torch.randn(count, generator=generator), lengths),
        weight_versions=torch.zeros(n, dtype=torch.int32),
        group_ids=torch.arange(count) // samples,
        temperature=temperature,
    ).validate()


def grouped_batch(shape: list[tuple[list[int], list[int]]], *, seed: int = 0, temperature: float = 1.0) -> PackedBatch:
    """Groups whose sequences begin alike.

    Args:
        shape: for each group the prompts' and the answers' lengths. A shorter prompt is the beginning of a longer one; an answer of 0
            tokens leaves a sequence in which nothing is trained, and of more than 6 has two tokens of a tool in it.
    """
    generator = torch.Generator().manual_seed(seed)
    pieces, masks, group_ids = [], [], []
    for group, (prompts, answers) in enumerate(shape):
        prompt = torch.randint(0, VOCAB, (max(prompts),), generator=generator)
        for prompt_length, answer_length in zip(prompts, answers, strict=True):
            pieces += [prompt[:prompt_length], torch.randint(0, VOCAB, (answer_length,), generator=generator)]
            mask = torch.arange(prompt_length + answer_length) >= prompt_length
            if answer_length > 6:
                mask[prompt_length + 2 : prompt_length + 4] = False
            masks.append(mask)
            group_ids.append(group)
    lengths = torch.tensor([len(mask) for mask in masks])
    n = int(lengths.sum())
    return PackedBatch(
        token_ids=torch.cat(pieces),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        loss_mask=torch.cat(masks),
        behavior_logprobs=torch.zeros(n),
        advantages=torch.repeat_interleave(torch.randn(len(lengths), generator=generator), lengths),
        weight_versions=torch.zeros(n, dtype=torch.int32),
        group_ids=torch.tensor(group_ids),
        temperature=temperature,
    ).validate()


def with_noisy_behavior(batch: PackedBatch, logprobs: Tensor, *, std: float = 0.2, seed: int = 1) -> PackedBatch:
    """The batch, sampled by a policy some way from the one that gives `logprobs`."""
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed)) * std
    return replace(batch, behavior_logprobs=torch.where(batch.loss_mask, logprobs + noise, 0.0))


def hf_values(model: Any, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """[N] logprobs and entropies by Hugging Face, one sequence at a time, 0 outside the loss mask; with gradient."""
    logprobs, entropies = [], []
    bounds = batch.offsets.tolist()
    for start, end in itertools.pairwise(bounds):
        ids = batch.token_ids[start:end]
        log_p = torch.log_softmax(model(ids[None]).logits[0, :-1] / batch.temperature, -1)
        blank = log_p.new_zeros(1)
        logprobs += [blank, log_p.gather(1, ids[1:, None])[:, 0]]
        entropies += [blank, -(log_p.exp() * log_p).sum(-1)]
    return tuple(torch.where(batch.loss_mask, torch.cat(x), 0.0) for x in (logprobs, entropies))  # type: ignore[return-value]


def gradients(learner: LearnerRank) -> dict[str, Tensor]:
    """The gradient in Megatron's buffer under HF names."""
    return _by_hf_name(learner, lambda parameter: parameter.main_grad)


def masters(learner: LearnerRank) -> dict[str, Tensor]:
    """What Adam updates under HF names: float32, where the weights are in half precision."""
    state_of = learner._require().optimizer.state_of
    return _by_hf_name(learner, lambda parameter: state_of(parameter)[1]["master"].view_as(parameter))


def gradient_parts(learner: LearnerRank) -> list[tuple[Rule, Tensor]]:
    """What this rank has of the gradient, for `joined_parts`."""
    return _parts(learner, lambda parameter: parameter.main_grad)


def joined_parts(of_ranks: Sequence[Sequence[tuple[Rule, Tensor]]], hf_config: Any) -> dict[str, Tensor]:
    """The whole tensors under HF names. Args: of_ranks: in the order of the ranks, which share each tensor, or have different ones."""
    parts: dict[Rule, list[Tensor]] = {}
    for rule, part in itertools.chain(*of_ranks):
        parts.setdefault(replace(rule, megatron=""), []).append(part)  # a pipeline stage counts its layers from 0
    found: dict[str, Tensor] = {}
    for rule, of_rule in parts.items():
        pieces = to_hf(rule, of_rule, HeadShape.of(hf_config), hf_config.vocab_size)
        found |= {name: piece.clone() for name, piece in zip(rule.hf, pieces, strict=True)}
    return found


def _by_hf_name(learner: LearnerRank, of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    return joined_parts([_parts(learner, of)], learner._require().hf_config)


def _parts(learner: LearnerRank, of: Callable[[Any], Tensor]) -> list[tuple[Rule, Tensor]]:
    loaded = learner._require()
    return [(rule, of(parameter)) for rule, parameter in bind(unwrap(loaded.chunks[0]), family_of(loaded.hf_config))]


def weights(learner: LearnerRank) -> dict[str, Tensor]:
    return {name: tensor for bucket in weight_buckets(learner) for name, tensor in bucket.tensors().items()}


def exported_by(rank: int, names: Collection[str], split: dict[str, Any]) -> set[str]:
    """Of a model's HF names those that a rank has to export: all on rank 0, those of its pipeline stage on another one. Virtual stages take
    turns."""
    config = LearnerConfig(**split)
    if rank == 0:
        return set(names)
    stages, stage = config.pipeline_parallel, rank * config.pipeline_parallel // config.world_size
    number = {name: int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    in_a_turn = (1 + max(number.values())) // (stages * config.virtual_pipeline)
    of_ends = {"model.embed_tokens.weight": 0, "model.norm.weight": stages - 1, "lm_head.weight": stages - 1}
    return {name for name in names if stage == (number[name] // in_a_turn % stages if name in number else of_ends[name])}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest difference of any element, relative to the largest element of its tensor.

    Where all elements of a tensor are below a billionth of the largest of all tensors, to that billionth: float32 can't tell them from 0.
    """
    assert left.keys() == right.keys()
    largest = {name: float(tensor.abs().max()) for name, tensor in right.items()}
    least = max(1e-12, 1e-9 * max(largest.values()))
    return max(float((left[name] - right[name]).abs().max()) / max(largest[name], least) for name in right)


@contextmanager
def learner_on(folder: Path, **settings: Any) -> Iterator[LearnerRank]:
    """A learner of one rank. It leaves its process group to the next one: one of this size is all that a test's process has."""
    learner = LearnerRank(LearnerConfig(**settings))
    try:
        learner.load(folder)
        yield learner
    finally:
        learner.is_saved(wait=True)
        learner._loaded = learner._reference = None


# A pool of one process for each rank.
_KEPT: list[Any] = []


def run_ranks(work: Callable[..., Any], *args: Any, ranks: int = 2, timeout_s: float = 500.0) -> list[Any]:
    """work(rank, ranks, port, *args) in as many processes that meet on loopback; their results by rank.

    The processes are kept for the next call. After a failure, and at the session's end, they are ended.
    """
    _KEPT.extend(rank_context().Pool(1) for _ in range(ranks - len(_KEPT)))
    port = free_port()
    answers = [pool.apply_async(_in_bytes, (work, rank, ranks, port, *args)) for rank, pool in enumerate(_KEPT[:ranks])]
    try:
        return [torch.load(io.BytesIO(answer.get(timeout_s)), weights_only=False) for answer in answers]
    except BaseException as error:
        end_ranks()
        failed = [other for answer in answers if answer.ready() and (other := _error_of(answer)) is not None]
        raise AssertionError("\n".join(map(str, failed)) or f"no answer in {timeout_s} s") from error


def end_ranks() -> None:
    """Of the calls so far. Without it those of a process of pytest-xdist, which leaves in haste, would outlive it."""
    while _KEPT:
        pool = _KEPT.pop()
        pool.terminate()
        pool.join()


def run_ranks_until_killed(work: Callable[..., Any], *args: Any, ranks: int = 2, timeout_s: float = 500.0) -> None:
    """The same in fresh processes, which end by SIGKILL."""
    context, port = rank_context(), free_port()
    processes = [context.Process(target=work, args=(rank, ranks, port, *args), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * ranks


def rank_context() -> Any:
    """Ranks are forked from a process that has imported torch, Megatron and the rest for them all; CUDA, where it is, would not survive
    that."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if torch.version.cuda is not None:
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.learner.rank_imports"])
    return context


def _in_bytes(work: Callable[..., Any], *args: Any) -> bytes:
    """A tensor that goes between processes is a handle, which needs its process; and the traceback goes along as text."""
    stream = io.BytesIO()
    try:
        torch.save(work(*args), stream)
    except BaseException:
        raise AssertionError(f"rank {args[0]}: {traceback.format_exc()}") from None
    return stream.getvalue()


def _error_of(answer: Any) -> BaseException | None:
    try:
        answer.get(0)
    except BaseException as error:
        return error
    return None


def off_policy_batch(learner: LearnerRank, seed: int = 0, **options: float) -> PackedBatch:
    """mu and pi_prox each some way from the current policy, so that ratios are clipped and weights truncated."""
    batch = random_batch(seed, **options)  # type: ignore[arg-type]
    now = learner.logprobs(batch)
    proximal = with_noisy_behavior(batch, now, std=0.25, seed=5).behavior_logprobs
    return replace(with_noisy_behavior(batch, proximal, std=0.6, seed=6), proximal_logprobs=proximal)


def poisoned(corrected: CorrectedBatch, value: float) -> CorrectedBatch:
    weights = corrected.importance_weights.clone()
    weights[corrected.keep_mask.nonzero()[3]] = value
    return replace(corrected, importance_weights=weights)
