"""What other trainers (TRL, verl, slime, OpenRLHF) call settings, for the error of a key that isn't there. Data alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Meant(NamedTuple):
    """Our setting behind another trainer's word."""

    key: str
    """Dotted; empty: there is none."""
    note: str = ""
    """What is different about it, or why there is none."""

    def __str__(self) -> str:
        if not self.key:
            return self.note
        return f"it is {self.key} here{f' ({self.note})' if self.note else ''}"


_IN_BATCH = "counts prompts: trajectories are groups_per_step x rollout.sampling.samples_per_group"
_EPOCHS = "a run has steps, not epochs, and begins its questions again by itself: set steps to EPOCHS x questions / groups_per_step"
_PENALISED = "answers are sampled without penalties, which the learner doesn't know: every importance ratio would be biased"
_LORA = "all weights are trained; there is no LoRA"
_NO_CRITIC = "there is no critic: the advantage of an answer is over its group (correction.advantage.estimator)"
_MICROBATCH = "in tokens of a rank; it changes no result"
_BOTH = "of an engine; of the learner it is learner.tensor_parallel"
_WHOLE = "there is nothing to set: microbatches add up to the whole batch, whatever learner.tokens_per_microbatch is"
_SECTION = "a section of verl's; `evenkeel config` lists the settings that one usually sets"

