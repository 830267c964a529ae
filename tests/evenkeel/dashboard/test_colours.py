"""Colour-blind people tell the page's colours apart: as they see them by Machado, Oliveira and Fernandes (2009, table 1, severity 1)."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import evenkeel.dashboard

STYLE = Path(evenkeel.dashboard.__file__).parent / "page" / "style.css"
VISION = {
    "usual": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])
APART = 14.0
"""Least distance of two colours in CIELAB; of some 2 people see a difference side by side."""


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    of_screen = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(of_screen <= 0.04045, of_screen / 12.92, ((of_screen + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.maximum(TO_XYZ @ np.clip(vision @ linear, 0, 1) / WHITE, 1e-9))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_two_colours_are_never_taken_for_each_other(theme: int, vision: str) -> None:
    colours = dict(re.findall(r"--(c\d): (#[0-9a-f]{6});", STYLE.read_text().split("@media (prefers-color-scheme: dark)")[theme]))
    assert len(colours) == 7
    seen = {name: lab(colour, VISION[vision]) for name, colour in colours.items()}
    apart = {(one, other): float(np.linalg.norm(seen[one] - seen[other])) for one, other in combinations(seen, 2)}
    assert min(apart.values()) > APART, sorted(apart.items(), key=lambda pair: pair[1])[:3]
