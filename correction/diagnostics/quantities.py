"""Every number that `diagnose` and `loss_metrics` give: its name, unit, label and meaning. A name that isn't listed here doesn't exist.

A run's metrics of these numbers (actors/metrics/catalogue.py) are made from these, and add at most a sentence on what holds in a run.
rho = pi_prox / mu, a ratio of the sampled token's probabilities, is 1 where nothing differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..settings.choices import Ratio, RejectionLevel, Statistic

# ----------------------------------------------------------------------------------------------------------------------
# The limits that diagnostics go by: where they are computed, and in what is said of them (quantities.py).

BUCKET_EDGES = (0.1, 0.25, 0.5, 0.75)
"""Edges of the proximal probability in `bucket_`; the paper prints its own only in a figure."""
PERCENTS = (1, 10, 50, 90, 99)
"""Percentiles of log rho, in `log_ratio_quantile_`."""
BAD_UPDATE = 0.5
"""mu - pi of a token with negative advantage from which an update is called bad: Trust Region (arXiv 2602.04879), sec. 5.3."""
SPURIOUS_BELOW = 0.1
"""Proximal probability under which a token counts in `spurious_objective`: objective-level hacking, Eq. 23."""
LEAST_MEAN_ERROR = 0.002
MOST_MEAN_TOKENS = 2500
"""The error of mean rho that a deviation is held against is at least this, and at least that of so many tokens: five of them are 1 %, and a
tenth of rho's own spread. Less can come from which answers were kept: stale tokens of right answers have a larger rho."""
LEAST_EFFECTIVE_TOKENS = 50
"""Effective tokens below which mean rho hangs on a few, and its standard error, which comes from the same ones, says too little."""


NUMBER = r"\d+"
"""Members of a family that are numbered."""


class Unit(StrEnum):
    """Base units of all numbers, those of a run's own metrics included."""

    ONE = ""
    """A plain number."""
    SECONDS = "s"
    SHARE = "share"
    """0 to 1."""
    NATS = "nats"
    NATS_SQUARED = "nats^2"
    TOKENS = "tokens"
    TOKENS_PER_SECOND = "tokens/s"
    VERSIONS = "versions"
    BYTES = "bytes"
    TIMESTAMP = "unix time"

    def number(self, value: float) -> str:
        """A value as people read it, without the unit."""
        return format(value, ".2g" if self is Unit.SECONDS and 0 < abs(value) < 1 else _DIGITS[self])


# How people read values of a unit, as format specifications of Python; a quantity may have its own.
_DIGITS = {
    Unit.ONE: ",.6g",
    Unit.SECONDS: ".2f",
    Unit.SHARE: ".0%",
    Unit.NATS: ".2g",
    Unit.NATS_SQUARED: ".2g",
    Unit.TOKENS: ",.0f",
    Unit.TOKENS_PER_SECOND: ",.0f",
    Unit.VERSIONS: ".2f",
    Unit.BYTES: ",.0f",
    Unit.TIMESTAMP: ".0f",
}
# Units that are not written after a value.
_UNWRITTEN = {Unit.ONE, Unit.SHARE, Unit.VERSIONS, Unit.TIMESTAMP}


@dataclass(frozen=True, slots=True)
class Quantity:
    """What one number is. A run's `Metric` (actors/metrics/catalogue.py) is one of these, with its name and behaviour over time."""

    unit: Unit
    label: str
    """Its name for people, in a few words: in a line, a table, a legend."""
    help: str
    """One sentence."""
    of: str = ""
    """What a share is of, such as "trained tokens" (those of the loss mask, rejected or not)."""
    digits: str = ""
    """Format specification of a value; empty: that of its unit."""
    members: str = ""
    """Regular expression of the last part of the names of a family's members; empty: users choose them, as those of reward parts."""

    def number(self, value: float) -> str:
        """A value as the terminal, logs, events and the report show it, without its unit."""
        return format(value, self.digits) if self.digits else self.unit.number(value)

    def text(self, value: float) -> str:
        """The same with its unit: "1.2e-12 nats", "34%"."""
        return self.number(value) + ("" if self.unit in _UNWRITTEN else f" {self.unit}")

    @property
    def shown_unit(self) -> str:
        """Unit for a table: "share of trained tokens"; 1 for a plain number."""
        return f"{self.unit} of {self.of}" if self.of else self.unit or "1"


