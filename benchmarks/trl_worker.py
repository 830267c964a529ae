"""The other side of benchmarks/peers.py: TRL's GRPOTrainer, run by the Python of an environment that has trl.

A question is a run's settings (see `run_trl` there); the answer is, for each step, its seconds and those of its generation, CPU seconds
of the process so far, and the mean reward. The trained model is saved in `output`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sides import serve
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from word_reward import share_of_words

# The same for all runs, and as evenkeel has it.
SETTINGS: dict[str, Any] = {
    "temperature": 1.0,
    "beta": 0.0,
    "loss_type": "dapo",
    "shuffle_dataset": False,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [share_of_words(completion[0]["content"], right) for completion, right in zip(completions, answer, strict=True)]


class TimedTrainer(GRPOTrainer):
    """Knows how long it has generated; its learning rate rises as evenkeel's does."""

    generate_s = 0.0
    warmup_steps = 1

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Step k of the warm-up, from 1, has k / warmup_steps of the learning rate; transformers' own begins with a step of 0."""
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, lambda k: min(1.0, (k + 1) / self.warmup_steps))
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.generate_s += time.perf_counter() - began


class StepLines(TrainerCallback):
    """What each step took; the reward is what the trainer logs itself."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.trainer: TimedTrainer
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" not in logs:
            return
        now = time.perf_counter()
        times = {"step_s": now - self.began, "generate_s": self.trainer.generate_s, "cpu_s": time.process_time()}
        self.lines.append(times | {"reward": float(logs["reward"])})
        self.began, self.trainer.generate_s = now, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()


def train(settings: dict[str, Any]) -> list[dict[str, float]]:
    torch.set_num_threads(settings["threads"])
    sampling, output = settings["sampling"], settings["output"]
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    rows = rows[: settings["steps"] * settings["groups"]]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows])
    config = GRPOConfig(
        output_dir=output,
        max_steps=settings["steps"],
        seed=settings["seed"],
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=settings["groups"] * sampling["samples_per_group"] // settings["microbatch"],
        num_generations=sampling["samples_per_group"],
        max_completion_length=sampling["max_tokens"],
        learning_rate=settings["learning_rate"],
        **SETTINGS,
    )
    lines = StepLines()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=rewards,
        args=config,
        train_dataset=data,
        callbacks=[lines],
    )
    trainer.warmup_steps = settings["warmup_steps"]
    lines.trainer = trainer
    trainer.train()
    trainer.save_model(output)
    return lines.lines


if __name__ == "__main__":
    serve(train)
