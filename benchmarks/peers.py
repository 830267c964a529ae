"""evenkeel against TRL's GRPOTrainer, end to end on this CPU: seconds per step, time to a reward level, and where the time goes.

    python benchmarks/peers.py --make-trl FOLDER                  # once: trl in a virtual environment of its own (about 1.5 GB)
    python benchmarks/peers.py --trl FOLDER [--shape long] [--steps 12] [--pairs 2]
    python benchmarks/peers.py --trl FOLDER --shape short --steps 70 --pairs 1 --level 0.8

Both train the same model folder on the same prompts in the same order, with the same G, batch, sampling, optimizer and number of steps;
the runs alternate. TRL generates with transformers, has both cores in each of its phases, and takes the micro-batch with which it is
fastest here; evenkeel runs asynchronously with one thread for each side. Shapes: `long` has prompts of about 70 tokens and answers of
about 28, 16 groups of 8; `short` is the nano recipe's: prompts of 20 and answers of 6, 64 groups of 8. Starting up isn't counted, nor
are the first steps of a run. The reward is the share of the answer's words that are right. Held-out questions have words that training has
not, and are answered through SGLang for both.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "nano_spell_backward.yaml"
TRL = ["torch==2.13.0", "trl==1.16.0", "transformers==5.23.0"]
WARM_UP_STEPS = 3
HELD_OUT = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step is made of."""

    question: str
    words: int
    """Words of a question; the answer is each of them spelled backward."""
    max_tokens: int
    groups: int
    warm_up: int
    """Supervised steps of the start model: enough to end its answers in time."""
    samples: int = 8


