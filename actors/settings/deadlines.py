"""Derives deadlines from answer length, token rate, model size and byte rate, and lists all that a run has.

A deadline that a recipe sets stays; the others grow with the run, so that a long wait that is nobody's fault is no error: answers of 32k
tokens and 60 GB of weights need no setting. The order of the deadlines matters: each wait is longer than what it waits for may take with
all of its attempts.

A worker is lost if its process or its engine ends, or misses its heartbeat; or if it fails to load weights that are on its node: an update
isn't done in update_s, fails or has no answer three times in a row, or its engine is dirty a fourth time before it has finished a group. A
worker is never lost because answers, rewards, the queue or weights on their way to its node are late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.config import SYNC_ATTEMPTS, DeadlinesConfig, RunConfig
from actors.settings.derived import with_derived
from actors.settings.evaluation_places import evaluation_waves
from correction.settings.base import Settings
from learner.config import LearnerConfig
from rollout.config import ExactMatchReward, FunctionReward, MathVerifyReward, ReasoningGymReward, RolloutConfig
from rollout.engine_settings.engine_config import EngineConfig, EngineDeadlines

ANSWER_S = 60.0
"""Seconds in which a part answers a short call, in addition to the wait that the call asks for."""
_LEARNER_PACE = 1000
"""Tokens a second of the slowest learner over those of one answer at deadlines.tokens_per_s: it reads many sequences at once."""
_CHECKPOINT_COPIES = 8
"""Bytes of a checkpoint over those of the model: weights, float32 master weights and two moments of Adam, and the Hugging Face folder."""
_LEAST_TRAVEL_S = 60.0
"""Seconds for new weights on their way to a node in addition to those for their bytes: network or object store may be busy with others."""

_BEYOND_S = 60.0
"""Seconds by which a collective's timeout exceeds the deadline of the driver's call that contains it: the call should time out first."""
_ANSWERS_LATER_S = 30.0
"""Seconds by which the driver waits longer than its callee's own deadline, so that the callee's error arrives."""
_TOKEN_BYTES = 4096
"""Upper bound of a token with its optional fields: the logprobs of a hundred likeliest tokens, or its experts in a hundred layers."""
REPLACEMENT_PAUSE_S = 60.0
"""Longest pause before the service is replaced, or an engine of a pool that loses many while it works."""
KEEP_S = 600.0
"""Longest time to bring the batch of a skipped step from the object store to disk; the lines of later steps wait meanwhile."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes and rates from which a run's deadlines are derived."""

    answer_tokens: int
    """Longest answer."""
    tokens_per_s: float
    bytes_per_s: float
    waves: int
    """Most answers one after the other until a request is done: those before it in its engine, and its own."""
    scored_in_turn: int
    """Most completions that a scoring process has to score one after the other until a group is scored."""
    reward_s: float
    """Longest time to score one completion."""
    batch_tokens: int
    """Tokens of a training batch's answers."""
    passes: int
    """How often a batch is trained on."""
    evaluation_waves: int
    """Most answers one after the other until an evaluation is done, on all questions or during training, whichever takes longer."""

    @classmethod
    def of(cls, config: RunConfig) -> Scale:
        rollout = config.rollout
        group, running = rollout.sampling.samples_per_group, rollout.engine.max_running_requests
        return cls(
            answer_tokens=rollout.sampling.max_tokens,
            tokens_per_s=config.deadlines.tokens_per_s,
            bytes_per_s=config.deadlines.bytes_per_s,
            waves=1 + -(-rollout.slots_per_worker * group // running),
            scored_in_turn=_scored_in_turn(rollout),
            reward_s=rollout.reward.deadline_s,
            batch_tokens=config.groups_per_step * group * rollout.sampling.max_tokens,
            passes=config.learner.epochs_per_batch,
            evaluation_waves=_evaluation_waves(config),
        )


@dataclass(frozen=True, slots=True)
class Deadline:
    """One line of the table."""

    key: str
    """Dotted, as in a recipe; empty for one that is no setting."""
    seconds: float | None
    """None: there is no limit."""
    what: str
    """What it bounds, and how it was found."""
    is_set: bool = False


def with_deadlines(config: RunConfig, model_bytes: int) -> RunConfig:
    """The same run with every deadline that isn't set derived."""
    run, engine = _values(config, model_bytes)
    rollout, deadlines = config.rollout, with_derived(config.deadlines, run, "deadlines")
    collective_s = max(config.learner.as_given().collective_timeout_s, _BEYOND_S + max(deadlines.step_s, deadlines.checkpoint_s))
    of_engine = with_derived(rollout.engine.deadlines, engine, "rollout.engine.deadlines")
    engine_config = rollout.engine.model_copy(update={"deadlines": of_engine})
    return config.model_copy(
        update={
            "deadlines": deadlines,
            "learner": with_derived(config.learner, {"collective_timeout_s": collective_s}, "learner"),
            "rollout": rollout.model_copy(update={"engine": engine_config}),
        }
    )


def bytes_of(model: Path) -> int:
    """Bytes of a model folder's weights; 0 if there are none yet."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def scoring_s(rollout: RolloutConfig) -> float:
    """Longest wait for the rewards of a group: every completion of the worker's other groups may come first, and each take its deadline."""
    return _scored_in_turn(rollout) * rollout.reward.deadline_s + rollout.reward.start_deadline_s


def group_s(rollout: RolloutConfig) -> float:
    """Longest time for one group of a worker: sampled, scored, handed over."""
    return rollout.engine.deadlines.generate_s + scoring_s(rollout) + ANSWER_S


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


def _batch_tokens_s(scale: Scale) -> float:
    return tokens_s(scale.batch_tokens, scale.bytes_per_s)


def _scored_in_turn(rollout: RolloutConfig) -> int:
    """Completions of a worker that one of its scoring processes may have before a group's last, if all slots are full."""
    return -(-rollout.slots_per_worker * rollout.sampling.samples_per_group // rollout.reward.processes)


def _evaluation_waves(config: RunConfig) -> int:
    asked, rollout = config.evaluation, config.rollout
    waves = partial(
        evaluation_waves,
        samples=asked.samples,
        workers=rollout.fewest_workers,
        slots=rollout.slots_per_worker,
        samples_per_group=rollout.sampling.samples_per_group,
        running=rollout.engine.max_running_requests,
    )
    between = min(asked.problems, asked.problems_between) if asked.every_steps else 0
    return max(waves(asked.problems, is_fed=False), waves(between, is_fed=True))


def bucket_s(config: RunConfig) -> float:
    """Longest time for the learner to send one bucket of a broadcast: what an engine gives a collective, and the time that the bytes take;
    never more than an engine has for a whole update. (sync_s would be far longer: it covers the whole sync.)"""
    engine = config.rollout.engine
    return min(engine.deadlines.update_s, engine.weight_group_timeout_s + config.weight_sync.bucket_bytes / config.deadlines.bytes_per_s)


_SECTIONS: Mapping[type[Settings], str] = {
    DeadlinesConfig: "deadlines",
    **dict.fromkeys((ReasoningGymReward, MathVerifyReward, ExactMatchReward, FunctionReward), "rollout.reward"),
    EngineConfig: "rollout.engine",
    EngineDeadlines: "rollout.engine.deadlines",
    LearnerConfig: "learner",
}


def table(config: RunConfig, model_bytes: int) -> list[Deadline]:
    """The deadlines that a run would have; one that contains another comes after it."""
    whole = with_deadlines(config, model_bytes)
    scale, run, engine, rollout = Scale.of(config), whole.deadlines, whole.rollout.engine.deadlines, whole.rollout
    sglang, ranks, reward, tokens = rollout.engine, whole.learner, rollout.reward, _batch_tokens_s(scale)
    bucket = f"{config.weight_sync.bucket_bytes / 1e9:.3g} GB"
    checkpoint_bytes = _CHECKPOINT_COPIES * model_bytes
    size, rate = f"{model_bytes / 1e9:.3g} GB", f"{run.bytes_per_s / 1e6:.4g} MB/s"

    def of(section: Settings, name: str, what: str) -> Deadline:
        seconds, key = getattr(section, name), f"{_SECTIONS[type(section)]}.{name}"
        return Deadline(key, seconds, what, name in section.model_fields_set)

    return [
        of(engine, "heartbeat_s", "an engine that answers no probe for this long is lost; so is one that fails to take weights"),
        of(run, "part_heartbeat_s", "the same of queue, service and learner ranks; for a rank the run goes back to its last checkpoint"),
        Deadline("", run.driver_s, "a sign of life of the run's process, with --retries; if late, the next attempt takes its place"),
        of(engine, "generate_s", f"one answer: {scale.waves} x {scale.answer_tokens} tokens at {run.tokens_per_s:g} a second"),
        of(reward, "start_deadline_s", "start of a scoring process, imports included; if late, what it was to score has failed"),
        of(reward, "deadline_s", "the reward of one completion; if late, its process is ended, and the answer counts as failed"),
        Deadline("", scoring_s(rollout), f"rewards of a group: {scale.scored_in_turn} completions before it, {scale.reward_s:g} s each"),
        Deadline("", group_s(rollout), "a group: answer, rewards and the way to the queue; if late, another worker samples it"),
        of(engine, "control_s", f"specs, checksums, scores of an engine: {size} at five times {rate}"),
        of(sglang, "weight_group_timeout_s", "joining a weight group, or one broadcast of it, in an engine; if late, that has failed"),
        Deadline("", bucket_s(whole), f"one bucket of a broadcast, in the learner: {bucket} more at {rate}; if late, the group is closed"),
        of(engine, "update_s", f"a weight update in the engine: {size} at {rate}; if late, the engine is lost"),
        Deadline("", weights_fetch_s(whole), "new weights on their way to a node; if late, the run says so and asks for them again"),
        of(run, "sync_s", "one attempt at new weights: their way to the node, the update, the checksums"),
        Deadline("", run.receipts_s, f"receipts of all workers: {SYNC_ATTEMPTS} attempts and their pauses"),
        of(engine, "start_s", "an engine's start, with the weights on disk"),
        of(engine, "shutdown_s", "the end of an engine's processes"),
        of(run, "start_s", "start of a worker that has a node; wait for the ranks' nodes; start of the ranks; loading the questions"),
        Deadline("", new_parts_s(run.start_s), "a new service in place of a lost one; if late, the run goes back"),
        Deadline("", tokens, f"a batch's tokens on their way to the service: {scale.batch_tokens}; late groups are sampled again"),
        Deadline("", tokens_call_s(tokens), "the object store's answer about these tokens: twice as long; if late, the run goes back"),
        of(run, "batch_s", "a batch without a finished group: two groups in turn, and a new worker between them; or its tokens"),
        of(run, "step_s", f"an optimizer step: {scale.passes} x {scale.batch_tokens} tokens at {_LEARNER_PACE * run.tokens_per_s:g}/s"),
        Deadline("", wide_fields_call_s(tokens, run.step_s), "wide fields of a batch in a rank: as its tokens, plus the call before"),
        Deadline("", flush_s(run.step_s), "lines of the last steps: diagnostics of two, and a skipped batch that is kept"),
        Deadline("", newer_weights_s(run.step_s, run.sync_s), "an engine that joins: the next weights, if these were broadcast only"),
        of(run, "checkpoint_s", f"a checkpoint on disk: {_CHECKPOINT_COPIES} x {size} at {rate}"),
        Deadline("", run.disk_s, "the run folder's disk, until all that waits for it is written: three times a checkpoint's"),
        Deadline("", reading_s(run.disk_s, checkpoint_bytes, run.bytes_per_s), "reading a checkpoint: as long, or as its size needs"),
        of(ranks, "collective_timeout_s", f"a collective of the learner's ranks: {_BEYOND_S:.0f} s more than a step or a checkpoint"),
        of(run, "evaluation_s", f"an evaluation: {scale.evaluation_waves} answers in turn, and rewards; if late, it is left out"),
        of(run, "drain_s", "groups of a rollout worker that leaves; it hands the rest back"),
        of(run, "no_workers_s", "no rollout worker that could work; if late, the run ends"),
    ]


def as_text(deadlines: list[Deadline]) -> str:
    """One line for each: its seconds or "none", its key, what it bounds."""
    width = max(len(line.key) for line in deadlines)
    times = ("none" if line.seconds is None else f"{line.seconds:.0f} s" for line in deadlines)
    pairs = zip(times, deadlines, strict=True)
    rows = (f"{time:>11}  {line.key:<{width}}  {line.what}{' (set)' if line.is_set else ''}" for time, line in pairs)
    return "\n".join(rows)


def inversions(config: RunConfig) -> list[str]:
    """One sentence for each deadline set in the recipe that is not longer than what it waits for may take."""
    run, sglang, ranks = config.deadlines, config.rollout.engine, config.learner
    engine = sglang.deadlines
    tokens = tokens_call_s(_batch_tokens_s(Scale.of(config)))
    parts = {group_s(config.rollout): "one group (answer, rewards, queue)", tokens: "the way of its tokens"}
    pairs = [
        ("deadlines.batch_s", run.batch_s, parts[max(parts)], max(parts)),
        ("deadlines.sync_s", run.sync_s, "rollout.engine.deadlines.update_s", engine.update_s),
        ("deadlines.start_s", run.start_s, "rollout.engine.deadlines.start_s", engine.start_s),
        ("deadlines.evaluation_s", run.evaluation_s, "rollout.engine.deadlines.generate_s", engine.generate_s),
    ]
    if ranks.world_size > 1:
        pairs.append(("learner.collective_timeout_s", ranks.collective_timeout_s, "deadlines.step_s", run.step_s))
    if config.weight_sync.transport == "broadcast":
        group = "rollout.engine.weight_group_timeout_s"
        pairs.append(("rollout.engine.deadlines.update_s", engine.update_s, group, sglang.weight_group_timeout_s))
    return [
        f"{key} = {seconds:.0f} s leaves no time beyond {part}, which may take {part_s:.0f} s: it ends what is only slow. "
        "Raise it, or set it to null"
        for key, seconds, part, part_s in pairs
        if seconds <= part_s
    ]


def _values(config: RunConfig, model_bytes: int) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Deadlines of the run and of each engine, seconds. A deadline set in the recipe is used where others are derived from it."""
    scale = Scale.of(config)
    least, floor = config.deadlines.as_given(), config.rollout.engine.deadlines.as_given()
    answer_s, travel_s = scale.answer_tokens / scale.tokens_per_s, model_bytes / scale.bytes_per_s
    tokens = _batch_tokens_s(scale)
    engine = {
        "generate_s": max(floor.generate_s, scale.waves * answer_s),
        "control_s": floor.control_s + travel_s / 5,
        "update_s": floor.update_s + travel_s,
        "start_s": floor.start_s + travel_s,
    }
    own = with_derived(floor, engine, "rollout.engine.deadlines")
    rollout = config.rollout.model_copy(update={"engine": config.rollout.engine.model_copy(update={"deadlines": own})})
    first = {
        "sync_s": max(least.sync_s, _LEAST_TRAVEL_S + travel_s + own.update_s + 2 * own.control_s),
        "start_s": max(least.start_s, 2 * own.start_s + travel_s),
    }
    known = with_derived(least, first, "deadlines")
    sync_s, start_s = known.sync_s, known.start_s
    evaluation_s = scale.evaluation_waves * answer_s + scoring_s(rollout)
    run = {
        "sync_s": sync_s,
        "start_s": start_s,
        "batch_s": max(least.batch_s, 2 * group_s(rollout) + start_s + SYNC_ATTEMPTS * sync_s, _ANSWERS_LATER_S + tokens_call_s(tokens)),
        "step_s": max(least.step_s, scale.batch_tokens * scale.passes / (_LEARNER_PACE * scale.tokens_per_s)),
        "checkpoint_s": max(least.checkpoint_s, _CHECKPOINT_COPIES * travel_s),
        "evaluation_s": max(least.evaluation_s, evaluation_s, group_s(rollout)),
    }
    return run, engine
