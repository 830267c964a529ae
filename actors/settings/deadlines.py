"""Derives deadlines from answer length, token rate, model size and byte rate.

A recipe sets the two rates, start_s, the heartbeats, drain_s and no_workers_s; all others follow and grow with the run, so that a long wait
that is nobody's fault is no error: answers of 32k tokens and 60 GB of weights need no setting. The order of the deadlines matters: each
wait is longer than what it waits for may take with all of its attempts.

A worker is lost if its process or its engine ends, or misses its heartbeat; or if it fails to load weights that are on its node: an update
isn't done in update_s, fails or has no answer three times in a row, or its engine is dirty a fourth time before it has finished a group. A
worker is never lost because answers, rewards or weights on their way to its node are late.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from evenkeel.actors.config import SYNC_ATTEMPTS, DeadlinesConfig, RunConfig
from evenkeel.actors.settings.evaluation_places import evaluation_waves
from evenkeel.learner.config import LearnerConfig
from evenkeel.rollout.config import AgentReward, EnvironmentReward, RolloutConfig, TaskEntry
from evenkeel.rollout.engine_settings.engine_config import EngineConfig, EngineDeadlines

ANSWER_S = 60.0
"""Seconds in which a part answers a short call, in addition to the wait that the call asks for."""
LEAST_HAND_BACK_S = 10.0
"""Seconds that a worker which leaves has at least to hand back its groups: with routed experts long ones take seconds to read and send."""
# Tokens a second of the slowest learner over those of one answer at deadlines.tokens_per_s: it reads many sequences at once.
_LEARNER_PACE = 1000
# Bytes of a checkpoint over those of the model: weights, float32 master weights and two moments of Adam, and the Hugging Face folder.
_CHECKPOINT_COPIES = 8
# Seconds for new weights on their way to a node in addition to those for their bytes: network or object store may be busy with others.
_LEAST_TRAVEL_S = 60.0

# Seconds by which a collective's timeout exceeds the deadline of the driver's call that contains it: the call should time out first.
_BEYOND_S = 60.0
# Seconds by which the driver waits longer than its callee's own deadline, so that the callee's error arrives.
_ANSWERS_LATER_S = 30.0
# Upper bound of a token with its optional fields: the logprobs of a hundred likeliest tokens, its experts in a hundred layers, or a kept
# set of a thousand.
_TOKEN_BYTES = 4096
REPLACEMENT_PAUSE_S = 60.0
"""Longest pause before the service is replaced, or an engine of a pool that loses many while it works."""
KEEP_S = 600.0
"""Longest time to bring the batch of a skipped step from the object store to disk; the lines of later steps wait meanwhile."""


def engine_deadlines(config: RunConfig, model_bytes: int, largest_bucket: int) -> tuple[dict[str, float], float]:
    """Deadlines of each engine, and the timeout of its weight group, seconds.

    Args:
        model_bytes: of the weights.
        largest_bucket: bytes of the largest bucket of weights.
    """
    rollout, run, least = config.rollout, config.deadlines, EngineDeadlines()
    running, group = rollout.engine.max_running_requests, rollout.sampling.samples_per_group
    waves = 1 + -(-rollout.slots_per_worker * group // running)  # answers one after the other: those before it in its engine, and its own
    travel_s = model_bytes / run.bytes_per_s
    start_s = least.start_s + travel_s
    values = {
        "generate_s": max(least.generate_s, waves * _answer_s(config)),
        "control_s": least.control_s + travel_s / 5,
        "update_s": least.update_s + travel_s,
        "start_s": min(start_s, run.start_s / 2) if run.is_given("start_s") else start_s,
    }
    return values, EngineConfig().weight_group_timeout_s + largest_bucket / run.bytes_per_s


def run_deadlines(config: RunConfig, model_bytes: int) -> tuple[dict[str, float], float]:
    """Deadlines of the run, and the timeout of the ranks' collectives, seconds.

    Args:
        config: with those of its engines.
        model_bytes: of the weights.
    """
    run, rollout, least = config.deadlines, config.rollout, DeadlinesConfig()
    engine, travel_s = rollout.engine.deadlines, model_bytes / run.bytes_per_s
    start_s = run.start_s if run.is_given("start_s") else max(least.start_s, 2 * engine.start_s + travel_s)
    sync_s = max(least.sync_s, _LEAST_TRAVEL_S + travel_s + engine.update_s + 2 * engine.control_s)
    batch = config.groups_per_step * rollout.sampling.samples_per_group * rollout.sampling.max_tokens
    tokens = tokens_call_s(tokens_s(batch, run.bytes_per_s))
    trained = batch * config.learner.epochs_per_batch
    values = {
        "start_s": start_s,
        "sync_s": sync_s,
        "batch_s": max(least.batch_s, 2 * group_s(rollout, config.places) + start_s + SYNC_ATTEMPTS * sync_s, _ANSWERS_LATER_S + tokens),
        "step_s": max(least.step_s, trained / (_LEARNER_PACE * run.tokens_per_s)),
        "checkpoint_s": max(least.checkpoint_s, _CHECKPOINT_COPIES * travel_s),
        "evaluation_s": max(least.evaluation_s, _evaluation_s(config), group_s(rollout, config.places)),
    }
    return values, max(LearnerConfig().collective_timeout_s, _BEYOND_S + max(values["step_s"], values["checkpoint_s"]))


def _answer_s(config: RunConfig) -> float:
    return config.rollout.sampling.max_tokens / config.deadlines.tokens_per_s


def bytes_of(model: Path) -> int:
    """Bytes of a model folder's weights; 0 if there are none yet."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def scoring_s(rollout: RolloutConfig) -> float:
    """Longest wait for the rewards of a group: every completion of the worker's other groups may come first, and each take its deadline.
    With an environment: the longest time that it may take in a rollout, whose rewards it gives; twice, if the rollout is repeated. An agent
    may have to wait for the programs of the worker's other groups, and score itself."""
    return max(_scoring_s(rollout, entry) for entry in rollout.entries)


