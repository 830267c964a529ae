"""Float32 matrix products on a CPU: torch's own (MKL) against oneDNN's, which learner and engines use on this processor or don't.

    OMP_NUM_THREADS=1 python benchmarks/matrix_products.py [--turns 7]

Shapes of the nano recipe, for a decode step of 64 requests and a micro-batch of 2,048 rows, forward and for the weight's gradient. Compares
the fastest turn of each, in turns, since other work on the machine can only slow a turn down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.sides import in_turns, options, seconds_of
from evenkeel.engines.matrix_products import is_needed, product

LAYERS = {"gate and up": (384, 2816), "down": (1408, 384), "query, key, value": (384, 512), "attention's output": (256, 384)}
"""Inner and outer size of each product of a layer."""


def seconds(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    """Of one product, the mean over about 50 ms."""
    repeats = max(3, int(5e9 / (2 * a.numel() * b.shape[1])))
    return seconds_of(lambda: [multiply(a, b) for _ in range(repeats)]) / repeats


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    print(f"{torch.get_num_threads()} threads; learner and engines {'use' if is_needed() else 'do not use'} oneDNN here")
    print("  rows  product                        MKL / oneDNN  oneDNN, GFLOP/s")
    for rows in (64, 2048):
        for name, (inner, outer) in LAYERS.items():
            x, weight, slope = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
            pairs = {name: (x, weight.t())} | ({f"{name}: gradient": (slope.t(), x)} if rows > 64 else {})
            for what, (a, b) in pairs.items():
                product(a, b)  # compiles
                ways = {"MKL": torch.mm, "oneDNN": product}
                times = in_turns({way: lambda _, do=do, a=a, b=b: seconds(do, a, b) for way, do in ways.items()}, turns)
                mkl, ours = min(times["MKL"]), min(times["oneDNN"])
                print(f"{rows:>6}  {what:<30} {mkl / ours:5.2f}  {2e-9 * a.numel() * b.shape[1] / ours:15.0f}")


if __name__ == "__main__":
    main()
