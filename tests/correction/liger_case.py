"""Run by tests/test_library_page.py in an environment with Liger-Kernel: its GRPO losses next to ours, on the same padded rows.

argv: the page, a file with the lines of its table {name: [Liger's settings, ours]}. Prints, for each line, both losses and the largest
difference of their gradients with respect to the head's weight, by LigerFusedLinearGRPOLoss, which is plain torch, here in float64; and the
same by the Triton kernel, which takes logits, in float32, as Triton's interpreter runs it on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch
from evenkeel_correction import CorrectionConfig, correct, from_padded, pack_like, policy_loss
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, fused_linear_ppo, grpo_loss
from liger_kernel.transformers.grpo_loss import triton_grpo_loss

lines = json.loads(Path(sys.argv[2]).read_text())
torch.set_num_threads(1)
ROWS, LONGEST, WIDTH, WORDS = 8, 9, 5, 7
LENGTH = 16
"""For dr_grpo: the longest completion."""


def rows() -> dict[str, torch.Tensor]:
    """Answers of unequal lengths with mismatch and drift, in float32, as Liger's kernel takes them; ours computes with them in float64."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, LONGEST + 1, (ROWS,), generator=generator)
    lengths[0] = LONGEST
    mask = torch.arange(LONGEST) < lengths[:, None]
    hidden, weight = torch.randn(ROWS, LONGEST, WIDTH, generator=generator), torch.randn(WORDS, WIDTH, generator=generator)
    tokens = torch.randint(0, WORDS, (ROWS, LONGEST), generator=generator)
    chosen = logprobs(hidden @ weight.T, tokens)
    drift, mismatch, away = 0.3 * torch.randn(3, ROWS, LONGEST, generator=generator)
    old = (chosen + drift).clamp(max=-1e-3)
    values = {"old": old, "mu": (old + mismatch).clamp(max=-1e-3), "reference": (chosen + away - 0.2).clamp(max=-1e-3)}
    fixed = {"hidden": hidden, "weight": weight, "tokens": tokens, "mask": mask, "advantages": torch.randn(ROWS, generator=generator)}
    return {name: torch.where(mask, value, 0.0) for name, value in values.items()} | fixed


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def given_ratio(data: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor | None:
    """What the caller computes, as TRL does: `vllm_is_ratio`, truncated."""
    most = settings.pop("vllm_is_ratio", None)
    return None if most is None else torch.where(data["mask"], (data["old"] - data["mu"]).exp().clamp(max=most), 1.0)


class TorchInDouble:
    """torch for Liger's modules: where they name float32, float64. Their loss rounds each log-probability to float32 otherwise, which
    VESPO, of the sum of an answer's log ratios, raises to 1.6e-6 of the gradient on some processors, and to 0.9e-6 on others."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def fused(data: dict[str, torch.Tensor], weight: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Liger's loss that takes hidden states and the head's weight, in float64."""
    fused_linear_ppo.torch = grpo_loss.torch = TorchInDouble()
    data = {name: value.double() if value.is_floating_point() else value for name, value in data.items()}
    ratio, settings = given_ratio(data, settings), {"beta": 0.0, "max_completion_length": LENGTH, **settings}
    loss = LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=settings["beta"] != 0, **settings)
    given = (data["hidden"], weight.double(), data["tokens"], data["mask"].double(), data["advantages"])
    reference = data["reference"] if settings["beta"] else None
    in_float = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    try:
        return loss(*given, ref_per_token_logps=reference, old_per_token_logps=data["old"], vllm_is_ratio=ratio)[0]
    finally:
        torch.Tensor.float = in_float


def kernel(data: dict[str, torch.Tensor], weight: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Liger's Triton kernel, which takes logits, one position more than there are answers' tokens."""
    ratio, settings = given_ratio(data, settings), {"beta": 0.0, "max_completion_length": LENGTH, **settings}
    clips = {"eps_low": settings.pop("epsilon_low", 0.2), "eps_high": settings.pop("epsilon_high", 0.2)}
    logits = torch.nn.functional.pad(data["hidden"] @ weight.T, (0, 0, 0, 1)).contiguous()
    return triton_grpo_loss(
        logits, data["old"], data["reference"] if settings["beta"] else None, data["tokens"], data["advantages"], data["mask"].float(),
        temperature=1.0, inplace=False, reduce=True, vllm_is_ratio=ratio, **clips, **settings,
    )[0]  # fmt: skip


def ours(data: dict[str, torch.Tensor], weight: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    config, mask = CorrectionConfig(**settings), data["mask"]
    batch = from_padded(
        data["tokens"], mask, mask, data["mu"], data["advantages"][:, None].expand(mask.shape), torch.arange(ROWS), advantages_by="own",
        proximal_logprobs=data["old"], reference_logprobs=data["reference"] if config.kl.coefficient else None,
    )  # fmt: skip
    target = logprobs(data["hidden"].double() @ weight.double().T, data["tokens"])
    return policy_loss(correct(batch, config), pack_like(target, mask), config).loss


def compared(their_way: Any, theirs: dict[str, Any], mine: dict[str, Any]) -> dict[str, float]:
    found, data = [], rows()
    for way, settings in ((their_way, theirs), (ours, mine)):
        weight = data["weight"].clone().requires_grad_()
        loss = way(data, weight, dict(settings))
        loss.backward()
        found.append((loss.item(), weight.grad))
    (loss, gradient), (own_loss, own_gradient) = found
    size = float(gradient.abs().max())
    return {"theirs": loss, "ours": own_loss, "gradient": float((gradient - own_gradient).abs().max()) / size, "size": size}


answer: dict[str, Any] = {"lines": {name: compared(fused, theirs, mine) for name, (theirs, mine) in lines.items()}}
answer["kernel"] = {name: compared(kernel, theirs, mine) for name, (theirs, mine) in lines.items()}
print(json.dumps(answer))
