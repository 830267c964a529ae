"""How far two engines drift apart by number format alone: a softmax in low precision against the same one in float32.

    python benchmarks/precision.py [--formats bfloat16 float16 ...] [--tokens 50000]

The experiment behind Table 2 of "Probing RLVR training instability through the lens of objective-level hacking". The table's KL column
is a quantity of histograms that the paper doesn't define, not a KL of tokens. What is printed here is the k3 of tokens, which is a thousand
times smaller.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import options
from evenkeel.correction.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_ROWS = 1000


@dataclass(frozen=True, slots=True)
class PrecisionGap:
    """Ratio of the sampled token's probability in float32 (trainer) to that in the low format (engine)."""

    dtype: str
    tokens: int
    ratio_mean: float
    ratio_std: float
    """"Mismatch" in the paper; over all tokens (ddof 0)."""
    ratio_max: float
    ratio_min: float
    k3_kl: float
    """KL(engine || trainer), nats, estimator ratio - 1 - log ratio."""


def precision_gap(
    dtype: str = "bfloat16", *, tokens: int = 50_000, vocabulary: int = 2048, logit_std: float = 1.5, seed: int = 1234
) -> PrecisionGap:
    """Sample tokens from a softmax whose logits and probabilities are in `dtype`, and compare with float32.

    Args:
        dtype: a key of DTYPES.
        tokens: each from logits of its own, independent normal with standard deviation logit_std.
    Raises: ConfigError for a format in which all probabilities of a token round to 0.
    Source: Table 2 of the paper above; its figures come out when both logits and probabilities are rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    ratios = torch.cat(
        [_sampled_ratios(DTYPES[dtype], min(_ROWS, tokens - start), vocabulary, logit_std, generator) for start in range(0, tokens, _ROWS)]
    )
    return PrecisionGap(
        dtype=dtype,
        tokens=tokens,
        ratio_mean=float(ratios.mean()),
        ratio_std=float(ratios.std(correction=0)),
        ratio_max=float(ratios.max()),
        ratio_min=float(ratios.min()),
        k3_kl=float((ratios - 1 - (ratios - 1).log1p()).mean()),
    )


def precision_table(gaps: list[PrecisionGap]) -> str:
    """Lines for people, with a title."""
    lines = [f"{'dtype':14s} {'tokens':>7s} {'ratio mean':>11s} {'std':>9s} {'max':>8s} {'min':>8s} {'token k3':>10s}"]
    for gap in gaps:
        lines.append(
            f"{gap.dtype:14s} {gap.tokens:7d} {gap.ratio_mean:11.6f} {gap.ratio_std:9.6f} {gap.ratio_max:8.5f} {gap.ratio_min:8.5f} "
            f"{gap.k3_kl:10.2e}"
        )
    lines.append("Published for bfloat16: mean 1.0000, std 0.0048, max about 1.019, min about 0.981. Its KL column is no token KL.")
    return "\n".join(lines)


def _sampled_ratios(dtype: torch.dtype, rows: int, vocabulary: int, logit_std: float, generator: torch.Generator) -> Tensor:
    """[rows] float64 ratios of sampled tokens. Kernels of low formats add up in float32 too, so that rounding in and out is all."""
    logits = logit_std * torch.randn(rows, vocabulary, generator=generator)
    engine = logits.to(dtype).float().softmax(-1).to(dtype).float()
    if bool((engine.sum(-1) == 0).any()):
        raise ConfigError(f"precision: in {dtype} every probability of a token is 0. Take fewer words than {vocabulary}, or more bits.")
    token = torch.multinomial(engine, 1, generator=generator)
    return (logits.softmax(-1).gather(1, token).double() / engine.gather(1, token).double()).squeeze(1)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--formats", nargs="*", choices=list(DTYPES), default=["bfloat16", "float16"])
    parser.add_argument("--tokens", type=int, default=50_000, help="more give steadier numbers")
    arguments = parser.parse_args()
    print(precision_table([precision_gap(dtype, tokens=arguments.tokens) for dtype in arguments.formats]))


if __name__ == "__main__":
    main()
