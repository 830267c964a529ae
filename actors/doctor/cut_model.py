"""A two-layer model with the widths of another one and random weights, and its logprobs and gradient norm in float32 on a CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from correction.engines.expert_count import expert_count
from learner.config import LearnerConfig
from learner.hf.tensor_files import save_model

VOCABULARY = 4096
CONTEXT = 1024
_SEED = 7


@dataclass(frozen=True, slots=True)
class Reference:
    """Computed by transformers in float32 on a CPU."""

    logprobs: list[float]
    """[tokens - 1] nats: of the first sequence's tokens from its second on."""
    gradient_norm: float
    """Norm of the gradient of the mean cross-entropy, over all tokens but the first of each sequence."""


def cut_config(content: Mapping[str, Any], learner: LearnerConfig) -> dict[str, Any]:
    """A config.json with the fewest layers, a vocabulary and experts that the learner's layout can divide; widths stay as they are."""
    cut = dict(content.get("text_config", content))
    stages = learner.pipeline_parallel * learner.virtual_pipeline
    cut["num_hidden_layers"] = layers = max(2, stages)
    cut["vocab_size"] = min(cut["vocab_size"], VOCABULARY)
    cut["max_position_embeddings"] = min(cut["max_position_embeddings"], CONTEXT)
    if "layer_types" in cut:
        cut["layer_types"] = list(cut["layer_types"])[:layers]
    for key in ("num_experts", "num_local_experts"):
        if expert_count(cut["model_type"], cut.get(key)):
            ranks = learner.expert_parallel
            cut[key] = min(cut[key], -(-2 * cut["num_experts_per_tok"] // ranks) * ranks)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(cut.get(key), int):
            cut[key] = min(cut[key], cut["vocab_size"] - 1)
        else:
            cut.pop(key, None)
    return cut


def write_config(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write the config.json, which is all that an engine reads here. Returns: the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def make_model(folder: Path, content: Mapping[str, Any], dtype: str) -> None:
    """Write the model's folder, unless it exists; the weights are the same on every node.

    Args: dtype: to which the weights are rounded; they are saved in float32.
    """
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "config.json").exists():
            partial = write_config(folder.with_suffix(".partial"), content)
            save_model(_model(partial, dtype), partial)
            partial.rename(folder)


def remove_model(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".lock").unlink(missing_ok=True)


def reference(folder: Path, sequences: Sequence[Sequence[int]]) -> Reference:
    """Args: sequences: token ids, all of one length."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    ids = torch.tensor([list(one) for one in sequences])
    logprobs = torch.log_softmax(model(ids).logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    (-logprobs.mean()).backward()  # type: ignore[no-untyped-call]
    squares = sum(float(one.grad.double().square().sum()) for one in model.parameters() if one.grad is not None)
    return Reference(logprobs[0].tolist(), squares**0.5)


def _model(folder: Path, dtype: str) -> Any:
    """A model in which every layer influences the output: matrices preserve the scale of activations, norm weights differ from 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with no_init_weights():  # each value is drawn once: a model of 8B's widths has 450 million here
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.tie_weights()  # left out with the initialisation
    torch.manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=1.0, std=0.1)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            parameter.copy_(parameter.to(getattr(torch, dtype)).float())
    return model
