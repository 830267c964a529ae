"""The list of presets fits the terminal, and one preset is shown whole."""

from __future__ import annotations

import io

import pytest
import yaml
from rich.console import Console

from evenkeel.correction import PRESETS, ConfigError, CorrectionConfig
from evenkeel.correction.presets.methods import SHORT_NAMES
from evenkeel.explain import show_preset, show_presets


def shown(name: str = "", *, width: int = 80, terminal: bool = True) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal, color_system=None, highlight=False)
    show_preset(console, name) if name else show_presets(console)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 79, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_each_name_is_whole(width: int) -> None:
    """A terminal cuts or wraps what is wider, and a table is unreadable then. A preset begins a line."""
    lines = shown(width=width)
    assert max(map(len, lines)) <= width
    starts = {line.split(" ")[0] for line in lines if line and not line.startswith(" ")}
    assert set(PRESETS) <= starts


def test_in_a_pipe_a_preset_is_one_line() -> None:
    """So that grep finds it with its purpose."""
    lines = shown(terminal=False)
    assert len(lines) == len(PRESETS)
    assert [line.split(" ")[0] for line in lines] == list(PRESETS)
    assert all(preset.when in line and preset.source in line for line, preset in zip(lines, PRESETS.values(), strict=True))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_s_settings_are_shown_as_yaml_that_means_the_same(name: str) -> None:
    """What is printed under "settings", pasted into a recipe, is the preset: parts, bounds and all."""
    lines = shown(name, terminal=False)
    start = next(i for i, line in enumerate(lines) if line.startswith("settings")) + 1
    block = lines[start : lines.index("", start)]
    pasted = yaml.safe_load("\n".join(block))["correction"]
    assert CorrectionConfig.model_validate(pasted).resolve() == CorrectionConfig(preset=name).resolve()
    text = "\n".join(lines)
    assert PRESETS[name].formula in text and PRESETS[name].source in text and PRESETS[name].open_constant in text
    assert [short for short, title in SHORT_NAMES.items() if title in text] == [
        short for short in SHORT_NAMES if short in PRESETS[name].found or short in PRESETS[name].source
    ]
    assert PRESETS[name].found in text and ("what was found" in lines) == bool(PRESETS[name].found)


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean icepop"):
        shown("icepp")