TRAINED, KEPT, SEQUENCES, UNITS = "trained tokens", "kept tokens", "sequences", "weighted units"
"""What shares are of: tokens of the loss mask; those of them that rejection and veto left; sequences with a trained token; what an
importance weight covers (a token, turn or sequence)."""
_CARRIERS = "Tokens, turns or sequences (importance.level)"
_Q, _U = Quantity, Unit
GAP = {
    "k1_kl": _Q(_U.NATS, "k1 KL", "KL(behaviour || proximal), estimator -log rho: unbiased, may be negative."),
    "k2_kl": _Q(_U.NATS, "k2 KL", "KL(behaviour || proximal), estimator (log rho)^2 / 2."),
    "k3_kl": _Q(_U.NATS, "k3 KL", "KL(behaviour || proximal), estimator rho - 1 - log rho: unbiased, never negative."),
    "chi2_token": _Q(_U.ONE, "token chi-square", "Mean of rho^2, minus 1."),
    "log_ratio_mean": _Q(_U.NATS, "mean log ratio", "Mean of log rho."),
    "log_ratio_std": _Q(_U.NATS, "log-ratio spread", "Standard deviation of log rho."),
    "log_ratio_abs_mean": _Q(_U.NATS, "mean |log ratio|", "Mean |log rho|: the 'log probability difference' of the KPop post."),
    "log_ratio_abs_max": _Q(_U.NATS, "max |log ratio|", "Largest |log rho|."),
    "rho_mean": _Q(
        _U.ONE,
        "mean rho",
        "Mean rho. Its expectation is 1, whatever the two policies, if the tokens were drawn from mu as it was reported.",
    ),
    "rho_mean_error": _Q(_U.ONE, "error of mean rho", "Standard error of mean rho: rho's standard deviation over the root of the tokens."),
    "rho_mean_deviation": _Q(
        _U.ONE,
        "deviation of mean rho",
        f"|mean rho - 1| in standard errors, which count as at least {LEAST_MEAN_ERROR:g} and at least those of {MOST_MEAN_TOKENS} tokens; "
        f"absent where the effective sample size is under {LEAST_EFFECTIVE_TOKENS} tokens.",
        digits=".3g",
    ),
    "rho_std": _Q(_U.ONE, "spread of rho", "Standard deviation of rho: 'mismatch' in the paper on objective-level hacking."),
    "rho_max": _Q(_U.ONE, "largest rho", "Largest rho, before any bound."),
    "rho_min": _Q(_U.ONE, "smallest rho", "Smallest rho."),
    "inverse_rho_mean": _Q(_U.ONE, "mean 1 / rho", "Mean 1 / rho, whose expectation is at least 1 (objective-level hacking, Eq. 46)."),
    "total_variation": _Q(
        _U.ONE, "total variation", "Mean |rho - 1| / 2, an estimate of the mean total variation from mu to pi_prox (Trust Region, Eq. 10)."
    ),
    "probability_gap_mean": _Q(_U.ONE, "probability gap", "Mean |pi_prox - mu| of the sampled token."),
    "probability_proximal_mean": _Q(_U.ONE, "mean pi_prox", "Mean pi_prox of the sampled token."),
    "pearson": _Q(_U.ONE, "correlation", "Correlation of pi_prox and mu over sampled tokens."),
    "ess_token": _Q(
        _U.SHARE,
        "effective sample size",
        "Effective sample size of rho, before any bound: (sum rho)^2 / (n sum rho^2); 1 is on-policy, 0.1 means that a few tokens would "
        "carry the batch if nothing bounded them.",
        "the tokens",
        ".1%",
    ),
    "tokens": _Q(_U.TOKENS, "tokens", "Tokens that these numbers are from."),
}
"""Numbers of one set of tokens: all; `mismatch_`, staleness 0; `stale_`, older. In bypass with several optimizer steps per batch, of those
tokens whose forward pass came before the first update."""


