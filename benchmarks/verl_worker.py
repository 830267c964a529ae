"""The other side of benchmarks/correction_pass.py: verl's own helper, run by the Python of an environment that has verl.

Reads a padded batch, then does one round for each line on stdin. Answers with one line of JSON: verl's metrics the
first time, then the seconds of each round.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask


def main() -> None:
    batch = torch.load(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    for number, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        _, _, metrics = compute_rollout_correction_and_rejection_mask(
            **batch,
            rollout_is="token",
            rollout_is_threshold=2.0,
            rollout_is_batch_normalize=True,
            rollout_rs="token_k1",
            rollout_rs_threshold="0.5_2.0",
        )
        seconds = time.perf_counter() - began
        print(json.dumps(metrics if number == 0 else {"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
