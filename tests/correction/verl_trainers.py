"""Part of verl_case.py: verl's own trainers, from the generated answers to the updated weights, with the page's class in front of them.

Every function of the trainer is verl's. In the place of the worker groups and engines, which need Ray and a GPU, stands a small model in
this process: it answers, gives logprobs, and is trained by verl's `ppo_loss` on verl's own minibatches.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transfer_queue
import verl
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.tracking import Tracking
from verl.workers.utils.losses import ppo_loss

WORDS, PROMPTS, SAMPLES, PROMPT, ANSWER = 12, 4, 2, 3, 6


class Model:
    """Logprobs of the next word by the word before."""

    def __init__(self, actor_config: Any) -> None:
        self.table = torch.nn.Parameter(torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        self.config, self.gradient, self.updates = actor_config, torch.zeros(WORDS, WORDS, dtype=torch.float64), 0
        self._dispatch_info: dict[str, list[int]] = {"actor": [0]}

    def by_token(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a nested [B, length]: log p of the token that follows each, and sum of p squared there."""
        values, ends = ids.values(), ids.offsets()[1:] - 1
        following = torch.cat([values[1:], values[:1]])
        following[ends] = 0
        table = self.table.log_softmax(-1)[values]
        return table.gather(-1, following[:, None])[:, 0], table.exp().square().sum(-1)

    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        with torch.no_grad():
            logprobs, squares = self.by_token(data["input_ids"])
        nested = {name: torch.nested.nested_tensor_from_jagged(value, offsets=data["input_ids"].offsets())
                  for name, value in (("log_probs", logprobs), ("entropy", -logprobs), ("sum_pi_squared", squares))}  # fmt: skip
        return tu.get_tensordict(nested, non_tensor_dict={"metrics": {"mfu": 0.0}})

    def update_actor(self, data: TensorDict | KVBatchMeta) -> TensorDict:
        if isinstance(data, KVBatchMeta):
            named = data.extra_info
            data = transfer_queue.kv_batch_get(data.keys, data.partition_id, QUEUED)
            tu.assign_non_tensor(data, **named)
            data["loss_mask"] = data["response_mask"]
        split = {name: tu.pop(data, key=name) for name in ("mini_batch_size", "epochs", "seed", "dataloader_kwargs")}
        for part in tu.make_iterator(data, **split):
            tu.assign_non_tensor(part, dp_size=1, batch_num_tokens=int(part["loss_mask"].sum()))
            loss, _ = ppo_loss(self.config, {"log_probs": self.by_token(part["input_ids"])[0]}, part)
            self.gradient += torch.autograd.grad(loss, self.table)[0]
            self.updates += 1
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"mfu": 0.0, "grad_norm": 1.0}})


class Queue:
    """The two calls of a TransferQueue, which needs Ray, on a dictionary."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return TensorDict({name: self.fields[name] for name in select_fields if name in self.fields}, batch_size=len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.fields.update(fields.items())
        return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id=partition_id)


QUEUED = ["input_ids", "prompts", "responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights"]


def queued(batch: dict[str, torch.Tensor], keys: list[str]) -> Queue:
    """The batch as verl's agent loops and its trainer leave it before advantages are computed."""
    lengths = batch["response_mask"].sum(1).tolist()

    def nested(rows: torch.Tensor, before: int = 0) -> torch.Tensor:
        return torch.nested.as_nested_tensor([row[: before + n] for row, n in zip(rows, lengths, strict=True)], layout=torch.jagged)

    names = ("responses", "response_mask", "rollout_log_probs", "old_log_probs", "rm_scores")
    fields: dict[str, Any] = {name: nested(batch[name]) for name in names}
    fields |= {"input_ids": nested(batch["input_ids"], PROMPT), "uid": NonTensorStack(*[key.split("_")[0] for key in keys])}
    return Queue(fields | {"prompts": torch.nested.as_nested_tensor(list(batch["prompts"]), layout=torch.jagged)})