def _of(tokens: str, prefix: str, label: str) -> dict[str, Quantity]:
    return {
        f"{prefix}{name}": _Q(one.unit, f"{label} {one.label}", f"{one.help[:-1]}; {tokens}.", one.of, one.digits)
        for name, one in GAP.items()
    }


_SIGNS = (("", ""), ("positive_", " of positive advantage"), ("negative_", " of negative advantage"))
_SIDES = (("positive", "A > 0"), ("negative", "A < 0"))
_BUCKETS = tuple(enumerate(zip((0, *BUCKET_EDGES), (*BUCKET_EDGES, 1), strict=True)))


def _buckets(prefix: str, policy: str, label: str, warning: str) -> dict[str, Quantity]:
    texts = {
        "rho_mean": (_U.ONE, "mean rho", "Mean rho of tokens with {place}; " + warning + "."),
        "rho_std": (_U.ONE, "spread of rho", "Standard deviation of rho of tokens with {place}."),
        "tokens": (_U.TOKENS, "tokens", "Tokens with {place}."),
    }
    return {
        f"{prefix}_{name}_{index}": _Q(unit, f"{what}, bucket {index}{label}", text.format(place=f"{policy} from {low:g} to {high:g}"))
        for name, (unit, what, text) in texts.items()
        for index, (low, high) in _BUCKETS
    }


# Each token at its first forward pass of the step.
_CLIPPED = {
    name: quantity
    for sign, side in _SIDES
    for name, quantity in {
        f"clipped_{sign}_share": _Q(
            _U.SHARE, f"clipped of {side}", "Kept tokens whose gradient the objective's clip or gate took away.", f"{TRAINED} of {side}"
        ),
        f"clipped_{sign}_probability_mean": _Q(_U.ONE, f"mu of clipped, {side}", f"Mean mu of these tokens, {side}."),
        f"clipped_{sign}_entropy_mean": _Q(
            _U.NATS, f"entropy of clipped, {side}", f"Mean entropy of the target policy at these tokens, {side}."
        ),
    }.items()
}

_STALE_SAMPLE = "of stale tokens: a sample, every monitor.split_every batches, or all where the correction tells the two parts apart"
SPLIT = {
    "split_tokens": _Q(_U.TOKENS, "tokens of the split", f"Number {_STALE_SAMPLE}."),
    "split_total_variance": _Q(
        _U.NATS_SQUARED,
        "variance of log pi / mu",
        f"Variance of log(pi / mu) {_STALE_SAMPLE}; pi is the learner where the batch's update starts.",
    ),
    "split_mismatch_variance": _Q(
        _U.NATS_SQUARED,
        "variance by mismatch",
        "Its part of mismatch: the variance of log(pi_v / mu), pi_v the learner at the weights that sampled the token.",
    ),
    "split_staleness_variance": _Q(_U.NATS_SQUARED, "variance by staleness", "Its part of staleness: the variance of log(pi / pi_v)."),
    "split_covariance": _Q(_U.NATS_SQUARED, "covariance", "Covariance of the two parts: total = mismatch + staleness + 2 x covariance."),
    "split_mismatch_k3_kl": _Q(
        _U.NATS, "mismatch of stale tokens", "KL(mu || pi_v), estimator k3: mismatch at equal weights, of stale tokens."
    ),
    "split_staleness_k3_kl": _Q(_U.NATS, "staleness alone", "KL(pi_v || pi), estimator k3: what newer weights changed, engines apart."),
}
"""Exact parts of the gap of stale tokens, of variance_split.split_numbers: a run has them where its correction tells them apart, or
monitor.split_every is not 0."""


