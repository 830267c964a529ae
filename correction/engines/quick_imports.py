"""Imports of the large libraries, without what makes them slower than they are."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_MODEL_CLASSES = "transformers.models.auto.modeling_auto"


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Imports, and other starting, without the garbage collector.

    Nearly all that an import makes stays, but the collector looks through it again and again: a fifth of the seconds that SGLang takes, a
    quarter of Megatron's. Afterwards it leaves these objects out for good.
    """
    if not gc.isenabled():  # in one of these already
        yield
        return
    gc.collect()  # what is garbage now would be kept with the rest
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def without_model_classes(read: Callable[[], T]) -> T:
    """What `read` returns, which has transformers read a config.

    transformers writes the name of the model's class into the docstring of a config class, and imports all that computes for that: torch's
    compiler too, a second and a half. Where this import fails it leaves the name out.
    """
    with contextlib.suppress(ImportError), _unimportable(_MODEL_CLASSES):
        return read()
    return read()  # a model that does need them


@contextlib.contextmanager
def _unimportable(module: str) -> Iterator[None]:
    """Unless it is there already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(module) is None:
            sys.modules.pop(module, None)