def _scoring_s(rollout: RolloutConfig, entry: TaskEntry) -> float:
    played_s = _played_s(rollout, entry)
    if isinstance(entry.reward, (EnvironmentReward, AgentReward)):
        return played_s
    return played_s + _in_turn(rollout, entry.reward.processes) * entry.reward.deadline_s + entry.reward.start_deadline_s


def _played_s(rollout: RolloutConfig, entry: TaskEntry) -> float:
    """Longest time that an environment or an agent takes of a rollout beside its engine's."""
    environment, agent = entry.environment, entry.agent
    if environment is not None:
        return 2 * (environment.max_tool_s + environment.deadline_s + environment.start_deadline_s)
    return 0.0 if agent is None else _in_turn(rollout, agent.processes) * agent.deadline_s + agent.start_deadline_s


def group_s(rollout: RolloutConfig, places: int) -> float:
    """Longest time for one group of a worker: sampled, in all of its turns, scored, handed over. Groups with an environment take no slot: a
    worker may hold all that there are, and each turn may have to wait for one of each of the others.

    Args: places: groups that admission allows outstanding.
    """
    by_then = -(-places // rollout.slots_per_worker)
    turns = max(1 if entry.environment is None else entry.environment.max_turns * by_then for entry in rollout.entries)
    return turns * rollout.engine.deadlines.generate_s + scoring_s(rollout) + ANSWER_S


def weights_fetch_s(config: RunConfig) -> float:
    """Longest time for one version's bytes to come to a worker's node: an attempt (sync_s) less the engine's own time; half of the attempt
    if a recipe's settings leave less than a fifth of it."""
    engine, sync_s = config.rollout.engine.deadlines, config.deadlines.sync_s
    left_s = sync_s - engine.update_s - 2 * engine.control_s
    return left_s if left_s >= sync_s / 5 else sync_s / 2


def newer_weights_s(step_s: float, sync_s: float) -> float:
    """Longest wait of a joining engine for the next version, if the present one was only broadcast. The learner's own deadlines, for a step
    and for publishing, are shorter."""
    return 2 * step_s + 4 * sync_s


def new_parts_s(start_s: float) -> float:
    """Longest wait for a new service in place of a lost one: the pause before it, and its start."""
    return REPLACEMENT_PAUSE_S + start_s


def tokens_s(tokens: int, bytes_per_s: float) -> float:
    """Longest time for so many tokens, or their wide fields, to come through the object store."""
    return ANSWER_S + tokens * _TOKEN_BYTES / bytes_per_s


def tokens_call_s(limit_s: float) -> float:
    """Wait for tokens that have `limit_s` to come: those that are late are known by then, unless the object store itself hangs."""
    return 2 * limit_s


def wide_fields_call_s(limit_s: float, step_s: float) -> float:
    """Wait for a rank that has `limit_s` to read wide fields; it may have to end another call first."""
    return limit_s + step_s


def flush_s(step_s: float) -> float:
    """Longest wait for a line of a step: its diagnostics, those of the step before, and a skipped batch that is kept."""
    return 2 * step_s + KEEP_S


def reading_s(disk_s: float, checkpoint_bytes: float, bytes_per_s: float) -> float:
    """Longest time to read a checkpoint: that of one that is written, by its own bytes if they are more."""
    return max(disk_s, 3 * checkpoint_bytes / bytes_per_s)


def _in_turn(rollout: RolloutConfig, processes: int) -> int:
    """Rollouts of a worker that one of its processes may have before a group's last, if all slots are full."""
    return -(-rollout.slots_per_worker * rollout.sampling.samples_per_group // processes)


def _evaluation_s(config: RunConfig) -> float:
    """Longest time for the questions of all tasks: in each wave of answers there may be some of the task that is played longest."""
    asked, rollout = config.evaluation, config.rollout
    waves = partial(
        evaluation_waves,
        samples=asked.samples,
        workers=rollout.fewest_workers,
        slots=rollout.slots_per_worker,
        samples_per_group=rollout.sampling.samples_per_group,
        running=rollout.engine.max_running_requests,
    )
    tasks = len(rollout.entries)
    between = min(asked.problems, asked.problems_between) if asked.every_steps else 0
    most = max(waves(tasks * asked.problems, is_fed=False), waves(tasks * between, is_fed=True))
    played_s = max(_played_s(rollout, entry) for entry in rollout.entries)
    return most * (_answer_s(config) + played_s) + scoring_s(rollout)


def bucket_s(config: RunConfig) -> float:
    """Longest time for the learner to send one bucket of a broadcast: what an engine gives a collective, and the time that the bytes take;
    never more than an engine has for a whole update. (sync_s would be far longer: it covers the whole sync.)"""
    engine = config.rollout.engine
    return min(engine.deadlines.update_s, engine.weight_group_timeout_s + config.weight_sync.bucket_bytes / config.deadlines.bytes_per_s)