SHAPES = {
    "long": Shape(
        # The words first: the nano tokenizer makes the beginning that all prompts share one token.
        "{}: spell each of these words backward, one after the other, in the order in which they stand, put one blank between each two "
        "of them, and say nothing else.",
        words=5,
        max_tokens=32,
        groups=16,
        warm_up=150,
    ),
    "short": Shape("Spell this word backward (example: sun -> nus): {}", words=1, max_tokens=10, groups=64, warm_up=74),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, its first steps left out of everything but the way to the level."""

    step_s: float
    generate_s: float
    """TRL: seconds of generation in a step. evenkeel: seconds in which the learner waited for a batch: generation goes on beside it."""
    train_s: float
    cpu_s: float
    """CPU seconds of all its processes in a step."""
    seconds_to_level: float | None
    """Training seconds until the mean reward of five steps reached the level; None: never."""
    rewards: tuple[float, ...]
    accuracy: str


def make_rows(shape: Shape, count: int, seed: int, words: list[str]) -> list[dict[str, str]]:
    """Questions with answers, all made of `words`."""
    draw = random.Random(seed)
    chosen = [draw.sample(words, shape.words) for _ in range(count)]
    return [{"prompt": shape.question.format(" ".join(some)), "answer": " ".join(word[::-1] for word in some)} for some in chosen]


def prepare(shape: Shape, steps: int, folder: Path) -> Path:
    """Training and held-out rows, a recipe over them, and the start model. Returns the recipe."""
    from reasoning_gym import create_dataset

    items = create_dataset("spell_backward", size=6000, seed=0, min_word_len=3, max_word_len=5)
    words = sorted({item["metadata"]["word"].lower() for item in items})
    random.Random(0).shuffle(words)
    held_out, trained = words[:HELD_OUT], words[HELD_OUT:]
    sets = {"train": make_rows(shape, max(steps * shape.groups, 8000), 1, trained), "held_out": make_rows(shape, HELD_OUT, 2, held_out)}
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe |= {"name": "peers", "model": str(folder / "model"), "groups_per_step": shape.groups, "dynamic_sampling": False}
    recipe["rollout"]["task"] = {
        "kind": "file",
        "path": str(folder / "train.jsonl"),
        "held_out_path": str(folder / "held_out.jsonl"),
        "held_out_size": HELD_OUT,
        "shuffle": False,
    }
    recipe["rollout"]["reward"] = {"kind": "function", "path": "benchmarks.word_reward:share_of_words"}
    recipe["rollout"]["sampling"] = {"samples_per_group": shape.samples, "max_tokens": shape.max_tokens}
    recipe["rollout"]["engine"]["context_length"] = 128
    recipe["learner"] = {"learning_rate": 1.0e-4, "threads": 1}
    recipe["evaluation"] = {"every_steps": 0, "problems": HELD_OUT, "temperature": 1.0}
    recipe["checkpoint"] = {"every_steps": 0}
    recipe["init"]["warmup"]["steps"] = shape.warm_up
    recipe["init"]["learner"]["decay_steps"] = shape.warm_up + 1
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    evenkeel("init-model", path)
    return path


def evenkeel(command: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "actors.cli", command, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"evenkeel {command} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def run_evenkeel(recipe: Path, steps: int, level: float, run_dir: Path) -> Measured:
    command = [sys.executable, "-m", "actors.cli", "train", str(recipe), f"steps={steps}", f"run_dir={run_dir}"]
    log = run_dir.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        cpu_at = list(_cpu_seconds_at_steps(process, run_dir / "metrics.jsonl"))
    if process.returncode != 0:
        sys.exit(f"evenkeel train failed:\n{log.read_text()[-3000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return measured(
        step_s=[line["time/step_s"] for line in lines],
        generate_s=[line["wait/learner_s"] for line in lines],
        train_s=[line["time/train_s"] for line in lines],
        cpu_s=_per_step(cpu_at),
        rewards=[line["reward/mean"] for line in lines],
        level=level,
        accuracy=_accuracy(run_dir / "checkpoints" / f"step_{steps:06d}" / "hf", recipe),
    )


def _per_step(cpu_at: list[tuple[int, float]]) -> float:
    """CPU seconds of a step, from pairs (steps done, CPU seconds so far), the warm-up left out."""
    (first, before), (last, after) = next(one for one in cpu_at if one[0] >= WARM_UP_STEPS), cpu_at[-1]
    return (after - before) / (last - first)


def _cpu_seconds_at_steps(process: subprocess.Popen[bytes], metrics: Path) -> Iterator[tuple[int, float]]:
    """Steps done, and CPU seconds so far of a process and all that it started; whenever there are new lines in its metrics."""
    seen: dict[int, float] = {}
    lines = 0
    while process.poll() is None:
        time.sleep(0.2)
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for one in family:
            try:
                times = one.cpu_times()
            except psutil.Error:
                continue
            seen[one.pid] = times.user + times.system
        now = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if now > lines:
            lines = now
            yield lines, sum(seen.values())


def trl_settings(recipe: Path, shape: Shape, steps: int, microbatch: int, folder: Path, name: str) -> dict[str, Any]:
    """What benchmarks/trl_worker.py reads; everything that both sides share comes from the recipe."""
    settings = yaml.safe_load(recipe.read_text())
    return {
        "model": settings["model"],
        "data": settings["rollout"]["task"]["path"],
        "output": str(folder / name),
        "metrics": str(folder / f"{name}.jsonl"),
        "steps": steps,
        "groups": shape.groups,
        "samples": shape.samples,
        "max_tokens": shape.max_tokens,
        "microbatch": microbatch,
        "learning_rate": settings["learner"]["learning_rate"],
        "threads": 2,
        "seed": 0,
    }


def run_trl(python: Path, settings: dict[str, Any], level: float, recipe: Path | None) -> Measured:
    """One run of TRL; held-out accuracy only with a recipe."""
    command = [str(python), str(ROOT / "benchmarks" / "trl_worker.py"), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"trl failed:\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in Path(settings["metrics"]).read_text().splitlines()]
    return measured(
        step_s=[line["step_s"] for line in lines],
        generate_s=[line["generate_s"] for line in lines],
        train_s=[line["step_s"] - line["generate_s"] for line in lines],
        cpu_s=_per_step([(number + 1, line["cpu_s"]) for number, line in enumerate(lines)]),
        rewards=[line["reward"] for line in lines],
        level=level,
        accuracy=_accuracy(Path(settings["output"]), recipe) if recipe else "",
    )


def measured(
    *,
    step_s: list[float],
    generate_s: list[float],
    train_s: list[float],
    cpu_s: float,
    rewards: list[float],
    level: float,
    accuracy: str,
) -> Measured:
    reached = next((k for k in range(5, len(rewards) + 1) if statistics.fmean(rewards[k - 5 : k]) >= level), None)
    return Measured(
        *(statistics.fmean(values[WARM_UP_STEPS:]) for values in (step_s, generate_s, train_s)),
        cpu_s,
        seconds_to_level=None if reached is None else sum(step_s[:reached]),
        rewards=tuple(rewards),
        accuracy=accuracy,
    )


def _accuracy(model: Path, recipe: Path) -> str:
    said = evenkeel("eval", model, "--task", recipe, "--problems", HELD_OUT)
    found = re.search(r"accuracy.*", said)
    return found.group(0) if found else said.strip().splitlines()[-1]


def best_microbatch(python: Path, recipe: Path, shape: Shape, folder: Path) -> int:
    """TRL's fastest number of sequences for one forward and backward pass."""
    batch = shape.groups * shape.samples
    seconds = {}
    for size in (batch, batch // 2, batch // 4):
        settings = trl_settings(recipe, shape, WARM_UP_STEPS + 3, size, folder, f"trl-probe-{size}")
        seconds[size] = run_trl(python, settings, 2.0, None).step_s
        print(f"  TRL with micro-batches of {size}: {seconds[size]:.2f} s a step", flush=True)
    return min(seconds, key=seconds.__getitem__)


def print_run(name: str, run: Measured, level: float) -> None:
    until = "not reached" if run.seconds_to_level is None else f"after {run.seconds_to_level:.0f} s of training"
    waits = "generates" if name.startswith("TRL") else "waits for a batch"
    print(
        f"  {name:10} step {run.step_s:.2f} s ({waits} {run.generate_s:.2f}, trains {run.train_s:.2f}), {run.cpu_s:.2f} CPU s a step; "
        f"reward {statistics.fmean(run.rewards[:3]):.3f} -> {statistics.fmean(run.rewards[-3:]):.3f}, {level:g} {until}; {run.accuracy}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="long")
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each, in turn")
    parser.add_argument("--level", type=float, default=0.8, help="mean reward to reach")
    parser.add_argument("--trl", type=Path, help="folder of the virtual environment that has trl")
    parser.add_argument("--make-trl", type=Path, metavar="FOLDER", help="make that environment, and stop")
    arguments = parser.parse_args()
    if arguments.make_trl:
        venv.create(arguments.make_trl, with_pip=True)
        pip = [str(arguments.make_trl / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *TRL], check=True)
        return
    if arguments.trl is None:
        parser.error("--trl FOLDER is missing; make one with --make-trl FOLDER")
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP_STEPS} warm up and are left out; take more")
    compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    shape, python = SHAPES[arguments.shape], arguments.trl / "bin" / "python"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recipe = prepare(shape, arguments.steps, folder)
        print(f"{arguments.shape}: {shape.groups} groups of {shape.samples}, {_lengths(folder)}", flush=True)
        microbatch = best_microbatch(python, recipe, shape, folder)
        gains, cpu = [], []
        for pair in range(arguments.pairs):
            ours = run_evenkeel(recipe, arguments.steps, arguments.level, folder / f"evenkeel-{pair}")
            print_run("evenkeel", ours, arguments.level)
            settings = trl_settings(recipe, shape, arguments.steps, microbatch, folder, f"trl-{pair}")
            theirs = run_trl(python, settings, arguments.level, recipe)
            print_run("TRL", theirs, arguments.level)
            gains.append(theirs.step_s / ours.step_s)
            cpu.append(theirs.cpu_s / ours.cpu_s)
        print(f"TRL's step takes {statistics.median(gains):.2f} times as long ({', '.join(f'{gain:.2f}' for gain in gains)}),")
        print(f"and {statistics.median(cpu):.2f} times the CPU seconds; median of {arguments.pairs} pairs")


def _lengths(folder: Path) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:200]]
    prompts = [
        len(
            tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )
        for row in rows
    ]
    answers = [len(tokenizer(row["answer"])["input_ids"]) + 1 for row in rows]
    return f"prompts of {statistics.fmean(prompts):.0f} tokens, right answers of {statistics.fmean(answers):.0f}"


if __name__ == "__main__":
    main()
