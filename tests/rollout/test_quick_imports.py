"""What a start leaves out: transformers' model classes, rounds of the garbage collector."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from evenkeel.engines.machine import gc_paused, without_model_classes
from evenkeel.rollout import sglang_plugin

ROOT = Path(__file__).parents[2]
READS = """
import importlib.util, json, sys
from evenkeel.learner.hf.folder import read_config
config = read_config(sys.argv[1])
loaded = [name for name in ("torch._dynamo", "transformers.models.auto.modeling_auto") if name in sys.modules]
found = importlib.util.find_spec("transformers.models.auto.modeling_auto")  # what was left out is there for who wants it
print(json.dumps([config.to_dict(), loaded, found is not None]))
"""


def test_a_config_is_read_without_model_classes_and_is_the_same(tiny_model: Path) -> None:
    """A rank and the command line read one as they start. The other way, to compare with: transformers' own, with all of its imports."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", READS, str(tiny_model)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    found, loaded, is_there = json.loads(done.stdout)
    from transformers import AutoConfig

    assert found == json.loads(json.dumps(AutoConfig.from_pretrained(tiny_model).to_dict()))
    assert loaded == [] and is_there


def test_who_needs_the_model_classes_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.models.auto.modeling_auto", raising=False)
    tries = []

    def read() -> str:
        tries.append("transformers.models.auto.modeling_auto" in sys.modules)
        if tries[-1]:
            raise ImportError("import halted; None in sys.modules")
        return "a config"

    assert without_model_classes(read) == "a config" and tries == [True, False]


def test_the_collector_is_back_after_imports_and_leaves_their_objects_out() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), gc_paused():
        with gc_paused():
            made = [[i] for i in range(1000)]
        assert not gc.isenabled(), "the inner one leaves it to the outer"
        _ = 1 / 0
    assert gc.isenabled() and len(made) == 1000 and gc.get_freeze_count() >= frozen + 1000


class Arguments:
    """Of a process that imports SGLang while it unpickles them, as a scheduler does."""

    def __setstate__(self, _: dict[str, Any]) -> None:
        sglang_plugin.platform()

    def __getstate__(self) -> dict[str, Any]:
        return {"some": "state"}


def tell(_: Arguments, pipe: Connection) -> None:
    pipe.send((gc.isenabled(), gc.get_threshold()[0], sys.modules.get(sglang_plugin.UNUSED, "importable")))


def test_a_scheduler_imports_sglang_with_few_collections_and_without_megatron() -> None:
    """It imports SGLang before its process knows its parent: together they are a fifth of a scheduler's start. The collector stays on: in a
    controller of groups of ranks nobody would switch it on again. In this process, an engine's owner, the plugin leaves both alone."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=tell, args=(Arguments(), there))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    assert found == (True, sglang_plugin._OBJECTS_BETWEEN_COLLECTIONS, None)
    sglang_plugin.platform()
    assert gc.get_threshold()[0] != sglang_plugin._OBJECTS_BETWEEN_COLLECTIONS
    assert sys.modules.get(sglang_plugin.UNUSED, "importable") is not None
