"""Float32 matrix products on a CPU: torch's own (MKL) against oneDNN's, which learner and engines use on this processor or don't.

    OMP_NUM_THREADS=1 python benchmarks/matrix_products.py [--turns 7]

Shapes of the nano recipe, for a decode step of 64 requests and a micro-batch of 2,048 rows, forward and for the weight's gradient. Compares
the fastest turn of each, in turns, since other work on the machine can only slow a turn down.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from correction.engines.matrix_products import is_needed, product

LAYERS = {"gate and up": (384, 2816), "down": (1408, 384), "query, key, value": (384, 512), "attention's output": (256, 384)}
"""Inner and outer size of each product of a layer."""


def seconds(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    """Of one product, the mean over about 50 ms."""
    repeats = max(3, int(5e9 / (2 * a.numel() * b.shape[1])))
    began = time.perf_counter()
    for _ in range(repeats):
        multiply(a, b)
    return (time.perf_counter() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    used = "use" if is_needed() else "don't use"
    print(f"{torch.get_num_threads()} threads; learner and engines {used} oneDNN here")
    print("  rows  product                        MKL / oneDNN  oneDNN, GFLOP/s")
    for rows in (64, 2048):
        for name, (inner, outer) in LAYERS.items():
            x, weight, slope = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
            pairs = {name: (x, weight.t())} | ({f"{name}: gradient": (slope.t(), x)} if rows > 64 else {})
            for what, (a, b) in pairs.items():
                product(a, b)  # compiles
                times = [(seconds(torch.mm, a, b), seconds(product, a, b)) for _ in range(turns)]
                plain, ours = (min(column) for column in zip(*times, strict=True))
                print(f"{rows:>6}  {what:<30} {plain / ours:5.2f}  {2e-9 * a.numel() * b.shape[1] / ours:15.0f}")


if __name__ == "__main__":
    main()
