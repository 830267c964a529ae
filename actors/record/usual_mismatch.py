"""How far engine and learner usually are apart at equal weights in a run like this one, for who looks at its mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenkeel.actors.config import RunConfig
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.early_warning.monitor import ReferenceLevel, usual_level
from evenkeel.correction.errors import EvenkeelError
from evenkeel.engines.contract import expert_count
from evenkeel.learner.hf.folder import read_json


def of_run(config: RunConfig, *, has_experts: bool) -> ReferenceLevel | None:
    """Args: config: with devices and types."""
    return usual_level(
        config.monitor.thresholds.setting,
        config.learner.resolved_dtype,
        device=config.rollout.engine.resolved_device,
        has_experts=has_experts,
        has_float8=config.rollout.engine.has_float8,
        replays_routes=config.learner.routing_replay == "rollout",
    )


def of_folder(folder: RunFolder) -> ReferenceLevel | None:
    """Of a run that may be an earlier version's, or not whole: None for what its folder doesn't say."""
    config = folder.read_config()
    try:
        model = read_json(folder.model_path / "config.json")
    except EvenkeelError:
        return None
    stated = next((model[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if model.get(name)), None)
    return usual_level(
        _at(config, "monitor", "thresholds", "setting"),
        str(_at(config, "learner", "dtype")),
        device=str(_at(config, "rollout", "engine", "device")),
        has_experts=expert_count(str(model.get("model_type")), stated) > 0,
        has_float8=_at(config, "rollout", "engine", "quantization") == "float8_block",
        replays_routes=_at(config, "learner", "routing_replay") == "rollout",
    )


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
