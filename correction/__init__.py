"""Train-inference mismatch correction on packed batches. Needs torch and pydantic, nothing else."""

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
