"""Every number that `diagnose` and `loss_metrics` give: its name, unit, label and meaning. A name that isn't listed here doesn't exist.

rho = pi_prox / mu, a ratio of the sampled token's probabilities, is 1 where nothing differs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BUCKET_EDGES = (0.1, 0.25, 0.5, 0.75)
"""Edges of the proximal probability in `bucket_`; the paper prints its own only in a figure."""
PERCENTS = (1, 10, 50, 90, 99)
"""Of log rho, in `log_ratio_quantile_`."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """What one number is."""

    unit: str
    """nats, share (0 to 1), tokens, versions, or empty for a plain number."""
    label: str
    """A few words for a table or an axis."""
    help: str
    """One sentence."""


_Q = Quantity
GAP = {
    "k1_kl": _Q("nats", "k1 KL", "KL(behaviour || proximal), estimator -log rho."),
    "k2_kl": _Q("nats", "k2 KL", "KL(behaviour || proximal), estimator (log rho)^2 / 2."),
    "k3_kl": _Q("nats", "k3 KL", "KL(behaviour || proximal), estimator rho - 1 - log rho."),
    "chi2_token": _Q("", "token chi-square", "Mean of rho^2, minus 1."),
    "log_ratio_mean": _Q("nats", "mean log ratio", "Mean of log rho."),
    "log_ratio_std": _Q("nats", "log-ratio spread", "Standard deviation of log rho."),
    "log_ratio_abs_max": _Q("nats", "max |log ratio|", "Largest |log rho|."),
    "rho_std": _Q("", "spread of rho", "Standard deviation of rho: 'mismatch' in the paper on objective-level hacking."),
    "rho_max": _Q("", "largest rho", "Largest rho."),
    "rho_min": _Q("", "smallest rho", "Smallest rho."),
    "probability_gap_mean": _Q("", "probability gap", "Mean |pi_prox - mu| of the sampled token."),
    "pearson": _Q("", "correlation", "Correlation of pi_prox and mu over sampled tokens."),
    "ess_token": _Q("share", "effective sample size", "Effective sample size of the raw rho, as a share of the tokens."),
    "tokens": _Q("tokens", "tokens", "Tokens that these numbers are from."),
}
"""Numbers of one set of tokens: all; `mismatch_`, staleness 0; `stale_`, older."""


def _of(tokens: str, prefix: str, label: str) -> dict[str, Quantity]:
    return {f"{prefix}{name}": _Q(one.unit, f"{label}: {one.label}", f"{one.help[:-1]}; {tokens}.") for name, one in GAP.items()}


_SIGNS = (("", ""), ("positive_", " of positive advantage"), ("negative_", " of negative advantage"))
DIAGNOSTICS = {
    **GAP,
    **_of("tokens of staleness 0", "mismatch_", "mismatch"),
    **_of("tokens of staleness 1 and more", "stale_", "stale"),
    "chi2_sequence": _Q("", "sequence chi-square", "Mean of the squared product of rho over a sequence, minus 1."),
    "ess_sequence": _Q(
        "share",
        "sequences' sample size",
        "Effective sample size of the products of rho, as a share of the sequences, each counted once.",
    ),
    "perplexity_behavior": _Q("", "perplexity under mu", "Mean over sequences of exp(-mean log mu)."),
    "perplexity_proximal": _Q("", "perplexity under pi_prox", "Mean over sequences of exp(-mean log pi_prox)."),
    "perplexity_ratio": _Q("", "perplexity ratio", "Mean over sequences of perplexity under pi_prox / under mu."),
    "target_k1_kl": _Q("nats", "k1 KL to target", "KL(behaviour || target), estimator k1."),
    "target_k2_kl": _Q("nats", "k2 KL to target", "KL(behaviour || target), estimator k2."),
    "target_k3_kl": _Q("nats", "k3 KL to target", "KL(behaviour || target), estimator k3."),
    "target_rho_max": _Q("", "largest target ratio", "Largest target / behaviour."),
    "drift_k3_kl": _Q("nats", "drift k3", "KL(proximal || target), estimator k3; needs recomputed proximal logprobs."),
    "bad_update_share": _Q("share", "bad updates", "Tokens with negative advantage and mu - pi >= 0.5."),
    "broken_tokens": _Q("tokens", "broken tokens", "Tokens of the loss mask with a value that is not finite."),
    "kept_share": _Q("share", "kept", "Tokens that rejection and veto left."),
    "rejected_share": _Q("share", "rejected", "Tokens dropped by rejection, veto or not being finite."),
    "rejected_positive_share": _Q("share", "rejected of A > 0", "The same, among tokens of positive advantage."),
    "rejected_negative_share": _Q("share", "rejected of A < 0", "The same, among tokens of negative advantage."),
    "rejected_sequence_share": _Q("share", "rejected sequences", "Sequences of which no token is left."),
    "rejected_probability_mean": _Q("", "rejected probability", "Mean pi_prox of the dropped tokens."),
    "rejected_entropy_mean": _Q("nats", "rejected entropy", "Mean entropy of the target at the dropped tokens."),
    **{
        f"truncated_{sign}share": _Q("share", f"weights cut{of}", f"Units{of} whose importance weight was cut to a bound, of all units.")
        for sign, of in _SIGNS
    },
    **{
        f"masked_{sign}share": _Q("share", f"weights masked{of}", f"Units{of} whose importance weight was set to 0, of all units.")
        for sign, of in _SIGNS
    },
    "importance_weight_mean": _Q("", "mean weight", "Mean importance weight of the kept tokens, normalised."),
    "importance_weight_max": _Q("", "largest weight", "Largest importance weight of the kept tokens."),
    "importance_weight_ess": _Q("share", "weights' sample size", "Effective sample size of these weights, as a share of the kept tokens."),
    "staleness_mean": _Q("versions", "mean staleness", "Mean staleness of the trained tokens."),
    "staleness_max": _Q("versions", "largest staleness", "Largest staleness."),
    "staleness_in_flight_mean": _Q("versions", "staleness in flight", "Updates while the rest of the sequence was sampled."),
    "staleness_in_queue_mean": _Q("versions", "staleness in the queue", "Updates between the last token and this step."),
    "mixed_version_share": _Q("share", "mixed versions", "Sequences with tokens of more than one version."),
    "spurious_objective": _Q(
        "", "spurious objective", "J: sum of A (phi - 1) with phi = 2 under pi_prox 0.1 (objective-level hacking, Eq. 23)."
    ),
    **{
        f"log_ratio_quantile_{percent:02d}": _Q("nats", f"log ratio, {percent} %", f"Quantile of log rho at {percent} %.")
        for percent in PERCENTS
    },
    **{
        f"bucket_rho_{name}_{index}": _Q("", f"{name} rho, bucket {index}", f"{text} of tokens with pi_prox from {low:g} to {high:g}.")
        for name, text in (("mean", "Mean rho"), ("std", "Standard deviation of rho"))
        for index, (low, high) in enumerate(zip((0, *BUCKET_EDGES), (*BUCKET_EDGES, 1), strict=True))
    },
}
"""The numbers of `diagnose`; it also gives the families in DIAGNOSTIC_FAMILIES."""

DIAGNOSTIC_FAMILIES = {
    "rejected_by_": _Q("share", "rejected by", "Tokens outside one criterion, by its label, or `veto`."),
    "staleness_share_": _Q("share", "tokens of staleness", "Trained tokens of this staleness."),
    "staleness_in_flight_share_": _Q("share", "tokens with updates in flight", "Trained tokens with so many updates in flight."),
    "staleness_in_queue_share_": _Q("share", "tokens with updates in the queue", "Trained tokens with so many updates in the queue."),
}
"""Numbers whose last part is a criterion's label or a number of versions."""

