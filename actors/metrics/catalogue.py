"""The one catalogue of metrics: every number that a run shows is listed here once, with its unit, reduction and way of writing.

Names are paths: `group/quantity`. Durations, shares and token counts mostly end in their unit (_s, _share, _tokens). A family is a
declared prefix with its members ("learner/skipped_updates/" + a SkipReason); where users choose these it is open ("reward/component/",
"worker/tokens/"). What a number of the correction or the loss means stands in correction/diagnostics/quantities.py; its metric is made
from that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from evenkeel.actors.carriers import PoolFailure, ScalingCause
from evenkeel.correction.diagnostics.quantities import DIAGNOSTIC_FAMILIES, DIAGNOSTICS, LOSS_METRICS, NUMBER, Quantity, Unit
from evenkeel.correction.early_warning.monitor import SYMPTOMS, State
from evenkeel.learner.results import ParameterGroup, SkipReason


class Kind(StrEnum):
    """How a metric behaves over time."""

    GAUGE = "gauge"
    """A value of this step; it may rise and fall."""
    COUNTER = "counter"
    """A running total since the run began, restored on resume; its name ends in _total, that of a family in _total/."""
    HISTOGRAM = "histogram"
    """A family whose last part is an upper bound, and whose value counts what fell into that bucket in this step."""


class Reduction(StrEnum):
    """How values of several ranks or workers become one."""

    SUM = "sum"
    MEAN = "mean"
    """Weighted by what each part counted; from sums and counts, never a mean of means."""
    MAX = "max"
    MIN = "min"
    LAST = "last"
    """There is one source only."""


_PROMETHEUS_SUFFIX = {
    Unit.ONE: "",
    Unit.SECONDS: "_seconds",
    Unit.SHARE: "_ratio",
    Unit.NATS: "_nats",
    Unit.NATS_SQUARED: "_nats_squared",
    Unit.TOKENS: "_tokens",
    Unit.TOKENS_PER_SECOND: "_tokens_per_second",
    Unit.VERSIONS: "_versions",
    Unit.BYTES: "_bytes",
    Unit.TIMESTAMP: "_timestamp_seconds",
}
# Digits of rewards and accuracies, and of counters.
_SCORE, _WHOLE = ".3f", ",.0f"
# What the catalogue's own names end in, taken off before the suffix above is put on.
_NAME_SUFFIX = re.compile(r"(/tokens|_tokens_per_s|_share|_versions|_tokens|_bytes|_time_s|_s|_total)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Quantity):
    """One listed quantity of a run, or a family of them when the name ends in a slash or an underscore."""

    name: str
    kind: Kind
    reduction: Reduction
    """How values of several ranks or workers are combined. Documentation only: whoever records the metric combines them."""
    part: str = "part"
    """What the open part of a family names; the Prometheus label."""

    @property
    def is_family(self) -> bool:
        return self.name.endswith(("/", "_"))

    def has_member(self, last: str) -> bool:
        """Whether a family has a member whose name ends in `last`; one whose members users choose has any."""
        return not self.members or re.fullmatch(self.members, last) is not None

    @property
    def prometheus_name(self) -> str:
        """Conventional name: evenkeel_ prefix, base unit as suffix, _total on counters (the client library appends that)."""
        stem = _NAME_SUFFIX.sub("", self.name.rstrip("/_"))
        suffix = _PROMETHEUS_SUFFIX[self.unit]
        stem = re.sub(r"[^a-zA-Z0-9]+", "_", stem)
        return f"evenkeel_{stem}" if stem.endswith(suffix) else f"evenkeel_{stem}{suffix}"


def _of(quantity: Quantity, name: str, reduction: Reduction = Reduction.LAST, more: str = "", *, before: str = "") -> Metric:
    """A quantity that is declared elsewhere, as a gauge of that name.

    Args: more: a sentence that holds in a run alone. before: a word before its label, where a run shows it of other tokens as well.
    """
    return Metric(
        quantity.unit,
        f"{before} {quantity.label}".lstrip(),
        f"{quantity.help} {more}".rstrip(),
        quantity.of,
        name=name,
        kind=Kind.GAUGE,
        reduction=reduction,
        digits=quantity.digits,
        members=quantity.members,
    )


def _gauge(
    name: str, unit: Unit, reduction: Reduction, label: str, help: str, of: str = "", *, digits: str = "", members: Iterable[str] = ()
) -> Metric:
    """Args: members: of a family, the last parts of its members' names; none: users choose them."""
    return _of(Quantity(unit, label, help, of, digits, "|".join(members)), name, reduction)


