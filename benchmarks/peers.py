"""evenkeel against TRL's GRPOTrainer, end to end on this CPU: seconds per step, time to a reward level, and where the time goes.

    python benchmarks/peers.py --make-trl FOLDER                  # once: trl in a virtual environment of its own (about 1.5 GB)
    python benchmarks/peers.py --trl FOLDER [--shape short]       # two runs of each, in turn

Both train the same model folder on the same prompts in the same order, with the same G, batch, sampling, loss, optimizer, learning rate
and number of steps; evenkeel's loss has truncated importance weights besides, for its samples are of the weights before. TRL generates
with transformers, has both cores in each of its phases, and takes the micro-batch with which it is fastest here; evenkeel runs
asynchronously with one thread for each side. Shapes: `long` has prompts of about 70 tokens and answers of about 28, 16 groups of 8;
`short` is the nano recipe's: prompts of 14 and answers of 6, 64 groups of 8. Starting up isn't counted; the first steps of a run count
only for the time to the level.

The task is to spell words backward; the reward is the share of the words that are right, each in its place. The start model has seen
answers in which half of the words, by lot, stood as they were, and so begins with about half of what it can do. Held-out questions have
words that training has not, and are answered through SGLang for both; an answer counts there if all of it is right.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import EVENKEEL, NANO_RECIPE, ROOT, Peer, evenkeel, options, steps_of

TRL = Peer("trl", "trl_worker.py", (("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0"),))
ARCHITECTURE = {"hidden_size": 224, "intermediate_size": 768}
"""Of both sides' model; the rest as the recipe's. What a shape says of steps and levels was chosen for it (2.0M parameters)."""
WARM_UP_STEPS = 3
HELD_OUT = 256
LEARNING_RATE_RISES = 5
"""Steps: fresh Adam averages would move every weight by the whole learning rate at once."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step is made of."""

    question: str
    words: int
    """Words of a question; the answer is each of them spelled backward."""
    max_tokens: int
    groups: int
    longest_word: int
    """Letters; the shortest has 3."""
    start_steps: int
    """Supervised steps of the start model."""
    steps: int
    """Training steps of a run, unless told otherwise."""
    level: float
    """Mean reward to reach."""
    learning_rate: float
    samples: int = 8


