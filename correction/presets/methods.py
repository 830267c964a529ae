"""The named methods of the literature, by name: those of this folder, one after the other.

Symbols: rho = prox/mu, r = theta/prox, q = theta/mu, A advantage, w weight.
"""

from __future__ import annotations

import difflib

from ..errors import ConfigError
from .drift import DRIFT
from .mismatch import MISMATCH
from .off_policy import OFF_POLICY
from .preset import Preset as Preset
from .preset import PresetSettings

PRESETS: dict[str, Preset] = {**DRIFT, **MISMATCH, **OFF_POLICY}
"""Every preset. `settings` is what CorrectionConfig is built from."""

SHORT_NAMES = {
    "Trust Region": '"Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879)',
    "Objective-level hacking": '"Probing RLVR training instability through the lens of objective-level hacking"',
    "Speed-kills note": 'on "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (Liu et al., 2025)',
    "KPop post": '"Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions"',
    "Miles post": '"Let Speed Be With Stability: All-In-One Solution to Training-Inference Mismatch with Miles"',
}
"""What presets call some of their sources, and their titles."""


def preset_settings(name: str) -> PresetSettings:
    """PresetSettings of a preset.

    Raises: ConfigError with the nearest name.
    """
    if name not in PRESETS:
        beginning = [preset for preset in PRESETS if preset.startswith(f"{name}-")]  # of "tis" those that are called so
        near = beginning or difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.7)
        hint = f"Did you mean {' or '.join(near[:3])}? " if near else ""
        if str(name) in ("none", "off"):
            hint = "Without one it is null: PPO's clip alone, no weights and no rejection. "
        package = __name__.removesuffix(".presets.methods")
        command = "evenkeel presets" if package == "evenkeel.correction" else f"print({package}.presets_table())"
        raise ConfigError(f"preset = {name}: there is no such preset. {hint}`{command}` lists all {len(PRESETS)}.")
    return PRESETS[name].settings


def presets_table() -> str:
    """The presets as a Markdown table, one row each, for docs/presets.md."""
    titles = ["preset", "optimises", "when to use it", "what was found", "source"]
    lines = [_row(titles), _row(["---"] * len(titles))]
    for name, preset in PRESETS.items():
        note = f" **Choose** `{preset.open_constant}`." if preset.open_constant else ""
        lines.append(_row([f"`{name}`", f"`{preset.formula}`", preset.when + note, preset.found, preset.source]))
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
