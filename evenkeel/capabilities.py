"""`evenkeel capabilities`: what the installed engines can do on this machine."""

from __future__ import annotations

import json

import typer


def capabilities() -> None:
    """Print what the installed engines can do on this machine, as JSON.

    Versions of SGLang and torch, the device, and which of the functions that evenkeel needs are there. Worth attaching to a bug report.
    """
    from dataclasses import asdict

    from evenkeel.rollout.engine_settings.engine_capabilities import EngineCapabilities
    from evenkeel.rollout.engine_settings.engine_config import EngineConfig

    device = EngineConfig().on_this_machine().resolved_device
    typer.echo(json.dumps(asdict(EngineCapabilities.of_this_machine(device)), indent=2, default=str))
