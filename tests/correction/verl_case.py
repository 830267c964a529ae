"""Run by tests/test_library_page.py in an environment with verl: its own functions next to ours, on the same padded rows.

argv: the page, a file with the lines of its table {name: [verl's settings, ours]}. Prints, for each line, both losses and the largest
difference of their gradients; the same of the page's example, through verl's own ppo_loss; what verl's trainers make of it; and whether a
process that only imports verl knows the loss.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from evenkeel_correction import CorrectionConfig, correct, from_padded, pack_like, policy_loss
from tensordict import TensorDict
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu
from verl.workers.config.actor import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

page, lines = Path(sys.argv[1]).read_text(), json.loads(Path(sys.argv[2]).read_text())
torch.set_num_threads(1)
names: dict[str, Any] = {}
EXAMPLE: str = re.search(r"<!-- example: verl -->\n```python\n(.*?)```", page, re.DOTALL)[1]  # type: ignore[index]
exec(EXAMPLE, names)
ROWS, LONGEST = 8, 9
CORRECTION = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")


def rows() -> dict[str, torch.Tensor]:
    """Responses of unequal lengths with mismatch and drift, float64: what differs then differs by more than rounding."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, LONGEST + 1, (ROWS,), generator=generator)
    lengths[0] = LONGEST
    mask = torch.arange(LONGEST) < lengths[:, None]

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(ROWS, LONGEST, generator=generator, dtype=torch.float64)

    mu = -0.05 - 2 * torch.rand(ROWS, LONGEST, generator=generator, dtype=torch.float64)
    old = (mu + noise(0.3)).clamp(max=-1e-3)
    advantages = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64).expand(ROWS, LONGEST)
    zero = torch.zeros_like(mu)
    values = {"rollout_log_probs": mu, "old_log_probs": old, "log_prob": (old + noise(0.2)).clamp(max=-1e-3), "advantages": advantages}
    return {name: torch.where(mask, value, zero) for name, value in values.items()} | {"response_mask": mask.long()}


def actor(correction: dict[str, Any], **settings: Any) -> ActorConfig:
    policy = PolicyLossConfig(loss_mode=settings.pop("loss_mode", "vanilla"), rollout_correction=RolloutCorrectionConfig(**correction))
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True, policy_loss=policy, **settings,
    )  # fmt: skip


def verls(data: dict[str, torch.Tensor], log_prob: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    settings = {"clip_ratio_c": 1e9, **settings}  # 3 by default
    correction = {name: settings.pop(name) for name in list(settings) if name in (*CORRECTION, "bypass_mode", "loss_type")}
    correction.setdefault("rollout_is", None)
    scale = settings.get("loss_scale_factor")
    config = actor(correction, **settings)
    mask, weights, old = data["response_mask"], None, data["old_log_probs"]
    if correction.get("bypass_mode"):
        old, mode = data["rollout_log_probs"], "bypass_mode"
    elif config.policy_loss.loss_mode.startswith("dppo"):  # its anchor is mu: what verl has as old logprobs in bypass
        old, mode = data["rollout_log_probs"], config.policy_loss.loss_mode
    else:
        mode = config.policy_loss.loss_mode
        chosen = {name: correction[name] for name in CORRECTION if name in correction}
        proto, mask, _ = compute_rollout_correction_and_rejection_mask(old, data["rollout_log_probs"], mask, **chosen)
        weights = None if proto is None else proto.batch["rollout_is_weights"]
    if scale is not None:
        config.global_batch_info["loss_scale_factor"] = scale
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=old, log_prob=log_prob, advantages=data["advantages"], response_mask=mask, loss_agg_mode=config.loss_agg_mode,
        config=config, rollout_is_weights=weights,
    )  # fmt: skip
    return loss


def ours(data: dict[str, torch.Tensor], log_prob: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    config, mask = CorrectionConfig(**settings), data["response_mask"].bool()
    batch = from_padded(
        torch.zeros_like(mask).long(), mask, mask, data["rollout_log_probs"], data["advantages"], torch.arange(ROWS),
        advantages_by="own", proximal_logprobs=data["old_log_probs"],
    )  # fmt: skip
    trained = policy_loss(correct(batch, config), pack_like(log_prob, mask), config)
    return trained.loss * names["policy_scale"](trained.partials, config)


def compared(theirs: Any, mine: Any) -> dict[str, float]:
    found = []
    for way in (theirs, mine):
        log_prob = rows()["log_prob"].requires_grad_()
        loss = way(log_prob)
        loss.backward()
        found.append((loss.item(), log_prob.grad))
    (loss, gradient), (own_loss, own_gradient) = found
    size = float(gradient.abs().max())
    return {"theirs": loss, "ours": own_loss, "gradient": float((gradient - own_gradient).abs().max()) / size, "size": size}


def example(log_prob: torch.Tensor) -> torch.Tensor:
    """The page's driver and worker: verl's ppo_loss calls the registered loss in two micro-batches of nested tensors."""
    data = rows()
    _, data["rollout_is_weights"] = names["correct_in_driver"](data, optimizer_steps=1)
    loss = torch.zeros((), dtype=torch.float64)
    for part in (slice(0, 3), slice(3, ROWS)):
        mask = data["response_mask"][part]
        lengths = mask.sum(1).tolist()
        sequences = [torch.cat([log_prob[part][k, :n], log_prob.new_zeros(1)]) for k, n in enumerate(lengths)]  # a prompt of 1; shifted
        nested = {
            name: torch.nested.as_nested_tensor([data[name][part][k, :n] for k, n in enumerate(lengths)], layout=torch.jagged)
            for name in ("response_mask", "old_log_probs", "advantages", "rollout_is_weights")
        }
        nested["responses"] = nested["response_mask"]
        nested["prompts"] = torch.nested.as_nested_tensor([torch.zeros(1, dtype=torch.int64) for _ in lengths], layout=torch.jagged)
        batch = TensorDict(nested, batch_size=[len(lengths)])
        tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=int(data["response_mask"].sum()), global_batch_size=ROWS)
        part_loss, _ = ppo_loss(actor({"rollout_is": None}, loss_mode="evenkeel"), {"log_probs": torch.cat(sequences)}, batch)
        loss = loss + part_loss
    return loss


exec("from evenkeel_correction import policy_scale", names)
answer: dict[str, Any] = {"lines": {}}
for name, (theirs, mine) in lines.items():
    answer["lines"][name] = compared(lambda x, s=theirs: verls(rows(), x, dict(s)), lambda x, s=mine: ours(rows(), x, s))
answer["lines"]["example"] = compared(lambda x: ours(rows(), x, {"preset": "mis-full"}), example)
sys.path.insert(0, str(Path(__file__).parent))
from verl_trainers import run_all  # noqa: E402  # after the page's example, which it is given

answer["trainers"] = run_all(names, actor({"rollout_is": None}, loss_mode="evenkeel"))
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "evenkeel_verl.py").write_text(EXAMPLE)
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "evenkeel_verl"}
    environment["PYTHONPATH"] = os.pathsep.join([folder, environment.get("PYTHONPATH", "")])
    worker = "from verl.trainer.ppo.core_algos import get_policy_loss_fn; print(get_policy_loss_fn('evenkeel').__module__)"
    done = subprocess.run([sys.executable, "-c", worker], env=environment, capture_output=True, text=True, check=False)
    answer["worker"] = done.stdout.strip().splitlines()[-1:] or done.stderr[-2000:]
print(json.dumps(answer))
