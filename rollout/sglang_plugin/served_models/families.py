"""SGLang's own classes of these models; its registry reads EntryClass."""

from __future__ import annotations

import importlib
from typing import Any

from evenkeel.rollout.sglang_plugin.served_models import FILES


def _classes(file: str) -> list[Any]:
    found = importlib.import_module(f"sglang.srt.models.{file}").EntryClass
    return list(found) if isinstance(found, list) else [found]


EntryClass = [one for file in FILES for one in _classes(file)]
