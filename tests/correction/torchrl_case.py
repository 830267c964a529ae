"""Run by tests/test_library_page.py in an environment with TorchRL: its GRPO losses next to ours, on the same padded rows.

argv: the page, a file with the lines of its table {name: [TorchRL's settings, ours]}. Prints, for each line, both losses and the largest
difference of their gradients with respect to the logits; and advantages of both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from evenkeel_correction import CorrectionConfig, correct, from_padded, group_advantages, pack_like, policy_loss, policy_scale
from tensordict import TensorDict
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.objectives.llm import CISPOLoss, GRPOLoss, MCAdvantage

lines = json.loads(Path(sys.argv[2]).read_text())
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # what differs then differs by more than rounding
ROWS, LONGEST, WORDS = 8, 9, 13
LOSSES = {"GRPOLoss": GRPOLoss, "CISPOLoss": CISPOLoss}


class Actor(torch.nn.Module):
    """As much of TorchRL's wrapper of a language model as its loss asks for: the distribution of the tokens, and which of them count."""

    in_keys = ()

    def get_dist(self, rows: TensorDict, **_: Any) -> LLMMaskedCategorical:
        return LLMMaskedCategorical(logits=rows["logits"], mask=rows["mask"])


def rows() -> TensorDict:
    """Answers of unequal lengths, padded on the left as TorchRL does, of a sampler that is not the learner."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, LONGEST + 1, (ROWS,), generator=generator)
    lengths[0] = LONGEST
    mask = torch.arange(LONGEST).flip(0) < lengths[:, None]
    logits = torch.randn(ROWS, LONGEST, WORDS, generator=generator)
    tokens = torch.randint(0, WORDS, (ROWS, LONGEST), generator=generator)
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    noise = 0.3 * torch.randn(2, ROWS, LONGEST, generator=generator)
    values = {"mu": (chosen + noise[0]).clamp(max=-1e-3), "reference": (chosen + noise[1] - 0.2).clamp(max=-1e-3)}
    advantages = torch.randn(ROWS, 1, generator=generator).expand(ROWS, LONGEST)
    kept = {name: torch.where(mask, value, 0.0) for name, value in values.items()}
    return TensorDict({**kept, "logits": logits, "tokens": tokens, "mask": mask, "advantages": advantages}, batch_size=[ROWS])


def torchrls(data: TensorDict, logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    settings = {"loss": "GRPOLoss", **settings}
    kind = LOSSES[settings.pop("loss")]
    if isinstance(settings.get("clip_epsilon"), list):
        settings["clip_epsilon"] = tuple(settings["clip_epsilon"])
    if "kl_to_ref_coeff" in settings:  # of a mean over all positions, padding among them
        settings["kl_to_ref_coeff"] *= data["mask"].numel() / float(data["mask"].sum())
    loss = kind(Actor(), masking_strategy="generic", entropy_bonus=False, **settings)
    given = TensorDict(
        {
            "tokens": {"full": torch.where(data["mask"], data["tokens"], -100)},
            "log_probs": {"full": data["mu"]},
            "next": {"ref_log_probs": {"full": data["reference"]}},
            "advantage": data["advantages"][..., None],
            "logits": logits,
            "mask": data["mask"],
        },
        batch_size=[ROWS],
    )
    found = loss(given)
    total = found.loss_objective.sum()
    return total if found.loss_kl_to_ref is None else total + found.loss_kl_to_ref


def ours(data: TensorDict, logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    config, mask = CorrectionConfig(**settings), data["mask"]
    batch = from_padded(
        data["tokens"], mask, mask, data["mu"], data["advantages"], torch.arange(ROWS), advantages_by="own",
        reference_logprobs=data["reference"] if config.kl.coefficient else None,
    )  # fmt: skip
    target = logits.log_softmax(-1).gather(-1, data["tokens"][..., None])[..., 0]
    trained = policy_loss(correct(batch, config), pack_like(target, mask), config)
    return trained.loss * policy_scale(trained.partials, config)


def compared(theirs: dict[str, Any], mine: dict[str, Any]) -> dict[str, float]:
    found, data = [], rows()
    for way, settings in ((torchrls, theirs), (ours, mine)):
        logits = data["logits"].clone().requires_grad_()
        loss = way(data, logits, dict(settings))
        loss.backward()
        found.append((loss.item(), logits.grad))
    (loss, gradient), (own_loss, own_gradient) = found
    size = float(gradient.abs().max())
    return {"theirs": loss, "ours": own_loss, "gradient": float((gradient - own_gradient).abs().max()) / size, "size": size}


def advantages() -> dict[str, list[float]]:
    """Of two groups of four, by TorchRL's transform of a replay buffer and by ours."""
    rewards, group_ids = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.2, 0.9, 0.1, 0.3]), torch.arange(8) // 4
    transform, found = MCAdvantage(grpo_size=4, prompt_key="group_id", trajectory_return="sum"), {}
    for k, group in enumerate(group_ids.tolist()):
        step = {"group_id": torch.tensor([group]), "row": torch.tensor([[k]])}
        next_ = TensorDict({"reward": rewards[k].reshape(1, 1), "done": torch.ones(1, 1, dtype=torch.bool)}, batch_size=[1])
        done = transform.inv(TensorDict({**step, "next": next_}, batch_size=[1]))
        if done is not None:
            found |= dict(zip(done["row"].flatten().tolist(), done["advantage"].flatten().tolist(), strict=True))
    return {"theirs": [found[k] for k in range(8)], "ours": group_advantages(rewards, group_ids, estimator="grpo", epsilon=1e-12).tolist()}


answer: dict[str, Any] = {"lines": {name: compared(theirs, mine) for name, (theirs, mine) in lines.items()}, "advantages": advantages()}
print(json.dumps(answer))
