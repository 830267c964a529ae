"""The output of `evenkeel config --explain`: every key, and the deadlines that follow from them."""

from __future__ import annotations

import contextlib

from actors.cluster.hub import config_folder
from actors.commands.config_explain import explain
from actors.config import RunConfig
from actors.hub_name import HubName
from actors.plan.shape import ModelShape
from actors.settings.deadlines import as_text, bytes_of, table
from correction.errors import DataError


def explained(config: RunConfig | None, section: str) -> str:
    """All keys, or those of a section, explained; with the deadlines of the recipe, if there is one.

    Raises: ConfigError for an unknown section.
    """
    keys = explain(RunConfig, section)
    if config is None or (section and section.split(".")[0] != "deadlines"):
        return keys
    size = _weight_bytes(config)
    known = f"{size / 1e9:.3g} GB of weights" if size else f"its weights, {config.model}, are not there yet, and count as none"
    return f"{keys}\n\nDeadlines of this recipe ({known}):\n{as_text(table(config, size))}"


def _weight_bytes(config: RunConfig) -> int:
    """Bytes of the weights: those in a folder; for a name of the hub those that its config.json means, if it can be had. 0: not known."""
    if HubName.of(config.model) is None:
        return bytes_of(config.model)
    with contextlib.suppress(DataError):
        return ModelShape.read(config_folder(config.model)).weight_bytes("bfloat16")
    return 0
