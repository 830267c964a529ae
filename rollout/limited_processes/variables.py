"""Environment variables that the user's code gets: those by which programs find their files, and those that its settings name.

The rest stays with the run: Ray's token, keys of hubs, trackers and clouds."""

from __future__ import annotations

import os
from collections.abc import Collection

_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LD_LIBRARY_PATH"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR", "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    }
)
_BEGINNINGS = ("LC_", "XDG_", "PYTHON", "EVENKEEL_")
# Of an engine, which this process has while one starts: what has them counts as the engine's, and ends with it.
_OF_ENGINES = "EVENKEEL_SGLANG_"


def passed_on(named: Collection[str]) -> dict[str, str]:
    """This process's variables that the user's code gets. Args: named: by its settings, in addition."""
    found = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_BEGINNINGS) or name in named}
    return {name: value for name, value in found.items() if not name.startswith(_OF_ENGINES)}
