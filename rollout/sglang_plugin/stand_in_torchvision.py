"""Stand-in for `torchvision`: transformers, on SGLang's import path, wants the package to exist; a text model uses nothing of it.

Any name of any submodule can be imported; using one raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.0.0+evenkeel.stand.in"
__path__: list[str] = []  # a package: submodules can be imported


class Absent:
    """What every imported name is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("torchvision is not installed: this engine serves text models only. Install torchvision for images")


class _NamesOnly(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class InterpolationMode(metaclass=_NamesOnly):
    """An enum whose members transformers reads at import (InterpolationMode.BILINEAR): each is its own name."""


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return InterpolationMode if name == "InterpolationMode" else Absent


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision.anything is a module whose every attribute is Absent."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _attribute  # type: ignore[method-assign]


sys.meta_path.append(_Submodules())
__getattr__ = _attribute


def _complete_transformers() -> None:
    """A transformers that was imported before this module has put a placeholder where SGLang registers image processors."""
    if "transformers" in sys.modules:
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        # Not `import transformers` above: that import replaces the package in sys.modules by a new one.
        sys.modules["transformers"].AutoImageProcessor = AutoImageProcessor  # type: ignore[attr-defined]


_complete_transformers()
