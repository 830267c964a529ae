"""Where the sources disagree, what is done here, and why: decided once, pinned by tests/correction/test_contradictions.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContradictionDecision:
    """One contradiction of the sources."""

    subject: str
    """What they disagree on."""
    decision: str
    """What is done here."""
    reason: str
    """Why; with the setting that gives the other reading, where there is one."""


D = ContradictionDecision

DECISIONS: dict[str, ContradictionDecision] = {
    "C1": D(
        "k1 rejection bounds",
        "Bounds of statistic `ratio` are on the ratio itself; those of `k1` are on -log ratio.",
        "verl compares log bounds with k1 = -log rho and so accepts rho in [1/upper, 1/lower]: for its '0.5_5.0' give lower 0.2, upper 2.",
    ),
    "C2": D(
        "denominator after rejection",
        "`denominator.count: original`: rejected tokens still count.",
        "As published for IcePop and KPop, and in six of seven frameworks; it does not scale up what is left. verl decoupled: count: kept.",
    ),
    "C3": D(
        "sequences rejected as a whole",
        "They count under `original`, not under `kept`.",
        "One word for tokens and sequences; fully masked answers (no loss mask at all) never count.",
    ),
    "C4": D(
        "weight of decoupled PPO",
        "rho is applied unless importance.mode is off.",
        "The objective carries it; AReaL drops it silently when no rejection is configured.",
    ),
    "C5": D(
        "KPop",
        "Both directions, prox against mu, <= 0.1, probabilities floored at float32's own resolution.",
        "The post writes both directions on the inference and training engines; 0.1 is what prime-rl cites, AReaL's 2.0 is almost inert.",
    ),
    "C6": D(
        "IcePop",
        "A kept token keeps its ratio as weight; bounds 0.5 to 5, inclusive.",
        "The formula of the post; forks return 1 or use other bounds.",
    ),
    "C7": D(
        "DPPO constants",
        "The paper's: TV 0.15 (0.2 at scale), KL 0.05, ratio unbounded (5 at scale).",
        "verl reads them from clip_ratio (0.2 for KL too) and bounds the ratio at 3: gate.threshold: 0.2 and upper: 3 give its numbers.",
    ),
    "C8": D(
        "DPPO top-K TV",
        "The merged rest takes part.",
        "Eq. 16 and the official code; without it the bound is looser.",
    ),
    "C9": D(
        "binary KL as a criterion",
        "It is a statistic like any other.",
        "AReaL documents it, its validator refuses it.",
    ),
    "C10": D(
        "OPSM",
        "mu against theta, mean log(mu/theta) > 0.1 drops, the threshold itself stays.",
        "The paper's 'old' is the sampler (as in TRL); slime's default compares with prox. Notes that reverse the sign mask nearly all.",
    ),
    "C11": D(
        "A-3PO at staleness 0",
        "prox = mu.",
        "As AReaL; the ratio of the update is then q, and a fresh token is clipped like in bypass.",
    ),
    "C12": D(
        "M2PO",
        "Tokens are removed, on log(prox/mu), all signs, until the mean is strictly under the budget; at least one stays.",
        "AReaL's rule: the only one whose result does not depend on a search step.",
    ),
    "C13": D(
        "MiniRL",
        "`minirl`: 0.27 and ratio at most 5; `minirl-tis`: 0.28 and 3.",
        "The first is its own paper's (the 5 second-hand), the second the Trust Region paper's.",
    ),
    "C14": D(
        "CISPO",
        "`cispo`: theta/prox, absolute cap 5, no floor. `pg-tis`: theta/mu, cap 3.",
        "One name, two ratios. The cap is absolute, not an offset; the floor of frameworks that reuse 0.2 is not meant by the paper.",
    ),
    "C15": D(
        "population of batch normalisation",
        "`all`: all units before rejection, bounded weights; at sequence level each sequence once, whatever its length.",
        "As verl and Miles do; a geometric level works too. Over survivors alone: population: kept.",
    ),
    "C16": D(
        "veto",
        "Token ratio under 1e-4; `quantity: probability` vetoes on pi_prox.",
        "The code's definition, the post's as option.",
    ),
    "C17": D(
        "GRPO's standard deviation",
        "Of the group, ddof 1, epsilon 1e-6; a group of one has advantage 0.",
        "What verl, slime, Miles and SkyRL do; but a lone answer has no baseline, so its raw reward (verl) would be noise.",
    ),
    "C18": D(
        "dual clip",
        "Off; `ppo-dual-clip` has c = 3.",
        "Papers on PPO, GRPO and DAPO don't have it; verl has it on.",
    ),
    "C19": D(
        "unbiased KL",
        "The factor is differentiable and is theta/mu.",
        "Then its gradient is that of the reverse KL; a detached factor has another. theta/prox: kl.ratio: r.",
    ),
    "C20": D(
        "direction of k1 and k3 filters",
        "x = numerator / denominator as named, so k3 = rho - 1 - log rho.",
        "AReaL calls its filters with the policies exchanged (1/rho - 1 + log rho).",
    ),
    "C21": D(
        "verl's default weight",
        "Nothing is on unless named: importance.mode: off.",
        "Its dataclass says sequence, its config file null.",
    ),
    "C22": D(
        "effective sample size of sequences",
        "Each sequence counts once.",
        "verl's counts a sequence once for each token.",
    ),
    "C23": D(
        "TRL's default",
        "`mis-sequence-upper`: sequence mask with upper bound 3.",
        "Its code; its help text still names token truncation.",
    ),
    "C24": D(
        "prime-rl's default loss",
        "Mask without a cap, penalty on all trained tokens. Zero advantage has no gradient either way.",
        "Its code; its documentation shows a cap without a mask.",
    ),
    "C25": D(
        "gradient of GSPO",
        "The token form: sg[s] theta / sg[theta].",
        "Same gradient as GSPO under a mean over the sequence and a constant advantage, and it allows advantages by token.",
    ),
    "C26": D(
        "TOPR",
        "Product over the sequence, at most 1, where the advantage is negative.",
        "The paper's; length-normalised: objective.level: geometric, by token: token.",
    ),
    "C27": D(
        "masking a sequence's product",
        "`mis-sequence`: two-sided 0.5 to 2; `mis-sequence-upper`: upper bound alone.",
        "Both are in use under one name; two-sided also drops what the learner finds very unlikely.",
    ),
    "C28": D(
        "weights on a ratio that the objective holds already",
        "Refused.",
        "Silently counting rho twice biases every gradient; some frameworks guard against it, others don't.",
    ),
}
