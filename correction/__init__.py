"""Train-inference mismatch correction on packed batches. Needs torch and pydantic, nothing else.

A name is imported when it is asked for: settings and errors (config, settings/, early_warning/, errors) come without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import CorrectedBatch, PackedBatch
    from .config import CorrectionConfig
    from .correct import correct, defer, for_step, shard_sums
    from .diagnostics.diagnose import diagnose, diagnostic_sums, diagnostics_of
    from .diagnostics.quantities import DIAGNOSTIC_FAMILIES, DIAGNOSTICS, LOSS_METRICS
    from .early_warning.monitor import Event, Monitor, MonitorConfig
    from .errors import ConfigError, DataError, DeadlineExceeded, EngineDirty, EngineError, EvenkeelError, LedgerError, SyncError
    from .loss import PARTIALS, PolicyLoss, loss_metrics, policy_loss, policy_scale, step_size_factor
    from .padded_batch import from_lists, from_padded
    from .padding import pack_like, to_padded
    from .presets.methods import PRESETS, Preset, presets_table
    from .settings.choices import AdvantageEstimator, ProximalSource
    from .settings.parts import AdvantageConfig
    from .settings.schedule import (
        check_without_gradient_factor,
        needs_gradient_factor,
        needs_logprobs_at_sampling,
        needs_proximal_forward,
        needs_step_forward,
        needs_topk,
    )
    from .settling import settle
    from .shards import TOTALS, all_reduce_sum
    from .terms.advantages import group_advantages, turn_advantages
    from .tokens import token_coefficients

__version__ = "0.1.0"
"""Version of evenkeel and of evenkeel-correction: tests/test_distribution.py."""

# Module of each public name.
_HOMES = {
    "terms.advantages": ("group_advantages", "turn_advantages"),
    "batch": (
        "CorrectedBatch",
        "PackedBatch",
    ),
    "settings.choices": (
        "AdvantageEstimator",
        "ProximalSource",
    ),
    "settings.parts": ("AdvantageConfig",),
    "config": ("CorrectionConfig",),
    "correct": (
        "correct",
        "defer",
        "for_step",
        "shard_sums",
    ),
    "diagnostics.diagnose": (
        "diagnose",
        "diagnostic_sums",
        "diagnostics_of",
    ),
    "errors": (
        "ConfigError",
        "DataError",
        "DeadlineExceeded",
        "EngineDirty",
        "EngineError",
        "EvenkeelError",
        "LedgerError",
        "SyncError",
    ),
    "loss": (
        "PARTIALS",
        "PolicyLoss",
        "loss_metrics",
        "policy_loss",
        "policy_scale",
        "step_size_factor",
    ),
    "presets.methods": (
        "PRESETS",
        "Preset",
        "presets_table",
    ),
    "early_warning.monitor": (
        "Event",
        "Monitor",
        "MonitorConfig",
    ),
    "padded_batch": (
        "from_lists",
        "from_padded",
    ),
    "padding": (
        "pack_like",
        "to_padded",
    ),
    "diagnostics.quantities": (
        "DIAGNOSTIC_FAMILIES",
        "DIAGNOSTICS",
        "LOSS_METRICS",
    ),
    "settings.schedule": (
        "check_without_gradient_factor",
        "needs_gradient_factor",
        "needs_logprobs_at_sampling",
        "needs_proximal_forward",
        "needs_step_forward",
        "needs_topk",
    ),
    "settling": ("settle",),
    "shards": (
        "TOTALS",
        "all_reduce_sum",
    ),
    "tokens": ("token_coefficients",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`correct` is a function, and the name of the module that has it: the import of that module must not hide the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "correct" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

__all__ = [
    "DIAGNOSTICS",
    "DIAGNOSTIC_FAMILIES",
    "LOSS_METRICS",
    "PARTIALS",
    "PRESETS",
    "TOTALS",
    "AdvantageConfig",
    "AdvantageEstimator",
    "ConfigError",
    "CorrectedBatch",
    "CorrectionConfig",
    "DataError",
    "DeadlineExceeded",
    "EngineDirty",
    "EngineError",
    "EvenkeelError",
    "Event",
    "LedgerError",
    "Monitor",
    "MonitorConfig",
    "PackedBatch",
    "PolicyLoss",
    "Preset",
    "ProximalSource",
    "SyncError",
    "all_reduce_sum",
    "check_without_gradient_factor",
    "correct",
    "defer",
    "diagnose",
    "diagnostic_sums",
    "diagnostics_of",
    "for_step",
    "from_lists",
    "from_padded",
    "group_advantages",
    "loss_metrics",
    "needs_gradient_factor",
    "needs_logprobs_at_sampling",
    "needs_proximal_forward",
    "needs_step_forward",
    "needs_topk",
    "pack_like",
    "policy_loss",
    "policy_scale",
    "presets_table",
    "settle",
    "shard_sums",
    "step_size_factor",
    "to_padded",
    "token_coefficients",
    "turn_advantages",
]
