"""Faster imports of the large libraries."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_MODEL_CLASSES = "transformers.models.auto.modeling_auto"


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Run imports, or other start-up code, without the garbage collector.

    Nearly every object that an import makes stays, but the collector looks through all of them again and again: that is a fifth of SGLang's
    import time and a quarter of Megatron's. At the end of the block all objects are frozen: the collector never looks at them again.
    """
    if not gc.isenabled():  # in one of these already
        yield
        return
    gc.collect()  # or freeze would keep what is garbage now
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def without_model_classes(read: Callable[[], T]) -> T:
    """Call `read`, which has transformers read a config, and keep transformers from importing its model classes for that.

    transformers writes the name of the model's class into the docstring of a config class. To find it, it imports the code of the models
    and torch's compiler, which takes a second and a half. If that import fails it leaves the name out.
    """
    with contextlib.suppress(ImportError), unimportable(_MODEL_CLASSES):
        return read()
    return read()  # this config does need them


@contextlib.contextmanager
def unimportable(module: str) -> Iterator[None]:
    """Let imports of a module fail within the block, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(module) is None:
            sys.modules.pop(module, None)
