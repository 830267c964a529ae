"""How serious an event of a run is: the word that events.log has before the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

EventLevel = Literal["info", "watch", "warning", "alarm", "error"]
"""The early warning alone says watch and alarm."""
Notify = Callable[[EventLevel, str], object]
"""Takes level and text of an event."""
