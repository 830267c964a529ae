"""Rows in files, as a task reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "answer": i, "level": i % 3} for i in range(count)]