DIAGNOSTICS = {
    **GAP,
    **_of("tokens of staleness 0", "mismatch_", "mismatch"),
    **_of("tokens of staleness 1 and more", "stale_", "stale"),
    "chi2_sequence": _Q(_U.ONE, "sequence chi-square", "Mean of the squared product of rho over a sequence, minus 1."),
    "ess_sequence": _Q(
        _U.SHARE, "sequences' sample size", "Effective sample size of the products of rho, each sequence counted once.", SEQUENCES
    ),
    "perplexity_behavior": _Q(_U.ONE, "perplexity under mu", "Mean over sequences of exp(-mean log mu)."),
    "perplexity_proximal": _Q(_U.ONE, "perplexity under pi_prox", "Mean over sequences of exp(-mean log pi_prox)."),
    "perplexity_ratio": _Q(_U.ONE, "perplexity ratio", "Mean over sequences of perplexity under pi_prox / under mu."),
    "target_k1_kl": _Q(_U.NATS, "k1 KL to target", "KL(behaviour || target), estimator k1."),
    "target_k2_kl": _Q(_U.NATS, "k2 KL to target", "KL(behaviour || target), estimator k2."),
    "target_k3_kl": _Q(_U.NATS, "k3 KL to target", "KL(behaviour || target), estimator k3."),
    "target_rho_max": _Q(_U.ONE, "largest target ratio", "Largest target / behaviour."),
    "target_total_variation": _Q(_U.ONE, "total variation to target", "Mean |target / behaviour - 1| / 2 (Trust Region, Eq. 10)."),
    "improvement_bound_quadratic": _Q(
        _U.ONE,
        "quadratic improvement bound",
        "2 xi T (T - 1) D^2 of Trust Region, Eq. 7: what a policy's gain may fall short of its surrogate; xi is the largest |A|, T the "
        "tokens of the longest answer, D the mean total variation to the target, where the theorem has the largest of any state.",
    ),
    "improvement_bound_linear": _Q(
        _U.ONE,
        "linear improvement bound",
        "4 xi times the mean over sequences of the sum of total variations to the target: Trust Region, B.3, tighter for long answers.",
    ),
    "improvement_bound": _Q(_U.ONE, "improvement bound", "The smaller of the two, in units of the advantage."),
    "drift_k3_kl": _Q(
        _U.NATS,
        "drift k3",
        "KL(proximal || target), estimator k3, in the first pass of each token: how far the batch's earlier optimizer steps had moved the "
        "policy; absent where the proximal policy isn't the learner's.",
    ),
    "drift_from_behavior_k3_kl": _Q(
        _U.NATS,
        "drift from behaviour, k3",
        "KL(behaviour || target), estimator k3, in the first pass of each token: drift, mismatch and staleness together, in bypass and "
        "with interpolated proximal logprobs, where the drift alone isn't known; absent with one optimizer step per batch.",
    ),
    "bad_update_share": _Q(_U.SHARE, "bad updates", f"Tokens with negative advantage and mu - pi >= {BAD_UPDATE:g}.", TRAINED, ".2%"),
    "broken_tokens": _Q(_U.TOKENS, "broken tokens", "Tokens of the loss mask with a value that is not finite, and not missing."),
    "missing_share": _Q(_U.SHARE, "missing", "Tokens whose logprob the sampler did not report (NaN).", TRAINED),
    "kept_share": _Q(_U.SHARE, "kept", "Tokens that rejection and veto left.", TRAINED),
    "rejected_share": _Q(_U.SHARE, "rejected", "Tokens dropped by rejection, veto or not being finite.", TRAINED, ".2%"),
    **{
        f"rejected_{sign}_share": _Q(_U.SHARE, f"rejected of {side}", f"The same, among tokens of {side}.", f"{TRAINED} of {side}")
        for sign, side in _SIDES
    },
    "rejected_by_veto": _Q(_U.SHARE, "vetoed", "Tokens of the sequences that the veto drops.", TRAINED),
    "rejected_sequence_share": _Q(_U.SHARE, "rejected sequences", "Sequences of which no token is left.", SEQUENCES),
    "rejected_probability_mean": _Q(_U.ONE, "rejected probability", "Mean pi_prox of the dropped tokens; in bypass that of the target."),
    "rejected_entropy_mean": _Q(_U.NATS, "rejected entropy", "Mean entropy of the target at the dropped tokens."),
    **_CLIPPED,
    "clipped_sequence_share": _Q(_U.SHARE, "clipped sequences", "Sequences whose kept tokens are all clipped.", SEQUENCES),
    "effective_factor_mean": _Q(
        _U.ONE,
        "mean factor phi",
        "Mean phi of trained tokens with A other than 0: what the preset makes of r A grad log pi, clip x weight x keep; r is target / "
        "proximal, the proximal policy as the loss had it: behaviour in bypass, a mixture with interpolated logprobs.",
    ),
    "effective_factor_std": _Q(_U.ONE, "spread of phi", "Standard deviation of this phi: 0 where all tokens count alike."),
    "effective_objective": _Q(
        _U.ONE, "J of the preset", "Sum of A (phi - 1) with the preset's own phi (objective-level hacking, Eq. 15 and 23)."
    ),
    "effective_bias": _Q(
        _U.ONE,
        "bias of the preset",
        "Sum of A (c - q), c the factor that a token was trained with and q = target / behaviour the one without bias: what clips, bounds "
        "and rejection add to the objective.",
    ),
    **{
        f"truncated_{sign}share": _Q(_U.SHARE, f"weights cut{of}", f"{_CARRIERS}{of} whose importance weight was cut to a bound.", UNITS)
        for sign, of in _SIGNS
    },
    **{
        f"masked_{sign}share": _Q(_U.SHARE, f"weights masked{of}", f"{_CARRIERS}{of} whose importance weight was set to 0.", UNITS)
        for sign, of in _SIGNS
    },
    "importance_weight_mean": _Q(
        _U.ONE, "mean weight", "Mean importance weight of the kept tokens, normalised, injected distortion included."
    ),
    "importance_weight_max": _Q(_U.ONE, "largest weight", "Largest importance weight of the kept tokens."),
    "importance_weight_ess": _Q(_U.SHARE, "weights' sample size", "Effective sample size of these weights.", KEPT),
    "staleness_mean": _Q(
        _U.VERSIONS, "mean staleness", "Learner's version minus the version that sampled the token, mean over the trained tokens."
    ),
    "staleness_max": _Q(_U.VERSIONS, "largest staleness", "Staleness of the oldest trained token.", digits=".0f"),
    "staleness_in_flight_mean": _Q(_U.VERSIONS, "staleness in flight", "Updates while the rest of the sequence was sampled."),
    "staleness_in_queue_mean": _Q(_U.VERSIONS, "staleness in the queue", "Updates between the last token and this step."),
    "mixed_version_share": _Q(
        _U.SHARE,
        "mixed versions",
        "Sequences with tokens of more than one version: new weights came while they were sampled.",
        SEQUENCES,
        ".1%",
    ),
    "spurious_objective": _Q(
        _U.ONE,
        "spurious objective",
        f"J: sum of A (phi - 1) with phi = 2 under pi_prox {SPURIOUS_BELOW:g} (objective-level hacking, Eq. 23); in bypass under the "
        f"target's {SPURIOUS_BELOW:g}.",
    ),
    **{
        f"log_ratio_quantile_{percent:02d}": _Q(_U.NATS, f"log ratio, {percent} %", f"Quantile of log rho at {percent} %.")
        for percent in PERCENTS
    },
    **_buckets("bucket", "pi_prox", "", "noise alone, without any drift, puts small pi_prox below 1 and large ones above"),
    **_buckets("bucket_behavior", "mu", " by mu", "noise alone, without any drift, tilts it the other way round than by pi_prox"),
    **SPLIT,
    "reference_kl": _Q(
        _U.NATS,
        "KL to reference",
        "KL a token from the target policy to the frozen reference policy, the model that the run began with; estimator k3, unless a KL "
        "penalty on it has its own.",
    ),
}
"""The numbers of `diagnose`, which also gives the families in DIAGNOSTIC_FAMILIES; SPLIT; and that of `reference_kl` (diagnose.py)."""

