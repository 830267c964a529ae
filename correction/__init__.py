"""Train-inference mismatch correction on packed batches. Needs torch and pydantic, nothing else.

A name is imported when it is asked for: settings and errors (config, choices, monitor, errors) come without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from correction.advantages import group_advantages
    from correction.batch import CorrectedBatch, PackedBatch, from_padded, to_padded
    from correction.choices import AdvantageEstimator, ProximalSource
    from correction.config import CorrectionConfig
    from correction.correct import correct, defer, for_step
    from correction.diagnostics import diagnose
    from correction.errors import ConfigError, DataError, DeadlineExceeded, EngineDirty, EngineError, EvenkeelError, LedgerError, SyncError
    from correction.loss import PARTIALS, PolicyLoss, loss_metrics, policy_loss, policy_scale
    from correction.methods import PRESETS, Preset, presets_table
    from correction.monitor import Event, Monitor, MonitorConfig
    from correction.quantities import DIAGNOSTIC_FAMILIES, DIAGNOSTICS, LOSS_METRICS
    from correction.schedule import needs_proximal_forward, needs_topk

_HOMES = {
    "advantages": ("group_advantages",),
    "batch": ("CorrectedBatch", "PackedBatch", "from_padded", "to_padded",),
    "choices": ("AdvantageEstimator", "ProximalSource",),
    "config": ("CorrectionConfig",),
    "correct": ("correct", "defer", "for_step",),
    "diagnostics": ("diagnose",),
    "errors": ("ConfigError", "DataError", "DeadlineExceeded", "EngineDirty", "EngineError", "EvenkeelError", "LedgerError", "SyncError",),
    "loss": ("PARTIALS", "PolicyLoss", "loss_metrics", "policy_loss", "policy_scale",),
    "methods": ("PRESETS", "Preset", "presets_table",),
    "monitor": ("Event", "Monitor", "MonitorConfig",),
    "quantities": ("DIAGNOSTIC_FAMILIES", "DIAGNOSTICS", "LOSS_METRICS",),
    "schedule": ("needs_proximal_forward", "needs_topk",),
}
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"correction.{module}"), name)
    raise AttributeError(f"module 'correction' has no attribute '{name}'")


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
    "correct",
    "defer",
    "diagnose",
    "for_step",
    "from_padded",
    "group_advantages",
    "loss_metrics",
    "needs_proximal_forward",
    "needs_topk",
    "policy_loss",
    "policy_scale",
    "presets_table",
    "to_padded",
]
