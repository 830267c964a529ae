"""What can be seen to be wrong with what the correction is given: refused in a sentence that names it.

Numbers of tensors are looked at together, in one transfer from their device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError, DataError
from .settings.parts import CorrectionSettings

LARGEST_LOGPROB = 1e-2
"""Nats: more than a float32 softmax of logits of 10,000 is over 0 by rounding, and less than a wrong sign or a logit is at some token."""
FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
VERSIONS = range(-1, 2**31)
"""What a weight version may be in int32; -1: no weights sampled the token."""


def check_tensor(name: str, value: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Args: shape: wanted; None: any size. Raises: DataError."""
    if not isinstance(value, Tensor):
        raise DataError(f"{name} is {_a(value)}; it must be a torch tensor. from_lists takes lists, from_padded padded tensors")
    if len(value.shape) != len(shape) or any(want not in (None, got) for want, got in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise DataError(f"{name} has shape {tuple(value.shape)}; it must be [{wanted}]: another shape would be broadcast to every token")
    if value.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DataError(f"{name} must be {names}, got {value.dtype}")


def check_batch_shapes(batch: Any) -> None:
    """Args: batch: a PackedBatch. Raises: DataError for what is no tensor, or of another shape or type than its docstring says."""
    check_tensor("PackedBatch.token_ids", batch.token_ids, (None,), INTEGERS)
    check_tensor("PackedBatch.offsets", batch.offsets, (None,), (torch.int64,))
    n, s, k = batch.num_tokens, batch.num_sequences, None
    if s < 0:
        raise DataError("PackedBatch.offsets is empty; it must rise from 0 to the number of tokens")
    if isinstance(batch.topk_ids, Tensor) and batch.topk_ids.dim():
        k = batch.topk_ids.shape[-1]
    required = {"loss_mask": (torch.bool,), "behavior_logprobs": FLOATS, "advantages": FLOATS, "weight_versions": INTEGERS}
    optional = {"proximal_logprobs": FLOATS, "at_sampling_logprobs": FLOATS, "reference_logprobs": FLOATS, "turn_ids": INTEGERS}
    for name, dtypes in required.items():
        check_tensor(f"PackedBatch.{name}", getattr(batch, name), (n,), dtypes)
    check_tensor("PackedBatch.group_ids", batch.group_ids, (s,), INTEGERS)
    _check_optional("PackedBatch", batch, {name: ((n,), dtypes) for name, dtypes in optional.items()} | {"rollout_ids": ((s,), INTEGERS)})
    wide = {"topk_ids": ((n, None), INTEGERS), "topk_logprobs": ((n, k), FLOATS), "routed_experts": ((n, None, None), INTEGERS)}
    if (batch.kept_counts is None) != (batch.kept_ids is None):
        raise DataError("PackedBatch.kept_counts and kept_ids: one without the other says nothing of the kept sets. Give both, or neither")
    kept = None if batch.kept_counts is None else int(batch.kept_counts.sum())
    wide |= {"kept_counts": ((n,), INTEGERS), "kept_ids": ((kept,), INTEGERS)}
    _check_optional("PackedBatch", batch, wide)


def check_decision_shapes(corrected: Any) -> None:
    """Args: corrected: a CorrectedBatch. Raises: DataError if something isn't one number for each of its tokens."""
    shape = (corrected.batch.num_tokens,)
    names = {"importance_weights": FLOATS, "keep_mask": (torch.bool,), "token_scale": FLOATS, "plain_weights": FLOATS}
    names["settled"] = (torch.bool,)
    _check_optional("CorrectedBatch", corrected, {name: (shape, dtypes) for name, dtypes in names.items()})


def check_training_values(where: str, corrected: Any, **values: Tensor | None) -> None:
    """Args: where: the function; corrected: a CorrectedBatch; values: its arguments by name, target_logprobs among them.

    Raises: DataError for another shape than the batch's, and for a target logprob over 0.
    """
    if not hasattr(corrected, "token_scale"):
        raise DataError(f"{where}: the batch is a {type(corrected).__name__}. Give it what correct(batch, config) returns")
    check_decision_shapes(corrected)
    batch = corrected.batch
    for name, given in values.items():
        like = batch.topk_ids if name == "target_topk_logprobs" else batch.behavior_logprobs
        if given is None or like is None:
            continue
        if not isinstance(given, Tensor) or given.shape != like.shape:
            got = tuple(given.shape) if isinstance(given, Tensor) else _a(given)
            raise DataError(f"{where}: {name} {got} for {batch.num_tokens} tokens of the batch, as pack_like gives them")
    target = values["target_logprobs"]
    if target is not None:
        check_not_positive(f"{where}: ", {"target_logprobs": float(largest_logprob(target.detach(), batch.loss_mask))})


def _check_optional(where: str, record: Any, layouts: Mapping[str, tuple[tuple[int | None, ...], tuple[torch.dtype, ...]]]) -> None:
    for name, (shape, dtypes) in layouts.items():
        if (value := getattr(record, name)) is not None:
            check_tensor(f"{where}.{name}", value, shape, dtypes)


def largest_logprob(values: Tensor, mask: Tensor) -> Tensor:
    """Largest logprob of the tokens in the mask [N]; 0 or less stands for none; what is not a number is left out. Values: [N] or [N, K]."""
    if values.numel() == 0:
        return values.new_zeros(())
    if values.device.type == "cpu":
        largest = values.amax()
        if bool(largest.isnan()):
            largest = values.nan_to_num(nan=-torch.inf).amax()
        if bool(largest <= LARGEST_LOGPROB):  # as nearly always, and a tenth of the time
            return largest
    inside = (mask if values.dim() == 1 else mask[:, None]) & ~values.isnan()
    return torch.where(inside, values, 0).amax()


def check_not_positive(where: str, largest: Mapping[str, float]) -> None:
    """Args: largest: `largest_logprob` by name. Raises: DataError for one over 0."""
    for name, value in largest.items():
        if value > LARGEST_LOGPROB:
            raise DataError(
                f"{where}{name} has {value:.4g} at a trained token, and no logprob is positive. Give log p, not -log p or a logit"
            )


def check_settings(where: str, config: Any) -> None:
    """Raises: ConfigError if config is something else than settings."""
    if not isinstance(config, CorrectionSettings):
        remedy = f"Give a CorrectionConfig of {__package__}, such as CorrectionConfig(preset='tis-token')"
        raise ConfigError(f"{where}: config is {_a(config)}", remedy=remedy)


def check_same_settings(where: str, made_by: CorrectionSettings | None, config: CorrectionSettings) -> None:
    """Refuse a batch that was corrected by other settings. Args: made_by: the batch's; None: not known. Raises: ConfigError."""
    check_settings(where, config)
    if made_by is None or made_by is config:
        return
    names = [name for name in type(made_by).model_fields if name != "preset"]  # a preset is its settings
    if differing := [name for name in names if getattr(made_by, name) != getattr(config, name)]:
        both = "; ".join(f"{name} = {getattr(made_by, name)!r} there, {getattr(config, name)!r} here" for name in differing[:2])
        raise ConfigError(
            f"{where}: the batch was corrected by other settings ({both}), so that its weights, masks and denominators belong to another "
            "loss. Give the config that correct() or defer() had"
        )


def _a(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.") + (f" {text}" if len(text) < 40 else "")