def answers(model: Model, generated: DataProto) -> DataProto:
    """Random ones of unequal lengths, by a sampler that is some way off the model."""
    generator = torch.Generator().manual_seed(2)
    count = len(generated)
    ids = torch.randint(1, WORDS, (count, PROMPT + ANSWER), generator=generator)
    mask = torch.arange(ANSWER) < torch.randint(2, ANSWER + 1, (count, 1), generator=generator)
    attention = torch.cat([torch.ones(count, PROMPT, dtype=torch.bool), mask], 1)
    with torch.no_grad():
        own = model.table.log_softmax(-1)[ids[:, :-1]].gather(-1, ids[:, 1:, None])[..., 0][:, PROMPT - 1 :]
    sampled = (own + 0.3 * torch.randn(own.shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    rewards = torch.zeros(count, ANSWER, dtype=torch.float64)
    rewards[:, 0] = torch.randn(count, generator=generator, dtype=torch.float64)
    tensors = {
        "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:] * mask, "input_ids": ids * attention, "attention_mask": attention.long(),
        "position_ids": torch.arange(PROMPT + ANSWER).repeat(count, 1), "response_mask": mask.long(), "rollout_log_probs": sampled.float(),
        "rm_scores": rewards,
    }  # fmt: skip
    images = {"multi_modal_inputs": np.array([{} for _ in range(count)], dtype=object)}
    return DataProto.from_dict(tensors=tensors, non_tensors=images, meta_info={"timing": {}})


def trainer_of(base: type, corrected: type, actor_config: Any, steps: int) -> Any:
    """A trainer as its __init__ and init_workers leave it, but for workers and engines."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    for key, value in {
        "trainer.logger": [], "trainer.val_before_train": False, "trainer.resume_mode": "disable", "trainer.total_epochs": 1,
        "trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.balance_batch": False, "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": SAMPLES, "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS // steps,
        "actor_rollout_ref.actor.shuffle": False, "algorithm.rollout_correction": None,
    }.items():  # fmt: skip
        OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.update(config, "actor_rollout_ref.actor.calculate_sum_pi_squared", True, force_add=True)
    trainer = object.__new__(type("Trainer", (corrected, base), {}))
    model = Model(actor_config)
    trainer.config, trainer.actor_rollout_wg, trainer.global_steps, trainer.total_training_steps = config, model, 0, 1
    trainer.use_rm = trainer.use_reference_policy = trainer.use_critic = False
    trainer.distillation_config, trainer.train_dataset = None, object()
    nothing = lambda *_, **__: None  # noqa: E731
    trainer.checkpoint_manager = SimpleNamespace(update_weights=nothing, sleep_replicas=nothing)
    trainer.async_rollout_manager = SimpleNamespace(generate_sequences=lambda batch: answers(model, batch))
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    trainer.train_dataloader = [{"index": torch.arange(PROMPTS)[:, None], "raw_prompt": np.array(["?"] * PROMPTS, dtype=object)}]
    trainer._init_dump_executor()
    return trainer


def expected(names: dict[str, Any], batch: dict[str, torch.Tensor], model: Model) -> torch.Tensor:
    """The gradient by the correction alone, with the logprobs before the update as target."""
    mask = batch["response_mask"].bool()
    packed = names["packed"](mask, batch["rollout_log_probs"], batch["old_log_probs"], batch["advantages"])
    corrected = names["correct"](packed, names["method"])
    ids = batch["input_ids"]
    logprobs = model.table.log_softmax(-1)[ids[:, :-1]].gather(-1, ids[:, 1:, None])[..., 0][:, PROMPT - 1 :]
    trained = names["policy_loss"](corrected, names["pack_like"](logprobs, mask), names["method"])
    (gradient,) = torch.autograd.grad(trained.loss, model.table)
    return gradient


def run_all(names: dict[str, Any], actor_config: Any) -> dict[str, Any]:
    """By trainer and optimizer steps: how far the gradient of its update is from `expected`; and what verl logs of the weights."""
    found: dict[str, Any] = {}
    for steps in (1, 2):
        seen: dict[str, Any] = {}

        class Watched(names["Corrected"]):  # type: ignore[misc]
            def _update_actor(self, batch: DataProto) -> DataProto:
                done = super()._update_actor(batch)
                seen.update({name: value.clone() for name, value in batch.batch.items()})  # noqa: B023
                return done

        trainer = trainer_of(RayPPOTrainer, Watched, actor_config, steps)
        logged: dict[str, float] = {}
        Tracking.log = lambda self, data, **_: logged.update(data)  # type: ignore[method-assign]  # noqa: B023
        trainer.fit()
        found[f"RayPPOTrainer.fit, {steps}"] = difference(trainer.actor_rollout_wg, expected(names, seen, trainer.actor_rollout_wg), steps)
        kept = DataProto.from_dict(tensors={**seen, "rollout_is_weights": weights_of(names, seen)})
        plain = ray_trainer.compute_variance_proxy_metrics(batch=kept, gradient_norm=1.0)
        found[f"variance, {steps}"] = [[logged[name], value] for name, value in plain.items()]

        step = trainer_of(SeparateRayPPOTrainer, Watched, actor_config, steps)
        step.metrics, step.timing_raw, step.reward_extra_infos_dict = {}, {}, {}
        again = {name: seen[name] for name in seen if name not in ("advantages", "returns", "rollout_is_weights")}
        prompts = np.array([str(k // SAMPLES) for k in range(PROMPTS * SAMPLES)], dtype=object)
        batch = DataProto.from_dict(tensors=again, non_tensors={"uid": prompts})
        step.reward_tensor = again["rm_scores"]
        step._fit_update_actor(step._fit_compute_advantage(batch))
        found[f"SeparateRayPPOTrainer, {steps}"] = difference(step.actor_rollout_wg, expected(names, seen, step.actor_rollout_wg), steps)

        last = trainer_of(PPOTrainerSync, names["CorrectedInQueue"], actor_config, steps)
        keys = [f"{k // SAMPLES}_{k}_0" for k in range(PROMPTS * SAMPLES)]
        queue = queued(seen, keys)
        transfer_queue.kv_batch_get, transfer_queue.kv_batch_put = queue.kv_batch_get, queue.kv_batch_put
        meta = queue.kv_batch_put(keys, "train", TensorDict({}, batch_size=len(keys)))
        last._update_actor(last._compute_advantage(meta, metrics={}), metrics={})
        found[f"PPOTrainerSync, {steps}"] = difference(last.actor_rollout_wg, expected(names, seen, last.actor_rollout_wg), steps)
    return found


def weights_of(names: dict[str, Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B, responses] importance weights, 0 where a token was rejected."""
    mask = batch["response_mask"].bool()
    packed = names["packed"](mask, batch["rollout_log_probs"], batch["old_log_probs"], batch["advantages"])
    columns = names["correct"](packed, names["method"]).to_padded(mask)
    return torch.where(columns["keep_mask"], columns["importance_weights"], 0)


def difference(model: Model, gradient: torch.Tensor, steps: int) -> dict[str, float]:
    assert model.updates == steps
    size = float(gradient.abs().max())
    return {"gradient": float((model.gradient / steps - gradient).abs().max()) / size, "size": size}
