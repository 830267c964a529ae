"""Asynchronous RL post-training for language models: the command line (`python -m evenkeel`) and a small Python interface.

    import evenkeel

    run = evenkeel.train("recipes/nano_spell_backward.yaml", steps=20)
    run.metrics["reward/accuracy"].plot()

Each name is imported when it is asked for: `import evenkeel` and `import evenkeel.correction` load neither ray nor sglang.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenkeel.interface import HeldOut, Run, RunFailed, evaluate, load_recipe, read_run, resume, train

# `python -m` puts the working folder first: a file of the user's called socket.py would be imported in place of Python's own.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]

__version__ = "0.1.0"

__all__ = ["HeldOut", "Run", "RunFailed", "evaluate", "load_recipe", "read_run", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from evenkeel import interface

        return getattr(interface, name)
    raise AttributeError(f"module 'evenkeel' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
