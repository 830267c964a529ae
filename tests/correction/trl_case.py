"""Run by tests/test_library_page.py in an environment with TRL: the page's trainer next to TRL's own, on the same rows.

argv: the page, a file with the lines of its table {name: [TRL's settings, ours]}. Prints, for each line, both losses and the largest
difference of their gradients; the same for a mixture of experts with its router losses; what a short training run did and logged; and which
settings of TRL's loss are refused.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

page, lines = Path(sys.argv[1]).read_text(), json.loads(Path(sys.argv[2]).read_text())
torch.manual_seed(0)
torch.set_num_threads(1)
names: dict[str, Any] = {}
exec(re.search(r"<!-- example: trl -->\n```python\n(.*?)```", page, re.DOTALL)[1], names)  # type: ignore[index]
CorrectionConfig = names["CorrectionConfig"]
WORDS = 24


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{k}": k for k in range(2, WORDS)}}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, initializer_range=0.4, **sizes))


def experts() -> Qwen3MoeForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    routing = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=WORDS, max_position_embeddings=64, initializer_range=0.4, **sizes, **routing))


def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Random answers of unequal lengths, with the model's own logprobs and noise: a sampler with a mismatch."""
    draw, found = random.Random(len(prompts)), {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for prompt in prompts:
        ids = trainer.processing_class(prompt)["input_ids"]
        answer = [draw.randrange(2, WORDS) for _ in range(draw.randint(2, 7))]
        with torch.no_grad():
            logits = trainer.model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        noisy = [min(float(x) + draw.gauss(0, 0.4), -1e-3) for x in logprobs]
        for name, value in zip(found, (ids, answer, noisy), strict=True):
            found[name].append(value)
    return found


def trainer_of(correction: Any, make: Any = model, **settings: Any) -> Any:
    data = Dataset.from_list([{"prompt": f"w{k % 9 + 2} w{k % 7 + 3}"} for k in range(64)])
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1, per_device_train_batch_size=8,
        **{"num_generations": 4, "max_completion_length": 8, **settings},
    )  # fmt: skip
    reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    return names["CorrectedGRPOTrainer"](
        model=make(), reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer(), rollout_func=rollouts,
        correction=correction,
    )  # fmt: skip


def compared(trainer: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """Loss and gradient of TRL's own code and of the page's, on the rows that TRL's own code made."""
    usual = {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    usual |= {"vllm_importance_sampling_clip_min": None, "importance_sampling_level": "token", "off_policy_mask_threshold": None}
    usual |= {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "scale_rewards": "group", "max_completion_length": 8}
    if "epsilon" in theirs:
        theirs = {**theirs, "epsilon_low": theirs["epsilon"]}
    for name, value in (usual | theirs).items():
        setattr(trainer, name, value)
    for name in ("delta", "use_bias_correction_kl"):
        setattr(trainer.args, name, theirs.get(name))
    beta, trainer.beta = trainer.beta, 0.0
    trainer.correction = CorrectionConfig(**ours)
    torch.manual_seed(3)
    trainer.model.train()
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    rows = trainer._generate_and_score_completions([{"prompt": f"w{k // 4 + 2} w5"} for k in range(8)])
    trainer.beta = beta
    if beta:  # a reference, without a second model
        rows["ref_per_token_logps"] = rows["old_per_token_logps"] + 0.2 * torch.randn(rows["completion_mask"].shape) - 0.5
    with torch.no_grad():
        for parameter in trainer.model.parameters():  # a drift, so that the update's own ratio is not 1
            parameter.add_(0.03 * torch.randn_like(parameter))
    found = []
    for way in (GRPOTrainer._compute_loss, type(trainer)._compute_loss):
        trainer.model.zero_grad()
        loss = way(trainer, trainer.model, rows)
        loss.backward()
        found.append((loss.item(), torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])))
    trainer.model.load_state_dict(start)
    (loss, gradient), (own_loss, own_gradient) = found
    away = float((gradient - own_gradient).abs().max() / gradient.abs().max())
    return {"theirs": loss, "ours": own_loss, "gradient": away, "size": float(gradient.abs().max())}


def sampled_elsewhere(trainer: Any) -> Any:
    """The rows then carry TRL's own correction."""
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = 1
    return trainer


TIS = CorrectionConfig(preset="tis-token")
answer: dict[str, Any] = {"lines": {}}
trainer = sampled_elsewhere(trainer_of(TIS, steps_per_generation=1))
for name, (theirs, ours) in lines.items():
    answer["lines"][name] = compared(trainer, theirs, ours)
routed = sampled_elsewhere(trainer_of(TIS, experts, steps_per_generation=1, router_aux_loss_coef=0.5))
answer["lines"]["experts"] = compared(routed, {}, {"preset": "tis-token"})

# What TRL's forward pass takes of a batch beside the texts; the model here has no use for them.
seen: dict[str, Any] = {}
forward = GRPOTrainer._get_per_token_logps_and_entropies
IMAGES = {"pixel_values": 1, "image_grid_thw": 2, "num_images": [3], "image_sizes": 4, "mm_token_type_ids": 5}


def looked_at(self: Any, *args: Any, pixel_values: Any = None, image_grid_thw: Any = None, num_images: Any = None, image_sizes: Any = None,
              mm_token_type_ids: Any = None, **more: Any) -> Any:  # fmt: skip
    given = (pixel_values, image_grid_thw, num_images, image_sizes, mm_token_type_ids)
    seen.update({name: value for name, value in zip(IMAGES, given, strict=True) if value is not None})
    return forward(self, *args, **more)


trainer.beta, trainer.correction = 0.0, TIS
rows = trainer._generate_and_score_completions([{"prompt": f"w{k // 4 + 2} w5"} for k in range(8)])
GRPOTrainer._get_per_token_logps_and_entropies = looked_at
trainer._compute_loss(trainer.model, rows | IMAGES)
GRPOTrainer._get_per_token_logps_and_entropies = forward
answer["images"] = seen == IMAGES

CHANGED = {
    "loss_type": "grpo", "importance_sampling_level": "sequence", "use_bias_correction_kl": False, "use_adaptive_entropy": True,
    "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_correction": False, "top_entropy_quantile": 0.5,
}  # fmt: skip
answer["refused"] = {}
for name in names["REPLACED"]:
    try:
        trainer_of(TIS, **{name: CHANGED.get(name, 0.3)})
    except Exception as error:
        answer["refused"][name] = f"{type(error).__name__}: {error}"

run = trainer_of(
    CorrectionConfig(preset="mis-token"), steps_per_generation=4, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-2
)
before = {name: value.clone() for name, value in run.model.state_dict().items()}
run.train()
answer["moved"] = max(float((value - before[name]).abs().max()) for name, value in run.model.state_dict().items())
answer["logged"] = [line for line in run.state.log_history if "loss" in line]
print(json.dumps(answer))
