"""One prompt becomes its G trajectories, through an engine."""

from __future__ import annotations

import hashlib
from typing import Protocol

from rollout.completion import Completion
from rollout.engine import RolloutEngine
from rollout.trajectory import FinishReason, Prompt, Trajectory


class Tokenizer(Protocol):
    """What of a Hugging Face tokenizer is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


async def sample_trajectories(
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    samples: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    topk: int = 0,
    deadline_s: float | None = None,
) -> tuple[Trajectory, ...]:
    """Sample G answers; rewards are not scored yet.

    Args:
        samples: G.
        seed: of the run, see sample_seed.
        topk: most likely tokens to keep with each sampled one.
        deadline_s: for the slowest of them; unset: rollout.engine.deadlines.generate_s.
    Returns: G trajectories in the order of their seeds; those that the engine aborted carry an error and are not valid.
    Raises: as RolloutEngine.generate.
    """
    completions = await engine.generate(
        prompt.token_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        samples=samples,
        seeds=[sample_seed(seed, prompt.prompt_id, index) for index in range(samples)],
        topk=topk,
        deadline_s=deadline_s,
    )
    return tuple(to_trajectory(prompt, completion, tokenizer) for completion in completions)


def sample_seed(run_seed: int, prompt_id: str, index: int) -> int:
    """Of the index-th sample of a prompt, in [0, 2^63). A prompt's id holds its epoch, so that it is sampled afresh when it comes again."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def to_trajectory(prompt: Prompt, completion: Completion, tokenizer: Tokenizer) -> Trajectory:
    """Decode a completion; tokens and logprobs stay as they were sampled, the text is for the reward function and for people."""
    is_aborted = completion.finish_reason is FinishReason.ABORT
    return Trajectory(
        prompt_id=prompt.prompt_id,
        prompt_ids=tuple(prompt.token_ids),
        response_ids=completion.token_ids,
        behavior_logprobs=completion.logprobs,
        version_spans=completion.version_spans,
        finish_reason=completion.finish_reason,
        top_logprobs=completion.top_logprobs,
        routed_experts=completion.routed_experts,
        text=tokenizer.decode(list(completion.token_ids), skip_special_tokens=True),
        error="the engine aborted the request" if is_aborted else None,
    )