def _score(name: str, unit: Unit, reduction: Reduction, label: str, help: str) -> Metric:
    """A reward or an accuracy."""
    return _gauge(name, unit, reduction, label, help, digits=_SCORE)


def _counter(name: str, label: str, help: str, unit: Unit = Unit.ONE, *, part: str = "part", members: Iterable[str] = ()) -> Metric:
    """Args: members: as for `gauge`."""
    names = "|".join(members)
    return Metric(unit, label, help, name=name, kind=Kind.COUNTER, reduction=Reduction.SUM, part=part, digits=_WHOLE, members=names)


def _histogram(name: str, unit: Unit, label: str, help: str) -> Metric:
    """A family by whole numbers, the last of which may be of all that is larger ("8+")."""
    return Metric(unit, label, help, name=name, kind=Kind.HISTOGRAM, reduction=Reduction.SUM, members=NUMBER + r"\+?")


def _by_worker(name: str, unit: Unit, reduction: Reduction, label: str, help: str) -> Metric:
    return Metric(unit, label, help, name=f"worker/{name}/", kind=Kind.GAUGE, reduction=reduction, part="worker")


def _by_k(name: str, label: str, help: str) -> Metric:
    return Metric(
        Unit.SHARE,
        label,
        help,
        name=f"held_out/{name}/",
        kind=Kind.GAUGE,
        reduction=Reduction.LAST,
        part="k",
        digits=_SCORE,
        members=NUMBER,
    )


def _of_tasks(name: str, unit: Unit, reduction: Reduction, label: str, help: str) -> Metric:
    """A family with a member for each of several tasks."""
    return replace(_score(name, unit, reduction, label, help), part="task")


