"""Keeps warnings and logs of libraries off the terminal: they are about things that a user can't change."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TextIO


def quiet() -> None:
    """Silence warnings and the logs of libraries, in this process and in those that it starts."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of child processes
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    handler = ToStandardError()
    handler.addFilter(lambda record: record.name.startswith("evenkeel") or record.levelno >= logging.ERROR)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])


class ToStandardError(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is when a record comes: a live panel replaces it by a stream that prints above the panel."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
