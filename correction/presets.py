"""Looking presets up, and their table for docs/presets.md. The presets themselves are in methods.py."""

from __future__ import annotations

import difflib

from correction.contradictions import DECISIONS
from correction.errors import ConfigError
from correction.methods import PRESETS, Preset, Settings

__all__ = ["PRESETS", "Preset", "preset_settings", "presets_table"]


def preset_settings(name: str) -> Settings:
    """Settings of a preset.

    Raises: ConfigError with the nearest name.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"correction.preset = {name}: there is no such preset. {hint}`evenkeel presets` lists all {len(PRESETS)}.")
    return PRESETS[name].settings


def presets_table(*, with_decisions: bool = True) -> str:
    """Markdown: one row for each preset; below it, the decisions that the rows point to.

    Args:
        with_decisions: False leaves out the list of decisions and the column that points to it.
    """
    titles = ["preset", "optimises", "when to use it", "source"] + (["decisions"] if with_decisions else [])
    lines = [_row(titles), _row(["---"] * len(titles))]
    for name, preset in PRESETS.items():
        note = f" **Choose** `{preset.open_constant}`." if preset.open_constant else ""
        cells = [f"`{name}`", f"`{preset.formula}`", preset.when + note, preset.source]
        lines.append(_row(cells + ([", ".join(preset.decisions)] if with_decisions else [])))
    if with_decisions:
        lines += ["", "Where sources disagree:", ""]
        lines += [f"* **{key}** {item.subject}: {item.decision} {item.reason}" for key, item in DECISIONS.items()]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