_U, _R = Unit, Reduction
SKIPPED = "learner/skipped_updates/"
"""Family: updates of a step that were left out, by learner.results.SkipReason."""
_PROGRESS = [
    _gauge("step", _U.ONE, _R.LAST, "step", "Training steps finished."),
    _gauge(
        "weight_version",
        _U.ONE,
        _R.LAST,
        "weight version",
        "Version of the learner's weights: batches that they have had. weight_sync.every_steps says which are published.",
    ),
    _counter(
        "steps/skipped_total",
        "skipped updates",
        "Optimizer steps left out because loss or gradient was not finite, or because no token was left to learn from.",
    ),
    _counter(
        "steps/returns_total",
        "returns to a checkpoint",
        "Times that the run went back to its last checkpoint, engines staying up, because a part of it had died, usually a learner's rank.",
    ),
    _counter(
        "steps/overflowed_total",
        "overflowed updates",
        "Optimizer steps left out because a float16 gradient overflowed under the loss scale, which adapts; a few are usual.",
    ),
]
_TIME = [
    _gauge("time/elapsed_s", _U.SECONDS, _R.LAST, "elapsed", "Wall time since the run began, earlier parts of a resumed run included."),
    _gauge("time/step_s", _U.SECONDS, _R.LAST, "step time", "Wall time from the end of the last step to the end of this one."),
    _gauge(
        "time/generate_s",
        _U.SECONDS,
        _R.MEAN,
        "generate",
        "From a group's first request to its last answer, averaged over the batch's groups.",
    ),
    _gauge("time/reward_s", _U.SECONDS, _R.MEAN, "reward", "Scoring the answers of one group, averaged over the groups of the batch."),
    _gauge(
        "time/correct_s",
        _U.SECONDS,
        _R.LAST,
        "correct",
        "Computing the importance weights, rejection, veto and normalisers of the batch.",
    ),
    _gauge(
        "time/proximal_s",
        _U.SECONDS,
        _R.LAST,
        "proximal forward",
        "The learner's forward pass for proximal logprobs; absent when it isn't needed.",
    ),
    _gauge(
        "time/split_s",
        _U.SECONDS,
        _R.LAST,
        "split of the gap",
        "Splitting the gap of stale tokens into mismatch and staleness, where the correction needs it or by monitor.split_every: forward "
        "passes at earlier weights, and the copy of its weights that the learner keeps for later ones; absent on steps with neither.",
    ),
    _gauge(
        "time/train_s",
        _U.SECONDS,
        _R.MAX,
        "train",
        "Forward, backward and optimizer of the batch: in metrics.jsonl as the driver waits for it, at the ranks' endpoints their own.",
    ),
    _gauge(
        "time/sync_s",
        _U.SECONDS,
        _R.LAST,
        "weight sync",
        "From the hand-over of new weights until the last engine has confirmed them.",
    ),
    _gauge(
        "time/pause_s",
        _U.SECONDS,
        _R.MAX,
        "engine pause",
        "How long an engine stood still for a weight update, the longest of all engines: from its answer that it has stopped, which comes "
        "after the forward under way, until it is told to go on.",
    ),
    _gauge(
        "time/admission_s",
        _U.SECONDS,
        _R.MEAN,
        "admission",
        "From the end of the step before until the driver had tickets for the groups that took its places, averaged over these.",
    ),
    _gauge(
        "time/call_s",
        _U.SECONDS,
        _R.MEAN,
        "call for a group",
        "What a worker's call for a group took, there and back, without sampling and scoring it; mean of the step's finished groups.",
    ),
    _gauge(
        "time/checkpoint_s",
        _U.SECONDS,
        _R.LAST,
        "checkpoint",
        "Writing a checkpoint and its Hugging Face folder, while training goes on; absent on other steps.",
    ),
    _gauge("checkpoint/last_step", _U.ONE, _R.LAST, "last checkpoint", "Step of the newest checkpoint of this process; absent before it."),
    _gauge("checkpoint/last_time_s", _U.TIMESTAMP, _R.LAST, "last checkpoint", "When that checkpoint was whole."),
    _gauge("time/diagnose_s", _U.SECONDS, _R.LAST, "diagnose", "Computing the diagnostics of the batch; the learner does not wait for it."),
    _gauge(
        "time/driver_late_s",
        _U.SECONDS,
        _R.MAX,
        "driver late",
        "99th percentile of the delays of the driver's event loop in the step; what blocks the loop delays every call of the run.",
    ),
    _gauge(
        "time/service_late_s",
        _U.SECONDS,
        _R.MAX,
        "service late",
        "The same of the correction service, since the step whose diagnostics came before.",
    ),
    _gauge(
        "time/rollout_late_s",
        _U.SECONDS,
        _R.MAX,
        "rollout late",
        "The same of the rollout workers, which own the engines: the largest, each since its last answer. A worker's endpoint has its own.",
    ),
    _gauge(
        "wait/learner_s",
        _U.SECONDS,
        _R.MAX,
        "learner waits",
        "Time of the step in which the learner had no batch to train on; if it is long, rollouts are the bottleneck.",
    ),
    _gauge(
        "wait/handover_s",
        _U.SECONDS,
        _R.LAST,
        "hand-over",
        "The part of wait/learner_s after the driver had the batch's last group: correction, forward passes and calls.",
    ),
    _gauge(
        "wait/rollout_s",
        _U.SECONDS,
        _R.MEAN,
        "rollout waits",
        "Time of the step in which an engine had nothing to do: wait/rollout_share times the time of the step.",
    ),
    _gauge("wait/learner_share", _U.SHARE, _R.MAX, "learner waits", "Share of the step's time in which the learner waited for data."),
    _gauge(
        "wait/rollout_share",
        _U.SHARE,
        _R.MEAN,
        "rollout waits",
        "Share of their time in which engines had nothing to do, because admission let no new prompt start; "
        "all engines of the step together.",
    ),
    _gauge(
        "throughput/rollout_tokens_per_s",
        _U.TOKENS_PER_SECOND,
        _R.SUM,
        "rollout speed",
        "Response tokens sampled per second of wall time, all engines together: the sum of what each did between its last two reports, one "
        "a step.",
    ),
    _gauge(
        "throughput/learner_tokens_per_s",
        _U.TOKENS_PER_SECOND,
        _R.SUM,
        "learner speed",
        "Prompt and response tokens trained on per second of training time, all ranks together.",
    ),
]
_REWARD = [
    _score("reward/mean", _U.ONE, _R.MEAN, "reward", "Mean reward of the batch's valid trajectories."),
    _score(
        "reward/accuracy",
        _U.SHARE,
        _R.MEAN,
        "accuracy",
        "Share of the batch's valid trajectories whose reward is evaluation.correct_at or more. Held-out accuracy is the judge.",
    ),
    _score("reward/std", _U.ONE, _R.MEAN, "reward spread", "Standard deviation of the reward over the batch's valid trajectories."),
    _score(
        "reward/group_std",
        _U.ONE,
        _R.MEAN,
        "spread within groups",
        "Standard deviation of the reward inside a group, averaged over groups; at 0 all advantages are 0 and nothing is learnt.",
    ),
    _score(
        "reward/component/",
        _U.ONE,
        _R.MEAN,
        "reward part",
        "Mean of one named part of the reward; the reward is the sum of the parts.",
    ),
    _of_tasks("task/accuracy/", _U.SHARE, _R.MEAN, "accuracy", "Share of right answers among a task's valid trajectories of the batch."),
    _of_tasks("task/reward/", _U.ONE, _R.MEAN, "reward", "Mean reward of a task's valid trajectories of the batch."),
    _of_tasks("task/groups_share/", _U.SHARE, _R.MEAN, "groups", "Share of the batch's groups that are of the task."),
    _of_tasks("task/prompts_share/", _U.SHARE, _R.LAST, "prompts", "Share of new prompts that the task is given."),
    _of_tasks("task/epochs/", _U.ONE, _R.LAST, "passes", "Passes over a task's training questions; absent if they have no end."),
    _counter(
        "reward/exceptions_total",
        "trajectories not scored",
        "Trajectories whose reward function raised or whose answer the engine didn't finish; left out of baseline and loss.",
    ),
    _counter(
        "reward/timeouts_total",
        "reward time-outs",
        "Trajectories whose reward function ran past its deadline; left out of baseline and loss.",
    ),
]
_HELD_OUT = [
    _score(
        "held_out/accuracy",
        _U.SHARE,
        _R.LAST,
        "held-out accuracy",
        "Share of right answers among a held-out problem's scored ones (one, or evaluation.samples), averaged over the problems.",
    ),
    _score(
        "held_out/wilson_low",
        _U.SHARE,
        _R.LAST,
        "95 % from",
        "Lower end of the 95 % Wilson interval of the held-out accuracy; problems are its unit, not answers.",
    ),
    _score("held_out/wilson_high", _U.SHARE, _R.LAST, "95 % to", "Upper end of the 95 % Wilson interval of the held-out accuracy."),
    _of_tasks("held_out/task_accuracy/", _U.SHARE, _R.LAST, "held-out accuracy", "The held-out accuracy of one of several tasks."),
    _of_tasks("held_out/task_wilson_low/", _U.SHARE, _R.LAST, "95 % from", "Lower end of its 95 % Wilson interval."),
    _of_tasks("held_out/task_wilson_high/", _U.SHARE, _R.LAST, "95 % to", "Upper end of its 95 % Wilson interval."),
    _of_tasks("held_out/task_reward/", _U.ONE, _R.LAST, "held-out reward", "Mean reward of the scored answers to its held-out problems."),
    _by_k("pass_at", "pass@k", "Chance that at least one of k answers to a held-out problem is right, without bias (Chen et al. 2021)."),
    _by_k("pass_at_low", "95 % from", "Lower end of the 95 % Wilson interval of pass@k; problems are its unit."),
    _by_k("pass_at_high", "95 % to", "Upper end of the 95 % Wilson interval of pass@k."),
    _score("held_out/reward", _U.ONE, _R.LAST, "held-out reward", "Mean reward of the scored answers to held-out problems."),
    _gauge("held_out/problems", _U.ONE, _R.LAST, "problems", "Number of held-out problems asked."),
    _gauge("held_out/samples", _U.ONE, _R.LAST, "answers each", "Answers asked for of each held-out problem (evaluation.samples)."),
    _gauge(
        "held_out/unscored",
        _U.ONE,
        _R.LAST,
        "not scored",
        "Answers to held-out problems whose reward raised, timed out or never came; the accuracy leaves them out. 0 in a healthy run.",
    ),
    _gauge("held_out/weight_version", _U.ONE, _R.LAST, "weight version", "Version of the weights that answered."),
    _gauge("held_out/truncated_share", _U.SHARE, _R.LAST, "cut answers", "Share of held-out answers cut at max_tokens."),
    _gauge("held_out/response_tokens", _U.TOKENS, _R.LAST, "answer length", "Mean length of a held-out answer."),
    _gauge("held_out/turns", _U.ONE, _R.LAST, "turns", "Mean number of turns of a held-out answer: 1, and more by tools.", digits=".2f"),
    _gauge("held_out/seconds", _U.SECONDS, _R.LAST, "evaluation time", "Wall time of the evaluation; training goes on meanwhile."),
]
_STALENESS = [
    _of(DIAGNOSTICS["staleness_mean"], "staleness/mean", _R.MEAN),
    _of(DIAGNOSTICS["staleness_max"], "staleness/max", _R.MAX, "Admission keeps it at or below max_staleness."),
    _histogram("staleness/tokens/", _U.VERSIONS, "staleness", "Trained tokens by staleness."),
    _of(DIAGNOSTICS["mixed_version_share"], "staleness/mixed_version_share", _R.MEAN),
]
_PLACED_DIAGNOSTICS = {
    **{
        prefix + quantity: _of(DIAGNOSTICS[prefix + quantity], f"{group}/{name}", reduction, which, before=before)
        for prefix, group, which, before in (
            ("mismatch_", "mismatch", "Kernels, precision and routing alone.", ""),
            ("", "mismatch_and_staleness", "Of all trained tokens: mismatch and staleness together.", "overall"),
        )
        for quantity, name, reduction in (
            ("k1_kl", "k1", _R.MEAN),
            ("k3_kl", "k3", _R.MEAN),
            ("log_ratio_abs_max", "max_abs_log_ratio", _R.MAX),
            ("log_ratio_std", "log_ratio_std", _R.MEAN),
        )
    },
    **{
        quantity: _of(DIAGNOSTICS[quantity], name, reduction)
        for quantity, name, reduction in (
            ("rho_max", "rho/max", _R.MAX),
            ("ess_token", "rho/ess", _R.LAST),
            ("rejected_share", "rejection/rejected_share", _R.MEAN),
            ("rejected_by_veto", "rejection/vetoed_share", _R.MEAN),
            ("truncated_share", "rejection/truncated_share", _R.MEAN),
        )
    },
}
_PLACED_LOSS = {
    quantity: _of(LOSS_METRICS[quantity], f"learner/{name}", _R.MEAN)
    for quantity, name in (
        ("clip_share", "clip_share"),
        ("batch_drift_k3_kl", "drift_k3"),
        ("batch_drift_from_behavior_k3_kl", "drift_from_behavior_k3"),
    )
}
DIAGNOSTIC_PLACES: dict[str, str | None] = {
    **{quantity: metric.name for quantity, metric in _PLACED_DIAGNOSTICS.items()},
    "reference_kl": "learner/reference_kl",
    **dict.fromkeys(("drift_k3_kl", "drift_from_behavior_k3_kl", "staleness_mean", "staleness_max", "mixed_version_share")),
    "missing_share": None,
}
"""Diagnostics with a place of their own in the catalogue, by their name in correction.diagnostics.quantities; None: a run doesn't show it:
it has the loss's drift, over all passes, and STALENESS_PLACES, at steps that aren't diagnosed as well; and takes no answer without all
of its logprobs (rollout/engine/engine.py)."""
STALENESS_PLACES = {
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "mixed_version_share": "staleness/mixed_version_share",
}
"""Places of correction.diagnostics.batch_numbers.staleness_numbers, which a run makes of each group's facts."""
LOSS_PLACES: dict[str, str | None] = {
    **{quantity: metric.name for quantity, metric in _PLACED_LOSS.items()},
    "penalty_kl": "learner/reference_kl",
    **dict.fromkeys(("loss", "entropy", "batch_kept_share", "batch_broken_tokens")),
}
"""The same for the numbers of the loss. Loss and entropy are the StepResult's, kept and broken tokens those of the first passes."""


