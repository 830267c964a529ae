"""What answers at once: help and the check of settings load nothing that takes seconds."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.correction.batch import FinalDecision
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.decision import no_counts
from evenkeel.learner.results import Proximal, StepResult, StepValues
from tests.actors.known_models import QWEN3_8B, save_config
from tests.driver_stand_in import stand_in_driver

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers", "sglang", "megatron", "scipy", "pandas", "datasets", "reasoning_gym", "matplotlib")
"""Each of these takes between half a second and five to import."""

PROGRAM = """
import json, os, sys
from evenkeel.cli import main
for words in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork():
        os.wait()
        continue
    sys.argv[1:] = words
    try:
        main()
        code = None
    except SystemExit as end:
        code = end.code
    loaded = sorted({name.split(".")[0] for name in sys.modules})
    sys.stdout.flush()
    print(json.dumps({"code": code, "loaded": loaded}), file=sys.stderr, flush=True)
    os._exit(0)
"""


@cache
def answers() -> list[dict[str, Any]]:
    """Of the command line to each of the calls: exit code or message, and the top-level packages that were loaded.

    Each call has a process of its own, a fork of one that has imported the command line and nothing else.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = json.dumps([words for words, _ in CALLS])
    done = subprocess.run([sys.executable, "-c", PROGRAM, asked], capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"code"')]


RECIPE = "recipes/nano_spell_backward.yaml"


CALLS: list[tuple[list[str], int | str]] = [
    (["--help"], 0),
    (["train", "--help"], 0),
    (["train", RECIPE, "stepps=5"], "stepps = 5: no such key; the nearest is steps"),
    (["train", RECIPE, "correction.preset=grop"], "Did you mean grpo?"),
    (["init-model", RECIPE, "rollout.workers=two"], "rollout.workers"),
    (["eval", "models/none", "--task", RECIPE, "learner.learning_rte=1"], "the nearest is learner.learning_rate"),
    (["train", "--resume", "runs/none", "stepps=5"], "runs/none"),
    (["config", RECIPE], 0),
    (["presets"], 0),
]


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda number: " ".join(CALLS[number][0]))
def test_help_and_refusals_load_nothing_heavy(number: int) -> None:
    end, found = CALLS[number][1], answers()
    assert len(found) == len(CALLS)
    code, loaded = found[number]["code"], set(found[number]["loaded"])
    assert code == end if isinstance(end, int) else end in str(code)
    assert loaded & set(HEAVY) == set()
    assert "evenkeel" in loaded  # it was our command that ran


def test_every_public_name_of_correction_is_found_and_is_no_module() -> None:
    """Names are imported when asked for. `correct` is a function and a module: from the package it is the function."""
    import evenkeel.correction.correct  # would bind the module to the package's name

    correction = evenkeel.correction

    found = {name: getattr(correction, name) for name in correction.__all__}
    assert [name for name, value in found.items() if type(value).__name__ == "module"] == []
    assert found["correct"].__module__ == "evenkeel.correction.correct"
    with pytest.raises(AttributeError, match="no attribute 'corect'"):
        _ = correction.corect  # type: ignore[attr-defined]


JUDGES = """
import sys, time
from evenkeel.cli import app
try:
    app(sys.argv[1:])
finally:
    print(time.process_time(), *sorted({name.split(".")[0] for name in sys.modules}))
"""
MOST_CPU_S = 6.0
"""Of the whole process, its imports too; not of the clock, which other work would lengthen. A slow core takes three times as long as a fast
one, with nothing of HEAVY."""


@pytest.mark.parametrize("words", [["doctor", "--gpus", "H100x8"], ["plan"]])
def test_a_recipe_is_judged_for_gpus_that_aren_t_here_without_anything_heavy(tmp_path: Path, words: list[str]) -> None:
    asked = [*words, "recipes/qwen3_8b_8gpu.yaml", f"model={save_config(tmp_path, QWEN3_8B)}"]
    cpu_s, loaded = judged_ready(asked)
    assert loaded & set(HEAVY) == set()
    assert cpu_s < MOST_CPU_S


def judged_ready(words: list[str], program: str = JUDGES, **variables: str) -> tuple[float, set[str]]:
    """(CPU seconds, top-level packages loaded) of a command that has to find nothing in the way."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT, env=environment)
    *said, last = done.stdout.splitlines()
    assert done.returncode == 0 and said[-1] == "ready", done.stdout + done.stderr
    cpu_s, *loaded = last.split()
    return float(cpu_s), set(loaded)


ON_A_GPU = f"""
import sys
from evenkeel import doctor_command as doctor
from evenkeel.engines import machine as torch_build
torch_build._DRIVER, torch_build.torch_build = sys.argv.pop(1), lambda: {{"cuda": "13.0", "hip": None}}
doctor._nodes, doctor._of_inputs = lambda *_: None, lambda *_: []
{JUDGES}
"""


def test_a_recipe_is_judged_where_a_gpu_is_without_anything_heavy(tiny_model: Path, tmp_path: Path) -> None:
    """But for the questions and their tokenizer. NVIDIA's driver says how many GPUs torch sees, and nvidia-smi their memory. What torch was
    compiled for it says itself, when nodes are judged, which have fifteen seconds."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-a1, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, Disabled'\n")
    smi.chmod(0o755)
    driver = str(stand_in_driver(tmp_path, count=1))
    words = ["doctor", RECIPE, f"model={tiny_model}", f"run_dir={tmp_path}", "learner.device=cuda", "rollout.engine.device=cuda"]
    cpu_s, loaded = judged_ready([driver, *words], ON_A_GPU, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert loaded & set(HEAVY) == set()
    assert cpu_s < MOST_CPU_S


def test_that_a_folder_has_no_tokenizer_is_told_without_transformers(tmp_path: Path) -> None:
    """Reading one takes more than three CPU seconds, most of them for torch's compiler, which transformers imports on the way."""
    asked = f"try: load_tokenizer({str(tmp_path)!r})\nexcept ValueError: print(*sys.modules)"
    code = f"import sys\nfrom evenkeel.rollout.tasks.chat import load_tokenizer\n{asked}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "evenkeel.rollout.tasks.chat" in done.stdout.split() and not {"transformers", "torch"} & set(done.stdout.split())


READS = """
import json, pickle, sys
for answer in pickle.load(sys.stdin.buffer):
    pickle.loads(answer)
    print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def test_who_reads_what_the_learner_answers_needs_no_megatron() -> None:
    """The driver reads a StepResult, for which it needs no torch either; the correction service the others. Megatron takes seconds to
    import, in the midst of the first step, and 100 MB."""
    numbers: dict[str, Any] = dict.fromkeys(StepResult.__dataclass_fields__, 0)
    none, nothing = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    decided = FinalDecision(nothing, none, no_counts(CorrectionConfig(preset="tis-token")))
    answers = [StepResult(**numbers), StepValues(none, decided, none), Proximal(none, None, None)]
    written = pickle.dumps([pickle.dumps(answer) for answer in answers])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", READS], input=written, capture_output=True, cwd=ROOT, env=environment, check=True)
    of_driver, *of_service = (set(json.loads(line)) for line in done.stdout.splitlines())
    assert not of_driver & set(HEAVY)
    assert len(of_service) == 2 and not any({"megatron", "transformers"} & loaded for loaded in of_service)
