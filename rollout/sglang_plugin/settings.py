"""What the engine's owner tells the plugin in SGLang's processes. An environment variable is the only way in before SGLang runs."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict

VARIABLE = "EVENKEEL_SGLANG_PLUGIN"
"""Holds PluginSettings as JSON; set by rollout.engine_process while it starts an engine."""


class PluginSettings(BaseModel):
    """Settings of one engine's plugin; the same in all its processes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    engine_id: str = ""
    """Marks the processes of one engine: they carry it in their environment."""
    attention: Literal["batched", "stock"] = "batched"
    """On a CPU: our kernel for all sequences at once, or SGLang's loop over them."""
    fixed_order: bool = False
    """Operators of fixed order, attention included, in place of SGLang's."""
    projection_parts: int = 1
    """Of fixed order: products of which a projection back to the residual is the sum."""
    group_timeout_s: float = 60.0
    """A collective of the weight-update group fails after this; torch's own default would block the scheduler for 30 minutes."""

    @classmethod
    def from_environment(cls) -> PluginSettings:
        return cls.model_validate_json(os.environ.get(VARIABLE, "{}"))