_WORDS: tuple[tuple[str, Meant], ...] = (
    # Batches and steps.
    ("num_generations n n_samples_per_prompt samples_per_prompt group_size rollout_n", Meant("rollout.sampling.samples_per_group")),
    ("batch_size train_batch_size rollout_batch_size prompts_per_step", Meant("groups_per_step", _IN_BATCH)),
    ("global_batch_size", Meant("groups_per_step", f"{_IN_BATCH}, of learner.optimizer_steps_per_batch optimizer steps")),
    ("ppo_mini_batch_size mini_batch_size num_minibatches num_steps_per_rollout", Meant(
        "learner.optimizer_steps_per_batch", "a number of minibatches: groups_per_step divided by the prompts of one")),
    ("per_device_train_batch_size micro_train_batch_size micro_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
     "micro_rollout_batch_size ppo_max_token_len_per_gpu max_tokens_per_gpu use_dynamic_bsz use_dynamic_batch_size",
     Meant("learner.tokens_per_microbatch", _MICROBATCH)),
    ("gradient_accumulation_steps gradient_accumulation accumulation_steps", Meant("", _WHOLE)),
    ("max_steps total_steps train_steps training_steps total_training_steps num_steps num_rollout", Meant("steps")),
    ("epochs num_epochs num_train_epochs total_epochs num_epoch num_episodes", Meant("", _EPOCHS)),
    ("ppo_epochs num_iterations max_epochs update_epochs", Meant("learner.epochs_per_batch")),
    ("staleness_threshold max_head_offpolicyness max_async_level async_level max_off_policy_steps", Meant("max_staleness")),
    ("update_weights_interval trigger_parameter_sync_step sync_interval", Meant("weight_sync.every_steps")),
    ("filter_groups dynamic_sampling_filter_path dynamic_filtering", Meant("dynamic_sampling")),
    # The optimizer.
    ("lr actor_learning_rate actor_lr", Meant("learner.learning_rate")),
    ("lr_scheduler_type lr_scheduler lr_decay_style lr_warmup_style warmup_style", Meant("learner.decay")),
    ("warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio lr_warmup_fraction lr_warmup_steps lr_warmup_iters num_warmup_steps",
     Meant("learner.warmup_steps", "in steps")),
    ("lr_decay_iters lr_decay_steps", Meant("learner.decay_steps")),
    ("min_lr lr_end", Meant("learner.min_learning_rate")),
    ("max_grad_norm max_norm grad_clip gradient_clip gradient_clipping grad_norm_clip", Meant("learner.clip_grad")),
    ("adam_beta1 adam_beta2 adam_betas", Meant("learner.betas", "both: [0.9, 0.99]")),
    ("bf16 fp16 torch_dtype precision mixed_precision", Meant("learner.dtype", "of the engines it is rollout.engine.dtype")),
    ("lora lora_rank lora_r lora_alpha lora_dropout lora_target_modules use_lora use_peft peft peft_config target_modules load_in_4bit",
     Meant("", _LORA)),
    ("gradient_checkpointing enable_gradient_checkpointing recompute_granularity activation_checkpointing",
     Meant("learner.recompute_activations")),
    # Lengths and sampling.
    ("max_completion_length max_response_length max_new_tokens generate_max_len response_length rollout_max_response_len max_tokens",
     Meant("rollout.sampling.max_tokens")),
    ("max_prompt_length prompt_max_len rollout_max_prompt_len", Meant("rollout.task.max_prompt_tokens")),
    ("max_model_len max_model_length max_seq_length max_length rollout_max_context_len", Meant("rollout.engine.context_length")),
    ("temperature rollout_temperature", Meant("rollout.sampling.temperature", "of an evaluation it is evaluation.temperature")),
    ("top_p rollout_top_p", Meant("rollout.sampling.top_p", "of an evaluation it is evaluation.top_p")),
    ("top_k rollout_top_k", Meant("rollout.sampling.top_k", "left out for the whole vocabulary, which is -1 or 0 elsewhere")),
    ("min_p", Meant("rollout.sampling.min_p")),
    ("repetition_penalty presence_penalty frequency_penalty", Meant("", _PENALISED)),
    ("mask_truncated_completions overlong_filter overlong_filtering", Meant("rollout.overlong.kind", "mask")),
    ("overlong_buffer overlong_buffer_cfg soft_overlong_punishment", Meant("rollout.overlong.kind", "penalise")),
    # Losses.
    ("beta kl_coef kl_loss_coef init_kl_coef kl_beta kl_coefficient kl_ctrl", Meant("correction.kl.coefficient")),
    ("use_kl_loss use_kl", Meant("correction.kl.coefficient", "0 is none")),
    ("kl_loss_type kl_penalty kl_estimator", Meant("correction.kl.estimator")),
    ("entropy_coeff entropy_coef entropy_loss_coef", Meant("correction.entropy_coefficient")),
    ("epsilon eps_clip clip_ratio clip_eps cliprange clip_ratio_low epsilon_low", Meant(
        "correction.objective.clip_low", "below 1; above it is correction.objective.clip_high")),
    ("epsilon_high eps_clip_high clip_ratio_high", Meant("correction.objective.clip_high")),
    ("delta clip_ratio_c eps_clip_c dual_clip", Meant("correction.objective.dual_clip")),
    ("loss_type loss_agg_mode", Meant("correction.denominator.kind", "or a method as a whole by correction.preset")),
    ("importance_sampling_level", Meant("correction.objective.level")),
    ("adv_estimator advantage_estimator", Meant("correction.advantage.estimator")),
    ("scale_rewards norm_adv_by_std_in_grpo normalize_advantages grpo_std_normalization", Meant(
        "correction.advantage.estimator", "grpo_no_std doesn't divide by the deviation")),
    ("tis use_tis rollout_is vllm_importance_sampling_correction truncated_importance_sampling", Meant(
        "correction.preset", "tis-token; `evenkeel presets` lists the others")),
    ("tis_clip tis_imp_ratio_cap rollout_is_threshold vllm_importance_sampling_cap tis_threshold", Meant("correction.importance.upper")),
    ("rollout_rs rollout_rs_threshold", Meant("correction.rejection")),
    ("gamma lam lambd gae_lambda critic value_loss_coef cliprange_value critic_learning_rate", Meant("", _NO_CRITIC)),
    ("use_routing_replay use_rollout_routing_replay routing_replay router_replay", Meant("learner.routing_replay")),
    # Model, data, reward.
    ("model_name model_path model_name_or_path hf_checkpoint pretrain", Meant("model", "of the hub hf:ORGANISATION/NAME")),
    ("ref_model ref_load sync_ref_model reference_model", Meant("", "the reference is the model that the run begins with")),
    ("dataset dataset_name prompt_data train_files train_file train_data data_path", Meant(
        "rollout.task.path", "with rollout.task.kind huggingface or file")),
    ("val_files val_file test_files eval_prompt_data eval_dataset", Meant(
        "rollout.task.held_out_path", "of a data set of the hub rollout.task.held_out_split")),
    ("input_key prompt_key", Meant("rollout.task.prompt_field")),
    ("label_key answer_key", Meant("rollout.task.answer_field")),
    ("reward_funcs reward_fn reward_function custom_reward_function custom_rm_path rm_type remote_rm_url reward_model reward_pretrain",
     Meant("rollout.reward", "kind function with path MODULE:FUNCTION scores by a function of yours, also by one that asks a model")),
    # Machines.
    ("vllm_num_engines num_engines num_workers rollout_num_engines", Meant("rollout.workers")),
    ("tensor_parallel_size tensor_model_parallel_size tp tp_size vllm_tensor_parallel_size rollout_num_gpus_per_engine",
     Meant("rollout.engine.tensor_parallel", _BOTH)),
    ("pipeline_model_parallel_size pp pp_size", Meant("learner.pipeline_parallel")),
    ("expert_model_parallel_size ep ep_size", Meant("learner.expert_parallel", "of an engine it is rollout.engine.expert_parallel")),
    ("zero_stage fsdp deepspeed", Meant("learner.distributed_optimizer", "shares the optimizer; weights are split by the parallel sizes")),
    ("gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static sglang_mem_fraction_static",
     Meant("rollout.engine.memory_fraction")),
    ("max_num_seqs sglang_max_running_requests", Meant("rollout.engine.max_running_requests")),
    ("n_gpus_per_node num_gpus_per_node actor_num_gpus_per_node nnodes num_nodes actor_num_nodes", Meant(
        "learner.data_parallel", "ranks of the learner; engines are rollout.workers, nodes those of ray.address")),
    ("use_vllm vllm rollout_backend", Meant("", "engines are SGLang's: rollout.engine")),
    # Records.
    ("output_dir save_dir save_path ckpt_path default_local_dir", Meant("run_dir")),
    ("save_steps save_freq save_interval save_every", Meant("checkpoint.every_steps")),
    ("save_total_limit max_ckpt_to_keep max_ckpt_num max_actor_ckpt_to_keep", Meant("checkpoint.keep")),
    ("eval_steps test_freq eval_interval eval_every eval_freq", Meant("evaluation.every_steps")),
    ("n_samples_per_eval_prompt eval_n_samples_per_prompt", Meant("evaluation.samples")),
    ("report_to use_wandb wandb use_mlflow mlflow", Meant("metrics.views")),
    ("project_name wandb_project", Meant("", "a tracker's own variable says it: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME")),
    ("run_name experiment_name exp_name", Meant("name")),
    ("logging_steps log_interval log_level", Meant("", "each step is in metrics.jsonl, TensorBoard and on the terminal")),
    ("actor_rollout_ref algorithm trainer data actor", Meant("", _SECTION)),
)  # fmt: skip

MEANT = {word: meant for words, meant in _WORDS for word in words.split()}
"""What is meant, by the last part of the key, in lower case, with _ for a dash."""


def meant_by(path: str) -> Meant | None:
    """Our setting, if another trainer calls one like the last part of this dotted key; None: not known."""
    return MEANT.get(path.rpartition(".")[2].lower().replace("-", "_"))


def as_setting(option: str, words: Sequence[str]) -> str:
    """What stands for an option that there isn't, as a setting. Args: words: of the command line, with the option's value."""
    name = option.lstrip("-").replace("-", "_")
    place = next((i for i, word in enumerate(words) if word.partition("=")[0] == option), len(words))
    _, equals, value = words[place].partition("=") if place < len(words) else ("", "", "")
    if not equals:
        value = next((word for word in words[place + 1 : place + 2] if not word.startswith("-") and "=" not in word), "VALUE")
    meant = meant_by(name)
    if meant is not None and not meant.key:
        return f"none stands for {name}: {meant}"
    return f"{meant.key if meant else name}={value}"
