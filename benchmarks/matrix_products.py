"""Float32 matrix products on a CPU: torch's own (MKL) against oneDNN's, which learner and engines use on this processor or don't.

    OMP_NUM_THREADS=1 python benchmarks/matrix_products.py [--turns 7]

Shapes of the nano recipe, for a decode step of 64 requests and a micro-batch of 2,048 rows, forward and for the weight's gradient. Compares
the fastest turn of each, in turns, since other work on the machine can only slow a turn down.

And the products of a decode step of SmolLM2-135M-Instruct, all layers and the head, so that the weights come from memory: MKL against the
engine's own kernel (rollout/sglang_plugin/products.c), which it has where the kernel's bits are MKL's; by processor time.

And whether a row's results depend on the other rows: of the real model's products, the share that differs from that of 512 rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.sides import in_turns, options, seconds_of
from evenkeel.engines.matrix_products import is_needed, product
from evenkeel.rollout.sglang_plugin.products import FewRows

LAYERS = {"gate and up": (384, 2816), "down": (1408, 384), "query, key, value": (384, 512), "attention's output": (256, 384)}
"""Inner and outer size of each product of a layer."""
REAL = {"gate and up": (576, 3072), "down": (1536, 576), "query, key, value": (576, 960), "attention's output": (576, 576)}
REAL_LAYERS, REAL_HEAD = 30, (576, 49152)


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
    print_few_rows(turns)
    print_row_dependence()


def print_few_rows(turns: int) -> None:
    """The real model's decode steps."""
    kernel = FewRows()
    print(f"a decode step of a real model; the engine {'uses' if kernel.agrees and not is_needed() else 'does not use'} its kernel here")
    print("  rows  MKL / kernel: layers  head")
    layers = [torch.randn(outer, inner).t() for inner, outer in REAL.values() for _ in range(REAL_LAYERS)]
    head = [torch.randn(*reversed(REAL_HEAD)).t()]
    for rows in (2, 4, 16, 64):
        inputs = {inner: torch.randn(rows, inner) for inner, _ in REAL.values()}

        def step(multiply: Callable[[Tensor, Tensor], Tensor], weights: list[Tensor], inputs: dict[int, Tensor] = inputs) -> float:
            began = time.process_time()  # not the clock: a whole step is long enough for other work to come between
            for weight in weights:
                multiply(inputs[len(weight)], weight)
            return time.process_time() - began

        ratios = []
        for weights in (layers, head):
            ways = {"MKL": torch.mm, "kernel": kernel.product}
            times = in_turns({way: lambda _, do=do, weights=weights: step(do, weights) for way, do in ways.items()}, turns, warm_up=1)
            ratios.append(min(times["MKL"]) / min(times["kernel"]))
        print(f"{rows:>6}  {ratios[0]:20.2f}  {ratios[1]:4.2f}", flush=True)


def print_row_dependence() -> None:
    """For each type, the product of the real model that depends most on the number of rows."""
    print("results that are others than among 512 rows, of the product that has most of them")
    print("  rows  float32  bfloat16")
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(512, inner, generator=generator), torch.randn(outer, inner, generator=generator)) for inner, outer in REAL.values()
    ]
    for rows in (1, 4, 16, 30, 64, 256):
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            typed = [(x.to(dtype), weight.to(dtype).t()) for x, weight in pairs]
            found.append(max(float((x[:rows] @ weight != (x @ weight)[:rows]).double().mean()) for x, weight in typed))
        print(f"{rows:>6}  {found[0]:7.1e}  {found[1]:8.1e}", flush=True)


if __name__ == "__main__":
    main()