DIAGNOSTIC_FAMILIES = {
    "rejected_by_": _Q(
        _U.SHARE,
        "rejected by",
        "Tokens outside one criterion, by its label (the second one of a label ends in _2).",
        TRAINED,
        members="_".join(f"({'|'.join(kind)})" for kind in (Statistic, RejectionLevel, Ratio)) + f"(_{NUMBER})?",
    ),
    **{
        f"staleness{where}_share_": _Q(_U.SHARE, f"tokens {label}", f"Trained tokens {tokens}.", TRAINED, members=NUMBER)
        for where, label, tokens in (
            ("", "of staleness", "of this staleness"),
            ("_in_flight", "with updates in flight", "with so many updates in flight"),
            ("_in_queue", "with updates in the queue", "with so many updates in the queue"),
        )
    },
}
"""Numbers whose last part is a criterion's label or a number of versions."""


def of_family(family: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers of one of DIAGNOSTIC_FAMILIES, by the last part of their names. Raises: KeyError if there is no such family."""
    if family not in DIAGNOSTIC_FAMILIES:
        raise KeyError(family)
    return {name[len(family) :]: value for name, value in numbers.items() if name.startswith(family)}


LOSS_METRICS = {
    "loss": _Q(
        _U.ONE,
        "loss",
        "Policy loss, plus KL penalty, minus entropy bonus: what was differentiated. In RL its value says little; a jump is worth a look.",
    ),
    "policy_loss": _Q(_U.ONE, "policy loss", "The policy's part of the loss."),
    "kl_loss": _Q(_U.ONE, "KL loss", "The KL penalty's part of the loss; absent without one."),
    "step_size_factor": _Q(
        _U.ONE,
        "step size",
        "Factor on the learning rate: root of the sequences' effective sample size (products of q) over their number, the mean over "
        "the batch's optimizer steps; absent with step_size.by: off.",
        digits=".3f",
    ),
    "ratio_mean": _Q(_U.ONE, "mean ratio", "Mean of the ratio that the objective watches."),
    "batch_drift_k1_kl": _Q(_U.NATS, "batch drift k1", "KL(proximal || target), estimator k1, over all passes of the batch."),
    "batch_drift_k3_kl": _Q(
        _U.NATS,
        "batch drift k3",
        "KL(proximal || target), estimator k3, over all passes of the batch: how far the optimizer moved the policy within it; absent "
        "where the proximal policy isn't the learner's.",
    ),
    "batch_drift_from_behavior_k1_kl": _Q(
        _U.NATS, "batch drift from behaviour, k1", "KL(behaviour || target), estimator k1, over all passes of the batch."
    ),
    "batch_drift_from_behavior_k3_kl": _Q(
        _U.NATS,
        "batch drift from behaviour, k3",
        "KL(behaviour || target), estimator k3, over all passes: drift, mismatch and staleness together, in bypass and with interpolated "
        "proximal logprobs, where the drift alone isn't known.",
    ),
    "entropy": _Q(
        _U.NATS,
        "entropy",
        "Mean entropy of the target at the trained tokens; at 0 the policy always gives the same answer and explores no more.",
        digits=".2f",
    ),
    "penalty_kl": _Q(_U.NATS, "KL to reference", "Mean of the estimate of a KL penalty on the reference, before its coefficient."),
    "anchor_kl": _Q(_U.NATS, "KL to the anchor", "The same of a KL penalty on the behaviour or the proximal policy."),
    "clip_share": _Q(
        _U.SHARE,
        "clipped",
        "Kept tokens whose gradient the trust region took away; where it takes whole sequences, each counts by its tokens.",
        TRAINED,
    ),
    "batch_kept_share": _Q(_U.SHARE, "kept, all passes", "Tokens that are in the policy loss, over all passes of the batch.", TRAINED),
    "batch_broken_tokens": _Q(_U.TOKENS, "broken, all passes", "Tokens left out as a number that is read isn't finite, over all passes."),
    "bounded_share": _Q(_U.SHARE, "coefficients cut", "Kept tokens whose coefficient was cut to a bound; absent without bounds.", KEPT),
    "importance_weight_raw_mean": _Q(_U.ONE, "mean raw weight", "Mean importance weight of the kept tokens, before a late normaliser."),
}
"""The numbers of `loss_metrics`, over all passes of a batch; their drifts are `batch_drift_*`, those of first passes are in DIAGNOSTICS."""