LOSS_METRICS = {
    "loss": _Q("", "loss", "Policy loss, plus KL penalty, minus entropy bonus: what was differentiated."),
    "policy_loss": _Q("", "policy loss", "The policy's part of the loss."),
    "kl_loss": _Q("", "KL loss", "The KL penalty's part of the loss; absent without one."),
    "broken_tokens": _Q("tokens", "broken tokens", "Tokens of the loss mask with a value that is not finite."),
    "kept_share": _Q("share", "kept", "Trained tokens that rejection and veto left."),
    "ratio_mean": _Q("", "mean ratio", "Mean of the ratio that the objective watches."),
    "drift_k1_kl": _Q("nats", "drift k1", "KL(proximal || target), estimator k1."),
    "drift_k3_kl": _Q("nats", "drift k3", "KL(proximal || target), estimator k3."),
    "entropy": _Q("nats", "entropy", "Mean entropy of the target at the trained tokens."),
    "penalty_kl": _Q("nats", "KL to the anchor", "Mean of the KL penalty's own estimate, before its coefficient."),
    "clip_share": _Q("share", "clipped", "Kept tokens whose gradient the trust region took away."),
    "bounded_share": _Q("share", "coefficients cut", "Kept tokens whose coefficient was cut to a bound; absent without bounds."),
    "importance_weight_mean": _Q("", "mean weight", "Mean importance weight of the kept tokens, before a late normaliser."),
    "importance_weight_ess": _Q("share", "weights' sample size", "Effective sample size of these weights, as a share of the kept tokens."),
}
"""The numbers of `loss_metrics`."""


def current_name(name: str) -> str:
    """Of a number in the files of an earlier run: shares were called fractions ("rejected_fraction_positive")."""
    return re.sub(r"^((?:correction/|loss/|monitor/\w+/)?\w+?)_fraction(_positive|_negative)?(?=_\d+$|$)", r"\1\2_share", name)
