"""The other side of benchmarks/correction_pass.py: verl's own helper, run by the Python of an environment that has verl.

The first question is a padded batch's file and a number of threads; it and every other one is a round: verl's metrics, and its seconds.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from sides import serve
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

batch: dict[str, torch.Tensor] = {}


def one_round(question: dict[str, Any] | None) -> dict[str, Any]:
    if question is not None:
        batch.update(torch.load(question["file"]))
        torch.set_num_threads(question["threads"])
    began = time.perf_counter()
    _, _, metrics = compute_rollout_correction_and_rejection_mask(
        **batch,
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.5_2.0",
    )
    return {"seconds": time.perf_counter() - began, "metrics": metrics}


if __name__ == "__main__":
    serve(one_round)
