"""What the early warning follows: for each symptom what is wrong when it grows, and what to try.

No remedy names a correction that would reject most of a batch in the situation that it is given for: tests/correction/test_remedies.py
checks each by benchmarks/remedies.py, up to a KL of 0.1 and for answers of any length.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Symptom:
    """A diagnostic that is followed."""

    name: str
    """Name of the diagnostic (correction.diagnostics.quantities.DIAGNOSTICS)."""
    meaning: str
    """What is wrong when it grows."""
    remedy: str
    """What to try."""
    offset: float = 1e-12
    """Added before the log: growth is not measured below it."""
    is_share_missing: bool = False
    """True: 1 - value is followed, because the diagnostic is 1 when all is well."""
    least: float = 0.0
    """Below this value of the followed quantity nothing is wrong, however much it has grown."""
    limit: float | None = None
    """Value that is an alarm at once, regardless of the run's baseline."""
    implied_by: str | None = None
    """Symptom that explains this one: while it is in the same state or a worse one, this one is silent."""
    is_level_of_bounds: bool = False
    """Its usual level depends on the correction's bounds: when these change, it is followed anew."""
    is_eased_by_bounds: bool = True
    """True: narrower bounds of the correction help against it. False: they would add to it, or don't help."""
    has_reference_level: bool = False
    """True: reference_levels.py has its levels in published setups, and above the alarm level it is an alarm without a baseline, too."""

    def quantity(self, value: float) -> float:
        """What is followed, >= 0."""
        return max(1 - value if self.is_share_missing else value, 0.0)

    def is_over_limit(self, value: float) -> bool:
        return self.limit is not None and self.quantity(value) >= self.limit


SYMPTOMS = (
    Symptom(
        "mismatch_k3_kl",
        "engine and learner disagree at the same weights",
        "compare dtypes and weight checksums of both, raise the engine's precision or replay its routing (learner.routing_replay); until "
        "then set correction.preset: dppo-binary-tv or tis-token, on which sources differ (docs/correction.md, What was found)",
        offset=1e-9,
        has_reference_level=True,
    ),
    Symptom(
        "k3_kl",
        "the sampled tokens are off-policy",
        "lower max_staleness, or set correction.preset: dppo-binary-tv or mis-token",
        offset=1e-9,
        implied_by="mismatch_k3_kl",
    ),
    Symptom(
        "ess_token",
        "a few tokens carry most of the batch's weight",
        "lower max_staleness, or bound the weights (correction.preset: tis-token, or icepop, which leaves such tokens out); sources differ "
        "on both (docs/correction.md, What was found)",
        offset=1e-3,
        is_share_missing=True,
        least=0.05,
        limit=0.95,
        implied_by="k3_kl",
    ),
    Symptom(
        "rejected_share",
        "rejection leaves out more and more of the batch",
        "find the cause before widening the bounds: lower max_staleness or the learning rate; a band on geometric means rejects nearly all "
        "once the KL exceeds it, a product of ratios once KL times length exceeds 1",
        offset=0.02,
        limit=0.9,
        implied_by="k3_kl",
        is_level_of_bounds=True,
        is_eased_by_bounds=False,
    ),
    Symptom(
        "drift_k3_kl",
        "each update moves the policy further than the early ones did",
        "lower the learning rate, or take fewer optimizer steps per batch",
        offset=1e-9,
    ),
    Symptom(
        "drift_from_behavior_k3_kl",
        "the later optimizer steps of a batch train on tokens that the earlier ones have moved further away",
        "lower the learning rate, or take fewer optimizer steps per batch",
        offset=1e-9,
        implied_by="k3_kl",
    ),
    Symptom(
        "rho_mean_deviation",
        "mean rho is not 1: the tokens were not drawn from the policy whose logprobs came with them",
        "check the sampling temperature and top-p, logprobs that are shifted by one token, or that are of another policy or of edited text",
        offset=5.0,
        limit=5.0,
        is_eased_by_bounds=False,
    ),
    Symptom(
        "bad_update_share",
        "tokens of negative advantage that the sampler found likely have lost 0.5 or more of their probability (mu - pi >= 0.5)",
        "set correction.preset: dppo-binary-tv, or lower the learning rate",
        offset=5e-3,
    ),
    Symptom(
        "broken_tokens",
        "logprobs or advantages are not finite",
        "look for overflow in engine or learner",
        offset=1.0,
        limit=1.0,
        is_eased_by_bounds=False,
    ),
)
"""What is followed unless a monitor is given others."""
