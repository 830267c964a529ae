"""The presets for people: a list fitted to the terminal, and one preset whole."""

from __future__ import annotations

import textwrap

import yaml
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from evenkeel.correction.presets.methods import PRESETS, SHORT_NAMES, preset_settings

_NARROW = 80
"""Columns under which a table of three columns would be a column of single words."""
SYMBOLS = (
    "mu: the policy that sampled the token (the engine); pi_prox: the learner's, with the weights from which the update starts; pi_theta: "
    "the learner's while it is updated. rho = pi_prox / mu, r = pi_theta / pi_prox, q = pi_theta / mu. A: the advantage. s: a sequence's "
    "geometric mean of r. geo: geometric mean over a sequence; prod: product over it. sg: no gradient. 1[...]: 1 if it holds, else 0. M: a "
    "mask that drops what has left the trust region. PPO(x): PPO's clipped objective on the ratio x."
)
"""What the letters in the presets' formulas mean."""
_GO_ON = "`evenkeel presets NAME` shows what one of them optimises, its settings and its source; `correction.preset=NAME` takes it."


def show_presets(console: Console) -> None:
    """All presets. In a file or pipe one line each, so that they can be searched."""
    if not console.is_terminal:
        wide = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            print(f"{name:<{wide}}  {preset.when}  [{preset.source}]", file=console.file)
        return
    if console.width < _NARROW:
        for name, preset in PRESETS.items():
            console.print(Text(name, style="bold"))
            console.print(Padding(Text(preset.when), (0, 0, 0, 2)))
            console.print(Padding(Text(preset.source, style="dim"), (0, 0, 0, 2)))
    else:
        table = Table("preset", "when to use it", "source", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
        table.columns[0].no_wrap = True
        table.columns[1].ratio, table.columns[2].ratio = 3, 2
        for name, preset in PRESETS.items():
            table.add_row(Text(name, style="bold"), Text(preset.when), Text(preset.source, style="dim"))
        console.print(table)
    console.print(Text(f"\n{_GO_ON}"))


def show_preset(console: Console, name: str) -> None:
    """One preset: what it optimises, when to use it, what to choose, what was found with it, its source, and its settings as YAML.

    Raises: ConfigError with the nearest name.
    """
    settings = preset_settings(name)
    preset = PRESETS[name]
    parts = [("optimises", preset.formula), ("use it", preset.when)]
    if preset.open_constant:
        parts.append(("choose", preset.open_constant))
    if preset.found:
        parts.append(("what was found", preset.found))
    parts.append(("source", preset.source))
    console.print(Text(name, style="bold"))
    for title, text in parts:
        _block(console, title, text)
    meant = [f"{short}: {title}" for short, title in SHORT_NAMES.items() if short in preset.found + preset.source]
    for line in meant:
        _indented(console, line)
    _block(console, "settings (a key that isn't here has its default)", "")
    _indented(console, yaml.safe_dump({"correction": settings}, sort_keys=False, default_flow_style=False).rstrip())
    _block(console, "symbols", SYMBOLS)


def _block(console: Console, title: str, text: str) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    if text:
        _indented(console, text)


def _indented(console: Console, text: str) -> None:
    """On a terminal wrapped at its width; in a file or pipe never."""
    if console.is_terminal:
        console.print(Padding(Text(text), (0, 0, 0, 2)))
    else:
        print(textwrap.indent(text, "  "), file=console.file)