SHAPES = {
    "long": Shape(
        # The words first: the nano tokenizer makes the beginning that all prompts share one token.
        "{}: spell each of these words backward, one after the other, in the order in which they stand, put one blank between each two "
        "of them, and say nothing else.",
        words=7, longest_word=3, max_tokens=32, groups=16,
        start_steps=160, steps=30, level=0.7, learning_rate=1.0e-4,
    ),
    "short": Shape(
        "Spell this word backward (example: sun -> nus): {}",
        words=1, longest_word=5, max_tokens=10, groups=64,
        start_steps=110, steps=40, level=0.6, learning_rate=2.0e-4,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One run. Seconds are medians over its steps, the first ones left out; only those until the level are a sum of all."""

    step_s: float
    generate_s: float
    """TRL: seconds of generation in a step. evenkeel: seconds in which the learner waited for a batch: generation goes on meanwhile."""
    train_s: float
    """TRL: all of a step but its generation, the rewards included."""
    cpu_s: float
    """CPU seconds of all its processes in a step, mean."""
    seconds_to_level: float | None
    """Training seconds until the mean reward of five steps reached the level; None: never."""
    rewards: tuple[float, ...]

    @classmethod
    def of(cls, steps: list[dict[str, float]], rewards: list[float], level: float, cpu_s: float) -> PeerRun:
        """From the step_s, generate_s and train_s of each step."""
        reached = next((k for k in range(5, len(rewards) + 1) if statistics.fmean(rewards[k - 5 : k]) >= level), None)
        seconds = None if reached is None else sum(step["step_s"] for step in steps[:reached])
        medians = {name: statistics.median(step[name] for step in steps[WARM_UP_STEPS:]) for name in ("step_s", "generate_s", "train_s")}
        return cls(**medians, cpu_s=cpu_s, seconds_to_level=seconds, rewards=tuple(rewards))


def make_rows(shape: Shape, count: int, seed: int, words: list[str], backward: float = 1.0) -> list[dict[str, str]]:
    """Questions with answers, all made of `words`; that share of the words is spelled backward, by lot, the others are left as they are."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        chosen = draw.sample(words, shape.words)
        answer = [word[::-1] if draw.random() < backward else word for word in chosen]
        rows.append({"prompt": shape.question.format(" ".join(chosen)), "answer": " ".join(answer)})
    return rows


def prepare(shape: Shape, folder: Path) -> Path:
    """Training and held-out rows, a recipe over them, and the start model unless it is there. Returns the recipe."""
    from reasoning_gym import create_dataset

    items = create_dataset("spell_backward", size=6000, seed=0, min_word_len=3, max_word_len=shape.longest_word)
    words = sorted({item["metadata"]["word"].lower() for item in items})
    random.Random(0).shuffle(words)
    held_out, trained = words[:HELD_OUT], words[HELD_OUT:]
    sets = {"start": make_rows(shape, 8000, 3, trained, backward=0.5), "train": make_rows(shape, 8000, 1, trained)}
    for name, rows in (sets | {"held_out": make_rows(shape, HELD_OUT, 2, held_out)}).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = yaml.safe_load(NANO_RECIPE.read_text())
    recipe |= {"name": "peers", "model": str(folder / "model"), "groups_per_step": shape.groups, "dynamic_sampling": False}
    paths = {"path": str(folder / "train.jsonl"), "held_out_path": str(folder / "held_out.jsonl")}
    recipe["rollout"]["task"] = {"kind": "file", **paths, "held_out_size": HELD_OUT, "shuffle": False}
    recipe["rollout"]["reward"] = {"kind": "function", "path": "benchmarks.word_reward:share_of_words"}
    recipe["rollout"]["sampling"] = {"samples_per_group": shape.samples, "max_tokens": shape.max_tokens}
    recipe["rollout"]["engine"]["context_length"] = 128
    recipe["correction"] |= {"advantage": {"epsilon": 1e-4}}  # as TRL has it
    recipe["learner"] = {"learning_rate": shape.learning_rate, "warmup_steps": LEARNING_RATE_RISES, "threads": 1}
    recipe["evaluation"] = {"every_steps": 0, "problems": HELD_OUT, "temperature": 1.0}
    recipe["checkpoint"] = {"every_steps": 0}
    recipe["init"]["architecture"] |= ARCHITECTURE
    recipe["init"]["warmup"] = {"steps": shape.start_steps, "sequences_per_step": 64}
    recipe["init"]["learner"] |= {"decay_steps": shape.start_steps + 1, "threads": 2}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    if not (folder / "model").exists():
        evenkeel("init-model", path, f"rollout.task.path={folder / 'start.jsonl'}")
    return path


def run_evenkeel(recipe: Path, shape: Shape, steps: int, run_dir: Path, seed: int) -> PeerRun:
    log = run_dir.with_suffix(".log")
    with log.open("w") as file:
        command = [*EVENKEEL, "train", str(recipe), f"steps={steps}", f"run_dir={run_dir}", f"seed={seed}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        cpu_at = list(_cpu_seconds_at_steps(process, run_dir / "metrics.jsonl"))
    if process.returncode != 0:
        sys.exit(f"evenkeel train failed:\n{log.read_text()[-3000:]}")
    lines = steps_of(run_dir)
    return PeerRun.of(
        [{"step_s": line["time/step_s"], "generate_s": line["wait/learner_s"], "train_s": line["time/train_s"]} for line in lines],
        [line["reward/mean"] for line in lines],
        shape.level,
        _per_step(cpu_at),
    )


def _per_step(cpu_at: list[tuple[int, float]]) -> float:
    """CPU seconds of a step, mean, from pairs (steps done, CPU seconds so far), the warm-up left out."""
    (first, before), (last, after) = next(one for one in cpu_at if one[0] >= WARM_UP_STEPS), cpu_at[-1]
    return (after - before) / (last - first)


def _cpu_seconds_at_steps(process: subprocess.Popen[bytes], metrics: Path) -> Iterator[tuple[int, float]]:
    """Steps done, and CPU seconds so far of a process and all that it started; whenever there are new lines in its metrics."""
    seen: dict[int, float] = {}
    lines = 0
    while process.poll() is None:
        time.sleep(0.2)
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            for one in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    seen[one.pid] = sum(one.cpu_times()[:2])  # user and system
        now = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if now > lines:
            lines = now
            yield lines, sum(seen.values())


def run_trl(environment: Path, recipe: Path, shape: Shape, steps: int, microbatch: int, output: Path, seed: int) -> PeerRun:
    """Everything that both sides share comes from the recipe; the trained model is in `output`."""
    settings = yaml.safe_load(recipe.read_text())
    rollout, learner = settings["rollout"], settings["learner"]
    shared = {"model": settings["model"], "data": rollout["task"]["path"], "groups": shape.groups, "sampling": rollout["sampling"]}
    rate = {"learning_rate": learner["learning_rate"], "warmup_steps": learner["warmup_steps"]}
    with TRL.start(environment) as train:
        own = {"output": str(output), "steps": steps, "microbatch": microbatch, "threads": 2, "seed": seed}
        lines = train(shared | rate | own)
    return PeerRun.of(
        [line | {"train_s": line["step_s"] - line["generate_s"]} for line in lines],
        [line["reward"] for line in lines],
        shape.level,
        _per_step([(number + 1, line["cpu_s"]) for number, line in enumerate(lines)]),
    )


def _accuracy(model: Path, recipe: Path) -> str:
    said = evenkeel("eval", model, "--task", recipe, "--problems", HELD_OUT)
    found = re.search(r"accuracy of .*: ([0-9.]+ \[[^]]*\])", said)
    return found[1] if found else said.strip().splitlines()[-1]


def best_microbatch(environment: Path, recipe: Path, shape: Shape, folder: Path) -> int:
    """TRL's fastest number of sequences for one forward and backward pass."""
    batch = shape.groups * shape.samples
    seconds = {}
    for size in (batch, batch // 2, batch // 4):
        seconds[size] = run_trl(environment, recipe, shape, WARM_UP_STEPS + 3, size, folder / f"trl-probe-{size}", seed=0).step_s
        print(f"  TRL with micro-batches of {size}: {seconds[size]:.2f} s a step", flush=True)
    return min(seconds, key=seconds.__getitem__)


def print_run(name: str, run: PeerRun, level: float, accuracy: str) -> None:
    until = "not reached" if run.seconds_to_level is None else f"reached after {run.seconds_to_level:.0f} s of training"
    waits = "generates" if name == "TRL" else "waits for a batch"
    tens = " ".join(f"{statistics.fmean(run.rewards[k : k + 10]):.2f}" for k in range(0, len(run.rewards), 10))
    print(f"{name}: step {run.step_s:.2f} s ({waits} {run.generate_s:.2f}, trains {run.train_s:.2f}), {run.cpu_s:.2f} CPU s a step")
    print(f"    mean reward by tens of steps {tens}; {level:g} {until}; held out {accuracy}", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="long")
    parser.add_argument("--steps", type=int, help="training steps of each run; default: by the shape")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each, in turn")
    parser.add_argument("--folder", type=Path, help="keep rows and start model there, by shape; a start model that is there is used again")
    arguments = TRL.parse(parser)
    if arguments.trl is None:
        parser.error("--trl FOLDER is missing; make one with --make-trl FOLDER")
    shape = SHAPES[arguments.shape]
    steps = shape.steps if arguments.steps is None else arguments.steps
    if steps <= WARM_UP_STEPS:
        parser.error(f"--steps {steps}: the first {WARM_UP_STEPS} warm up and are left out; take more")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve() / arguments.shape
        folder.mkdir(parents=True, exist_ok=True)
        recipe = prepare(shape, folder)
        print(f"{arguments.shape}: {shape.groups} groups of {shape.samples}, {_lengths(folder)}", flush=True)
        compare(shape, steps, arguments.pairs, arguments.trl, recipe, Path(scratch))


def compare(shape: Shape, steps: int, pairs: int, environment: Path, recipe: Path, folder: Path) -> None:
    """Runs in turn, with their files in `folder`; prints each, and the ratios."""
    microbatch = best_microbatch(environment, recipe, shape, folder)
    both = []
    for pair in range(pairs):
        ours = run_evenkeel(recipe, shape, steps, folder / f"evenkeel-{pair}", seed=pair)
        trained = folder / f"evenkeel-{pair}" / "checkpoints" / f"step_{steps:06d}" / "hf"
        print_run("evenkeel", ours, shape.level, _accuracy(trained, recipe))
        theirs = run_trl(environment, recipe, shape, steps, microbatch, folder / f"trl-{pair}", seed=pair)
        print_run("TRL", theirs, shape.level, _accuracy(folder / f"trl-{pair}", recipe))
        both.append((theirs, ours))
    print(f"TRL's figures as multiples of evenkeel's, median of {pairs} pairs (and each):")
    print(f"    seconds of a step {_ratios((t.step_s, o.step_s) for t, o in both)}")
    print(f"    CPU seconds of a step {_ratios((t.cpu_s, o.cpu_s) for t, o in both)}")
    print(f"    seconds until {shape.level:g} {_ratios((t.seconds_to_level, o.seconds_to_level) for t, o in both)}")


def _ratios(pairs: Iterable[tuple[float | None, float | None]]) -> str:
    """Median and single values of theirs / ours; a run that never got there has no ratio."""
    ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
    return f"{statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if ratios else "none"


def _lengths(folder: Path) -> str:
    from evenkeel.rollout.tasks.chat import load_tokenizer

    tokenizer = load_tokenizer(folder / "model")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:200]]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]) for chat in chats]
    answers = [len(tokenizer(row["answer"])["input_ids"]) + 1 for row in rows]
    return f"prompts of {statistics.fmean(prompts):.0f} tokens, right answers of {statistics.fmean(answers):.0f}"


if __name__ == "__main__":
    main()