def _in_group(group: str, quantities: Mapping[str, Quantity], places: Mapping[str, str | None]) -> list[Metric]:
    """What has no place of its own, under its own name in the group."""
    return [_of(quantity, group + name) for name, quantity in quantities.items() if name not in places]


_CORRECTION = [*_PLACED_DIAGNOSTICS.values(), *_in_group("correction/", DIAGNOSTICS | DIAGNOSTIC_FAMILIES, DIAGNOSTIC_PLACES)]
_SYMPTOMS = [symptom.name for symptom in SYMPTOMS]
_STATES = ", ".join(f"{state.rank} {state}" for state in State)
_MONITOR = [
    _gauge(
        "monitor/level",
        _U.ONE,
        _R.MAX,
        "early warning",
        f"State of the worst symptom of the early warning: {_STATES}; docs/correction.md lists the symptoms.",
    ),
    _gauge(
        "monitor/rate_scale",
        _U.ONE,
        _R.MAX,
        "of the learning rate",
        "Factor on the learning rate that monitor.length_decay has come to, since answers grew long; absent without that setting.",
    ),
    _counter("monitor/watches_total/", "watches", "Times that a symptom became a watch.", members=_SYMPTOMS),
    _counter(
        "monitor/alarms_total/", "alarms", "Times that a symptom became an alarm; somebody should look at the run.", members=_SYMPTOMS
    ),
    _counter(
        "monitor/left_out_total",
        "steps not diagnosed",
        "Steps without diagnostics, because these take longer than a step and another one was waiting for its turn.",
    ),
]
_TRUE_ON_POLICY = [
    _gauge(
        "true_on_policy/tokens",
        _U.TOKENS,
        _R.SUM,
        "compared tokens",
        "Trained tokens of staleness 0, whose sampled and trained logprobs are compared bit by bit; absent unless true_on_policy is on.",
    ),
    _gauge(
        "true_on_policy/equal_share",
        _U.SHARE,
        _R.MEAN,
        "equal bits",
        "Share of those tokens whose two logprobs are the same bits; 1 is what the mode promises.",
    ),
    _gauge("true_on_policy/max_abs_difference", _U.NATS, _R.MAX, "largest difference", "Largest difference of those two logprobs."),
]
_LEARNER = [
    _of(LOSS_METRICS["loss"], "learner/loss", _R.SUM),
    _gauge("learner/grad_norm", _U.ONE, _R.LAST, "gradient norm", "Global L2 norm of the gradient before clipping."),
    _gauge("learner/loss_scale", _U.ONE, _R.LAST, "loss scale", "Factor on the loss of a float16 learner; halved when gradients overflow."),
    _gauge(
        "learner/group_grad_norm/",
        _U.ONE,
        _R.LAST,
        "gradient norm of",
        "L2 norm before clipping of the gradient of a group of parameters: embedding, attention, mlp, router, norms, lm_head.",
        members=ParameterGroup,
    ),
    _gauge("learner/learning_rate", _U.ONE, _R.LAST, "learning rate", "Learning rate of the step."),
    _of(LOSS_METRICS["entropy"], "learner/entropy", _R.MEAN),
    *_PLACED_LOSS.values(),
    _gauge(
        "learner/routing_agreement_share",
        _U.SHARE,
        _R.MEAN,
        "equal top k",
        "Share of tokens and layers in which the learner's routers would have chosen the experts that they were given.",
    ),
    _of(
        DIAGNOSTICS["reference_kl"],
        "learner/reference_kl",
        _R.MEAN,
        "With such a penalty at every step, else every learner.report_kl_every steps.",
    ),
    _gauge("learner/optimizer_steps", _U.ONE, _R.LAST, "optimizer steps", "Optimizer steps of the batch."),
    _gauge(
        SKIPPED,
        _U.ONE,
        _R.LAST,
        "updates left out",
        "Updates of the batch that were left out, by reason: not_finite (loss or gradient), overflow (float16), no_gradient (it was 0).",
        members=SkipReason,
    ),
    _gauge("learner/microbatches", _U.ONE, _R.SUM, "micro-batches", "Micro-batches of the batch, all ranks together."),
    *_in_group("loss/", LOSS_METRICS, LOSS_PLACES),
]
_LENGTH = [
    _gauge(
        "length/sampled_tokens",
        _U.TOKENS,
        _R.MEAN,
        "sampled answers",
        "Mean response length of all answers finished since the last step.",
    ),
    _gauge(
        "length/trained_tokens",
        _U.TOKENS,
        _R.MEAN,
        "trained answers",
        "Mean response length of the answers that were trained on; if it is below length/sampled_tokens, long answers get lost.",
    ),
    _gauge("length/max_tokens", _U.TOKENS, _R.MAX, "longest answer", "Longest response of the batch."),
    _gauge(
        "length/truncated_share",
        _U.SHARE,
        _R.MEAN,
        "cut answers",
        "Share of the batch's answers cut at max_tokens or the context length.",
    ),
    _gauge(
        "length/kept_set_tokens",
        _U.TOKENS,
        _R.MEAN,
        "kept set",
        "Tokens among which top_p, top_k and min_p let one be drawn, mean of the batch's tokens; one drawn from all counts as 0. Each has "
        "four bytes.",
    ),
]
_TURNS = [
    _gauge("turns/mean", _U.ONE, _R.MEAN, "turns", "Mean number of turns of a rollout by an environment or agent.", digits=".2f"),
    _gauge("turns/max", _U.ONE, _R.MAX, "most turns", "Most turns of a rollout of the batch."),
    _gauge("turns/sequences", _U.ONE, _R.MEAN, "sequences", "Mean number of a rollout's sequences: 1, and its branches."),
    _gauge("turns/read_tokens", _U.TOKENS, _R.MEAN, "read tokens", "Mean number of tokens that the model read between its turns."),
    _gauge("turns/tool_s", _U.SECONDS, _R.MEAN, "tool time", "Mean time that its environment, or its agent's own work, took in a rollout."),
    _gauge("turns/tool_calls", _U.ONE, _R.MEAN, "tool calls", "Mean number of calls of an environment's tools in a rollout.", digits=".2f"),
    _gauge("turns/tool_errors", _U.ONE, _R.MEAN, "tool errors", "Mean number of those that gave the model an error to read.", digits=".2f"),
]
_GROUPS = [
    _gauge(
        "groups/all_correct",
        _U.ONE,
        _R.SUM,
        "groups all correct",
        "Groups of the batch whose answers all got the same reward, of evaluation.correct_at or more: no gradient.",
    ),
    _gauge(
        "groups/all_wrong",
        _U.ONE,
        _R.SUM,
        "groups all wrong",
        "Groups of the batch whose answers all got the same reward, below evaluation.correct_at: no gradient.",
    ),
    _gauge(
        "groups/no_gradient_share",
        _U.SHARE,
        _R.MEAN,
        "groups without gradient",
        "Share of the groups finished since the last step whose rewards are all alike (with advantage.level: turn, those of turns); those "
        "that dynamic sampling replaces count as well.",
    ),
    _counter(
        "files/failures_total",
        "failed writes",
        "Writes into the run folder that the disk did not take. Lines wait in memory; absent while there was none.",
    ),
    _gauge("groups/finished", _U.ONE, _R.LAST, "finished groups", "Finished groups that are in no batch yet."),
    _gauge(
        "groups/outstanding",
        _U.ONE,
        _R.LAST,
        "outstanding groups",
        "Groups that were started, and neither trained on nor discarded yet; at most (max_staleness + 1) * groups_per_step.",
    ),
    _counter("groups/refilled_total", "groups refilled", "Groups without gradient that dynamic sampling replaced by new ones."),
    _counter("groups/admitted_total", "groups admitted", "Groups whose sampling was started."),
    _counter("groups/trained_total", "groups trained", "Groups trained on; those of a skipped step count too."),
    _counter("groups/discarded_total", "groups discarded", "Groups discarded, for whatever reason."),
    _counter("groups/lost_total", "lost groups", "Finished groups whose tokens could not be read, and which were sampled again."),
    _counter("groups/failed_total", "failed groups", "Groups discarded because no worker could sample them."),
    _counter("groups/invalid_total", "invalid groups", "Groups discarded because fewer than two of their trajectories were valid."),
]
_ROLLOUT = [
    _counter("service/replaced_total", "replaced services", "Times that the correction service was replaced, because it had died."),
    _gauge("pool/workers", _U.ONE, _R.LAST, "rollout workers", "Rollout workers whose engine is up, at the end of the step's training."),
    _gauge(
        "pool/current_workers",
        _U.ONE,
        _R.LAST,
        "current workers",
        "Those of them that held the newest weights by then, before the step's own went out: all, unless one is slower than a step.",
    ),
    _gauge(
        "pool/target_workers",
        _U.ONE,
        _R.LAST,
        "wanted workers",
        "Rollout workers that the run wants: the configured number, or what the load has led to (rollout.max_workers).",
    ),
    _counter(
        "pool/scaled_total/",
        "changes of size",
        "Times that the load changed the wanted number of rollout workers, by cause.",
        part="cause",
        members=ScalingCause,
    ),
    _counter(
        "pool/failures_total/",
        "failures in the pool",
        "Engines lost, starts that failed, requests without a usable answer, workers out of reach, by kind; each is dealt with.",
        part="kind",
        members=PoolFailure,
    ),
    _gauge(
        "pool/slots",
        _U.ONE,
        _R.SUM,
        "slots",
        "Groups that the workers whose engines are up may have under way at a time, not counting those in environments.",
    ),
    _gauge("pool/used_slots", _U.ONE, _R.SUM, "used slots", "Of these, those taken as the step's training ended."),
    _gauge("pool/groups_without_slot", _U.ONE, _R.SUM, "groups in environments", "Groups under way by then that take no slot."),
    _gauge("pool/waiting_groups", _U.ONE, _R.LAST, "waiting groups", "Groups that no worker had taken by then."),
    _gauge(
        "pool/waiting_answers",
        _U.ONE,
        _R.LAST,
        "waiting questions",
        "Answers to questions of evaluations that no worker had taken by then.",
    ),
    _counter(
        "pool/handed_back_total",
        "groups handed back",
        "Groups that a worker which left, or whose engine failed, handed back; others went on.",
    ),
    _counter("pool/handed_back_tokens_total", "tokens handed back", "Response tokens of those groups, sampled before.", _U.TOKENS),
    _gauge("sync/receipts", _U.ONE, _R.SUM, "receipts", "Engines that confirmed the newest weights."),
    _gauge("sync/bytes", _U.BYTES, _R.SUM, "weight bytes", "Bytes of weights handed over in the sync, to all engines together."),
    _gauge("sync/read_again_tokens", _U.TOKENS, _R.SUM, "read again", "Tokens that engines prefilled again after an update (retract)."),
    _gauge(
        "sync/probe_max_abs_difference",
        _U.NATS,
        _R.MAX,
        "probe difference",
        "Largest logprob difference between engine and learner on the probe, a fixed prompt, after a weight sync.",
    ),
    _counter("sync/failures_total", "failed syncs", "Failed weight updates: no work for the engine until it had taken all weights again."),
    _counter("rollout/generated_tokens_total", "generated tokens", "Response tokens sampled.", _U.TOKENS),
    _counter("rollout/finished_groups_total", "finished groups", "Groups finished, scored or not."),
    _gauge("rollout/requests_in_flight", _U.ONE, _R.SUM, "requests in flight", "Requests that an engine is working on."),
    _gauge("rollout/weight_version", _U.ONE, _R.MIN, "engine's weight version", "Version of the weights that the engine holds."),
    _gauge("rollout/last_sync_time_s", _U.TIMESTAMP, _R.MIN, "last weight sync", "When the engine last took new weights."),
]
_WORKER = [
    _by_worker(
        "tokens",
        _U.TOKENS,
        _R.SUM,
        "tokens by worker",
        "Response tokens of the groups that the worker finished since the last step; over workers and steps they sum to the total.",
    ),
    _by_worker("groups", _U.ONE, _R.SUM, "groups by worker", "Groups that the worker finished since the last step."),
    _by_worker(
        "wait_share",
        _U.SHARE,
        _R.MEAN,
        "worker waits",
        "Share of the worker's time since it was asked last in which its engine had no request.",
    ),
    _by_worker(
        "weight_version",
        _U.ONE,
        _R.MIN,
        "worker's version",
        "Version that the worker held at the end of the step's training, before the step's own went out; absent while it holds none.",
    ),
]
CATALOGUE: dict[str, Metric] = {
    metric.name: metric
    for section in (
        _PROGRESS,
        _TIME,
        _REWARD,
        _HELD_OUT,
        _STALENESS,
        _CORRECTION,
        _MONITOR,
        _TRUE_ON_POLICY,
        _LEARNER,
        _LENGTH,
        _TURNS,
        _GROUPS,
        _ROLLOUT,
        _WORKER,
    )
    for metric in section
}
COUNTERS = [
    name
    for metric in CATALOGUE.values()
    if metric.kind is Kind.COUNTER
    for name in ([metric.name + part for part in metric.members.split("|")] if metric.is_family else [metric.name])
]
"""Every counter, that of each member of a family: all have a value from a run's start on, so that the first increase is one."""
