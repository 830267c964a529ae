"""The curves of a run, by title: which metrics, on which axis, and what to look at."""

from __future__ import annotations

from dataclasses import dataclass

from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.metrics.step_metrics import lookup
from evenkeel.correction.diagnostics.quantities import Unit


@dataclass(frozen=True, slots=True)
class Curves:
    """A plot of metrics over steps."""

    title: str
    names: tuple[str, ...]
    y_label: str
    """Empty: the unit of the metrics."""
    caption: str
    is_logarithmic: bool = False
    is_count: bool = False
    """A count of a few things: drawn from 0 on, and without a running mean, which would be of what there never was."""

    @property
    def unit(self) -> Unit:
        first = self.names[0]
        return (CATALOGUE.get(first) or lookup(first)).unit


CURVES = (
    Curves(
        "Reward",
        ("reward/mean", "reward/accuracy"),
        "of the batch",
        "Mean reward, and accuracy: the share of answers that are right (evaluation.correct_at). Where one rises and the other doesn't, "
        "something else than right answers is rewarded. Both are of training prompts at the sampling temperature; held-out accuracy is the "
        "judge.",
    ),
    Curves(
        "Parts of the reward",
        ("reward/component/",),
        "mean of each part",
        "The reward is the sum of its parts. Where one part rises while another falls, you see what the policy really learns.",
    ),
    Curves(
        "Accuracy by task",
        ("task/accuracy/",),
        "of the batch",
        "Share of right answers in each task's groups of the batch. One that falls while another rises is being forgotten: give it more "
        "weight.",
    ),
    Curves(
        "Prompts by task",
        ("task/prompts_share/",),
        "share of new prompts",
        "What weights by step, and solve rates where they count, give each task.",
    ),
    Curves(
        "k3 KL from behaviour to proximal policy",
        ("mismatch/k3", "mismatch_and_staleness/k3"),
        "nats a token",
        "Tokens of staleness 0, which not every step has, show the mismatch of the engines at equal weights: it should be flat and low. "
        "All tokens carry staleness as well. A rise over the run is the early sign of a collapse.",
        is_logarithmic=True,
    ),
    Curves(
        "Spread of the log-ratio",
        ("mismatch/log_ratio_std", "mismatch_and_staleness/log_ratio_std", "mismatch_and_staleness/max_abs_log_ratio"),
        "",
        "Standard deviation of log pi_prox - log mu, and its largest absolute value. Single tokens do harm long before the mean shows it.",
        is_logarithmic=True,
    ),
    Curves(
        "Entropy",
        ("learner/entropy",),
        "nats a token",
        "A slow fall is learning; a fall to nearly 0 while the reward is still low means that exploration ended too early.",
    ),
    Curves(
        "Gradient norm",
        ("learner/grad_norm",),
        "L2 norm before clipping",
        "Single peaks are clipped and do no harm; a steady rise, above all together with the k3 KL, does.",
    ),
    Curves(
        "Throughput",
        ("throughput/rollout_tokens_per_s", "throughput/learner_tokens_per_s"),
        "",
        "Rollouts count sampled tokens over wall time, the learner prompt and response tokens over its training time.",
    ),
    Curves(
        "Share of time that each side waits",
        ("wait/rollout_share", "wait/learner_share"),
        "share of the step",
        "The side that never waits is the bottleneck: give it more machines. Both high at once: look at weight sync and rewards.",
    ),
    Curves(
        "Length of sampled and of trained answers",
        ("length/sampled_tokens", "length/trained_tokens"),
        "",
        "The two should lie together. Trained answers shorter than sampled ones mean that long answers get lost on the way.",
    ),
    Curves(
        "Answers cut off",
        ("length/truncated_share",),
        "share of the batch",
        "Answers that were cut at max_tokens. If there are many, the policy learns to be short, whatever the task: raise max_tokens. If "
        "nearly all are from the first step on, the model may know no end of an answer.",
    ),
    Curves(
        "What the correction took away",
        ("rejection/rejected_share", "rejection/vetoed_share", "rejection/truncated_share", "learner/clip_share"),
        "",
        "Of the trained tokens: rejected, in a vetoed sequence, stopped by the trust region. Of the importance weights: cut to their "
        "bound. Well below a tenth is usual.",
    ),
    Curves(
        "Groups without gradient",
        ("groups/all_correct", "groups/all_wrong"),
        "groups of the batch",
        "Answers of these groups all got the same reward: nothing is learnt from them. Many all wrong: the task is too hard; many all "
        "correct: too easy.",
    ),
    Curves(
        "Where the time goes",
        ("time/step_s", "time/generate_s", "time/train_s", "time/sync_s"),
        "",
        "In asynchronous training the step should be about as long as the longer of generating and training, not as both together.",
    ),
)

STALENESS = "staleness/tokens/"

CORRECTION_CURVES = (
    Curves(
        "Rejected by criterion",
        ("correction/rejected_by_", "rejection/vetoed_share"),
        "share of trained tokens",
        "What each criterion drops by itself; a token may be outside several.",
    ),
    Curves(
        "Rejected by side",
        (
            "correction/rejected_positive_share",
            "correction/rejected_negative_share",
            "correction/clipped_positive_share",
            "correction/clipped_negative_share",
        ),
        "share of such tokens",
        "Of the tokens with a positive and with a negative advantage. Where one side loses more than the other, the balance shifts.",
    ),
    Curves(
        "Importance weights",
        ("correction/importance_weight_mean", "correction/importance_weight_ess", "rho/ess"),
        "",
        "Mean weight of the kept tokens, and their effective sample size as a share: how many equally weighted tokens would say as much.",
    ),
    Curves(
        "Largest ratio and weight",
        ("rho/max", "correction/importance_weight_max", "correction/target_rho_max"),
        "",
        "The largest of the batch; the weights' bound shows as a ceiling.",
        is_logarithmic=True,
    ),
)
POOL_CURVES = (
    Curves(
        "Rollout workers",
        ("pool/workers", "pool/current_workers", "pool/target_workers"),
        "workers",
        "How many are up, hold the newest weights, and are wanted. Up below wanted for long: machines don't come, or engines fail.",
        is_count=True,
    ),
    Curves(
        "Groups under way",
        ("groups/outstanding", "groups/finished"),
        "groups",
        "Admitted and not yet trained or discarded; of these, finished ones that wait for a batch.",
    ),
    Curves(
        "Staleness",
        ("staleness/mean", "staleness/max"),
        "versions",
        "Versions between sampling a token and training on it.",
        is_count=True,
    ),
    Curves(
        "Weights on their way",
        ("time/sync_s", "time/pause_s"),
        "seconds",
        "From the learner's export to the last engine's receipt, and how long engines stood still for it.",
    ),
    Curves(
        "Requests in the engines",
        ("rollout/requests_in_flight",),
        "requests",
        "At the step's end, over all engines.",
    ),
    Curves(
        "Event loops are late",
        ("time/driver_late_s", "time/service_late_s", "time/rollout_late_s"),
        "seconds, 99th percentile",
        "By how much work on the loops of driver, correction service and rollout workers begins too late.",
    ),
)
