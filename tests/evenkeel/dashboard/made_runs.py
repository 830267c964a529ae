"""Folders of runs that have numbers of each kind, made by what makes a run's."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer, decoders, models

from evenkeel.actors.carriers import ShownAnswer, TokenSample
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import EventKind, RunEvent, RunFolder
from evenkeel.correction.early_warning.monitor import Event, State

CONFIG = "name: {name}\nsteps: {steps}\ncorrection: {{preset: mis-full}}\n"
NASTY = "<script>document.title='taken'</script>\u202egnp.exe\u0007\u200b"
"""What a model may write: markup, a right-to-left override, a bell, a zero-width space."""


def reward(step: int) -> float:
    return 0.5 + 0.4 * math.sin(step / 9)


def numbers(step: int) -> StepMetrics:
    return StepMetrics(
        step,
        {
            "time/elapsed_s": 2.0 * step,
            "time/step_s": 2.0,
            "reward/mean": reward(step),
            "reward/accuracy": 0.25,
            "mismatch_and_staleness/k3": 1e-4 * step,
            "learner/grad_norm": math.inf if step == 2 else 0.5,
            "learner/entropy": 1.0,
            "staleness/tokens/0": 70.0,
            "staleness/tokens/1": 30.0,
            "staleness/mean": 0.3,
            "staleness/max": 1,
            "wait/rollout_share": 0.1,
            "worker/tokens/0": 10,
            "worker/tokens/1": 20,
            "groups/admitted_total": 4 * step + 4,
            "groups/trained_total": 4 * step,
            "groups/discarded_total": 1,
            "groups/outstanding": 3,
            "reward/exceptions_total": 5,
            "sync/failures_total": 0,
            "pool/workers": 2,
            "pool/failures_total/engine_lost": 0,
            "pool/failures_total/request_failed": 2 * step,
            "correction/rejected_by_ratio_token_rho": 0.125,
            **{f"correction/bucket_tokens_{i}": 10 * (i + 1) for i in range(5)},
            **{f"correction/bucket_rho_mean_{i}": 1 + i / 8 for i in range(5)},
            **{f"correction/bucket_rho_std_{i}": 0.25 for i in range(5)},
            **{f"correction/bucket_behavior_tokens_{i}": 10 * step + i for i in range(5)},
            **{f"correction/bucket_behavior_rho_mean_{i}": 1 - i / 8 for i in range(5)},
            **{f"correction/bucket_behavior_rho_std_{i}": step / 64 for i in range(5)},
        },
    )


def made(parent: Path, name: str = "run", *, steps: int = 40) -> RunFolder:
    """A run of so many steps of forty, with two evaluations, a watch, an alarm, and what a model shouldn't have written in an event."""
    folder = RunFolder.create(parent / name, name)
    folder.write_text("config.yaml", CONFIG.format(name=name, steps=40))
    for step in range(1, steps + 1):
        folder.append_metrics(numbers(step))
    for step, value in ((0, 0.5), (40, 0.9)):
        shares = {"held_out/accuracy": value, "held_out/wilson_low": value - 0.05, "held_out/wilson_high": value + 0.05}
        folder.append_evaluation(StepMetrics(step, shares | {"held_out/problems": 512}))
    for step, state in ((12, State.WATCH), (20, State.ALARM)):
        folder.append_monitor_event(Event(step, "k3_kl", state, 0.01, 8.0, f"k3_kl grows: {state}"))
        folder.event(state.value, f"step {step}: k3_kl grows: {state}")
    folder.event("warning", f"step 30: a reward raised {NASTY}")
    folder.write_event(RunEvent.now("info", f"checkpoint {folder.path}/checkpoints/step_000040 in 1.0 s", EventKind.SAVED))
    return folder


PIECES = ["<user>", " spell", " cat", "</user>", NASTY, " t", " a", " c", "<end>"]
LABELS = ("ratio_token_rho", "veto", "not_finite", "other")


def sample(step: int, *, answers: int = 4, seed: int = 0, turns: bool = False) -> TokenSample:
    """Groups of two answers each: four tokens are read, five sampled, the first of which is what a model shouldn't write.

    Token 6 is dropped by the veto, 7 cut to a bound, 8 clipped. Args: turns: token 5 is read, too, between two turns.
    """
    draw = np.random.default_rng([seed, step])
    told = tuple(
        ShownAnswer(10 * step + i // 2, i % 2, f"train/0/{i // 2}", f"spell number {i // 2}", "tac", i / 4, {"format": i / 8}, "stop", None)
        for i in range(answers)
    )
    n = 9 * answers
    sampled = np.tile((np.arange(9) >= 4) & ~(turns & (np.arange(9) == 5)), answers)
    behavior = np.where(sampled, -draw.random(n), np.nan).astype(np.float32)
    of = np.tile(np.arange(9), answers)
    columns = {
        "token_ids": of.astype(np.int32),
        "turns": (turns & (of >= 5)).astype(np.int32),
        "versions": np.where(sampled, step - 1 - of % 2, -1).astype(np.int32),
        "sampled": sampled,
        "behavior": behavior,
        "proximal": behavior - np.float32(0.25) * (of % 3).astype(np.float32),
        "target": behavior - np.float32(0.125),
        "entropy": np.where(sampled, draw.random(n), np.nan).astype(np.float32),
        "advantage": np.where(sampled, np.repeat(np.arange(answers) - 1.5, 9), np.nan).astype(np.float32),
        "importance_weight": np.where(sampled, np.where(of == 5, 0.5, np.where(of == 7, 2.0, 1.0)), np.nan).astype(np.float32),
        "coefficient": np.where(sampled, 1.0, np.nan).astype(np.float32),
        "kept": sampled & (of != 6),
        "clipped": of == 8,
        "is_cut": of == 7,
        "dropped_by": np.where(of == 6, 2, 0).astype(np.uint8),
    }
    return TokenSample(step - 1, told, np.arange(0, n + 1, 9), columns, LABELS)


def with_tokens(folder: RunFolder, *steps: int, answers: int = 4) -> RunFolder:
    """Trajectories of these steps, three groups a batch of which two are kept, and of the evaluation after the last one."""
    folder.model_path.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token=PIECES[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder.model_path / "tokenizer.json"))
    for step in steps:
        found = sample(step, answers=answers)
        ids = dict.fromkeys(one.group for one in found.answers)
        rewards = [[one.reward for one in found.answers if one.group == group] for group in ids]
        rows = [(group, of) for group, of in zip(ids, rewards, strict=True)] + [(9999, [1.0, 1.0])]
        rest = {"prompt_id": "train/0/0", "cut": 0, "failed": 0, "admitted_version": step - 1, "generate_s": 1.0, "reward_s": 0.0}
        groups = [{"group": group, "rewards": of, "tokens": [5] * len(of), **rest} for group, of in rows]
        folder.write_tokens(step, lambda path, found=found, groups=groups: found.save(path, groups))
    answered = sample(max(steps), answers=6, seed=1)
    few = {name: answered.columns[name] for name in ("token_ids", "turns", "versions", "sampled", "behavior")}
    held_out = TokenSample(answered.version, answered.answers, answered.offsets, few)
    folder.write_tokens(max(steps), held_out.save, "held_out")
    return folder


def read_report(path: Path) -> dict[str, Any]:
    """What a report holds, by the addresses of its views."""
    (held,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    read: dict[str, Any] = orjson.loads(held)
    return {name: read[one["same_as"]] if "same_as" in one else one for name, one in read.items()}
