"""Behaviour logprobs as the learner computes them: log_softmax(logits / temperature) in float32, over the whole vocabulary.

SGLang's own sampler returns log(softmax(x)), which differs in the last bits and is minus infinity below the smallest float32;
its switch SGLANG_RETURN_ORIGINAL_LOGPROB leaves the temperature out. Hence a sampler of ours, in SGLang's registry of samplers.
"""


from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from torch import Tensor

BACKEND = "pytorch"
"""Value of SGLang's `sampling_backend` that selects our sampler; on a CPU SGLang sets this name whatever is asked for."""


def register() -> None:
    register_sampler_backend(BACKEND, LogSoftmaxSampler)



class LogSoftmaxSampler(Sampler):  # type: ignore[misc]  # SGLang has no types
    """Samples from exp(logprobs) of the very logprobs that it reports. Greedy batches and sampling masks stay SGLang's."""

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
            return self._stock(logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        logprobs = torch.log_softmax(logits.float() / sampling_info.temperatures, dim=-1)
        samples_whole_vocabulary = not (
            sampling_info.need_top_p_sampling or sampling_info.need_top_k_sampling or sampling_info.need_min_p_sampling
        )
        token_ids: Tensor
        token_ids, _ = self._sample_from_probs(logprobs.exp(), sampling_info, positions, samples_whole_vocabulary)
        if return_logprob:
            result = self.output_logprob_processor.compute_logprobs(logprobs, top_logprobs_nums, token_ids_logprobs, token_ids)
            result.write_output_to(logits_output)
        self._sync_token_ids_across_tp(token_ids, sampling_info)
        return token_ids

    def _stock(self, *arguments: Any) -> Tensor:
        token_ids: Tensor = super().forward(*arguments)
        return token_ids
