"""Presets whose objective is on r = theta/prox, and that leave the mismatch alone."""

from __future__ import annotations

from .preset import NO_STD, SEQUENCE_MEAN, SEQUENCE_SUM, Preset, clip, score

_TOKEN_CLIP = (
    "Objective-level hacking (30B mixture-of-experts): clipping single tokens makes the mismatch grow, the tighter the faster. Trust "
    "Region: a clip on the ratio holds rare tokens too tight and probable ones too loose."
)

DRIFT: dict[str, Preset] = {
    "ppo": Preset(
        {"objective": clip()},
        "max(-A r, -A clip(r, 0.8, 1.2)), token mean",
        "PPO (arXiv 1707.06347)",
        "Baseline with a proximal policy of the learner's own; mismatch is ignored.",
        found=_TOKEN_CLIP + " The contrary: a token clip keeps many runs stable, as the first of the two says itself.",
    ),
    "ppo-dual-clip": Preset(
        {"objective": clip(dual_clip=3.0)},
        "PPO, at most -3 A where A < 0",
        "arXiv 1912.09729; on by default in verl",
        "To reproduce verl's defaults; bounds the loss of bad answers whose ratio is huge.",
    ),
    "grpo": Preset(
        {"objective": clip(), "denominator": SEQUENCE_MEAN},
        "PPO clip, A = (R - mean) / std of the group, mean over sequences of token means",
        "DeepSeekMath (arXiv 2402.03300), which prints no clip: 0.2 is PPO's",
        "The usual first choice, and the first of the Miles post's four configurations. The paper's KL to a reference policy is off; set "
        "kl.coefficient: 0.04 and kl.estimator: k3 for it.",
        found=_TOKEN_CLIP + " Miles post (4B, dense): stable without any correction; no run was found that collapses.",
    ),
    "dr-grpo": Preset(
        {"objective": clip(), "denominator": {"kind": "constant"}, "advantage": NO_STD},
        "PPO clip, A = R - mean, token sum / constant length",
        "Dr.GRPO (arXiv 2503.20783)",
        "When answers grow long because wrong ones pay less per token.",
        "denominator.constant: the largest response length of the run",
    ),
    "dapo": Preset(
        {"objective": clip(0.2, 0.28)},
        "PPO clip(r, 0.8, 1.28), token mean",
        "DAPO (arXiv 2503.14476)",
        "Against entropy collapse: rare tokens may grow more. Dynamic sampling is a setting of the rollouts.",
        found="Objective-level hacking: of the upper clips 0.2, 0.24 and 0.28 this, the weakest, lets the mismatch grow slowest; it grows "
        "all the same. Trust Region: a higher clip keeps the entropy up (too high at scale) and gains little; relax-both gains.",
    ),
    "bandpo": Preset(
        {"objective": clip(0.2, 0.28, band={"divergence": "kl", "delta": 0.05})},
        "PPO clip(r; low, high), the ratios at which the token's own change makes KL(prox || theta) = 0.05, and at least 0.8 and 1.28",
        "BandPO (arXiv 2603.04918); constants and the widening to 0.8 and 1.28 of its authors' code",
        "When a clip on the ratio holds rare tokens back: at probability 0.01 a ratio may reach 7.8, at 0.5 1.31. Without the widening "
        "(objective.clip_low, clip_high: 0) probable tokens are held tighter, too: at 0.98 to 0.92 and 1.02.",
        "objective.band.delta: with 0.05 nearly every band is wider than 0.8 to 1.28",
        found="Its authors: better than clip and clip-higher on several models, and entropy stays up. On the same matter Trust Region: a "
        "clip on the ratio holds rare tokens too tight.",
    ),
    "gspo": Preset(
        {"objective": clip(3e-4, 4e-4, level="geometric"), "denominator": SEQUENCE_MEAN},
        "max(-A s, -A clip(s, 1 - 3e-4, 1 + 4e-4)), s = (prod r)^(1/n)",
        "GSPO (arXiv 2507.18071)",
        "Mixture-of-experts models, where token ratios jump with the routing.",
        found="Objective-level hacking: with it the mismatch does not grow as it does with clipped tokens, unless token weights are "
        "distorted again. Its table 1 has 8 to 15% clipped, against 0.1 to 0.3% under a token clip; clip_share here is of tokens, which "
        "is the share of sequences only where answers are equally long.",
    ),
    "luspo": Preset(
        {"objective": clip(3e-4, 4e-4, level="geometric"), "denominator": SEQUENCE_SUM},
        "GSPO times the sequence's length",
        "LUSPO (arXiv 2602.05261); bounds of GSPO",
        "Like GSPO, but long answers count by their length, so short ones are not preferred.",
    ),
    "gmpo": Preset(
        {"objective": {"kind": "geometric_clip", "log_clip": 0.4}, "denominator": SEQUENCE_MEAN},
        "-A exp(mean of log r clipped to 0.4 on A's side)",
        "GMPO (arXiv 2507.20673); 0.4 as in its scripts and TRL's documentation, second-hand",
        "When single outlier tokens dominate the mean ratio; a wider trust region than GSPO.",
    ),
    "ctpo": Preset(
        {"objective": {"kind": "prefix_clip"}},
        "max(-A x, -A clip(x, e^(-0.025 sqrt n), e^(0.05 sqrt n))), at most -A e^(0.05 sqrt n) where A < 0; x = prod r up to token n",
        "CTPO (arXiv 2605.07331); form and constants of its authors' code, whose script adds importance: {mode: truncate, level: sequence, "
        "upper: 5}",
        "Long answers, and several optimizer steps a batch: what the update did to earlier tokens counts, too, which a token's own ratio "
        "doesn't see, and late tokens may move further than early ones.",
        found="Its authors: the best average against GRPO and GSPO on mathematics with tools, at two model sizes.",
    ),
    "sapo": Preset(
        {"objective": {"kind": "soft_gate"}, "denominator": SEQUENCE_MEAN},
        "-A sigmoid(tau (r - 1)) 4 / tau, tau = 1 (A > 0) or 1.05",
        "SAPO (arXiv 2511.20347); temperatures as in verl, TRL, AReaL and SkyRL, second-hand",
        "When a clip's hard edge is unwanted: the gradient fades out instead of ending.",
    ),
    "cispo": Preset(
        {"objective": score("r", upper=5.0)},
        "-sg[min(r, 5)] A log theta, token mean",
        "CISPO in MiniMax-M1 (arXiv 2506.13585)",
        "When rare tokens such as 'wait' and 'however' must not lose their gradient: every token keeps one. There is no trust region.",
        "objective.upper: unpublished; 5 is what SkyRL and AReaL recommend (1 + 4)",
        found="MiniMax-M1 was trained with it. The contrary: Trust Region (on theta/mu, pg-tis here), takeaway 1: without a trust region "
        "the mismatch grows until the run collapses, small learning rate or not; at scale it collapsed on a mixture-of-experts model.",
    ),
    "m2po": Preset(
        {
            "objective": score("q"),
            "rejection": [{"statistic": "second_moment", "ratio": "q", "only_outward": True, "upper": 0.04}],
        },
        "-sg[M q] A log theta, token mean; of the tokens that a clip would look at (A > 0 and q > 1, A < 0 and q < 1), M drops those of "
        "largest (log q)^2 until the mean of their rest is <= 0.04",
        "M2PO (arXiv 2510.01161), Algorithm 1 of the version of ICLR 2026, as ms-swift pull request 9965 describes it. The authors' code "
        "caps the moments instead, counts a capped one as the cap, and so drops more; it decides for each micro-batch",
        "Very stale data: instead of a clip, the few worst tokens of an optimizer step are left out. Each optimizer step needs a forward "
        "pass before it.",
    ),
    "m2po-areal": Preset(
        {
            "objective": clip(),
            "rejection": [{"statistic": "second_moment", "ratio": "rho", "upper": 0.04, "is_open": True}],
            "denominator": {"count": "kept"},
        },
        "PPO clip(r); tokens of largest (log rho)^2 dropped until the mean of all is < 0.04; mean over kept tokens",
        "AReaL's m2_threshold, which it calls M2PO: a shortcut, on prox/mu instead of theta/mu, on tokens of every sign, and with PPO's "
        "clip besides",
        "To repeat AReaL's runs. With a proximal policy that equals the behaviour policy it is PPO. Always needs the proximal forward.",
    ),
    "k3-sequence": Preset(
        {"objective": clip(), "rejection": [{"statistic": "k3", "level": "geometric", "upper": 0.01}]},
        "1[mean of rho - 1 - log rho over the sequence <= 0.01] PPO(r)",
        "verl decoupled_k3_rs (rollout_rs: seq_mean_k3), code of 1dda039b9",
        "Answers on which engine and learner part are left out, whichever way: k3 is never negative, so differences of both signs add up, "
        "while in a geometric mean of ratios they cancel.",
        "rejection.upper: verl names 0.001 to 0.1 as typical; it must lie above the run's own mismatch_k3_kl",
        found="verl's documentation: more stable than a geometric mean of ratios where KLs are small; no figure, and no run was read.",
    ),
    "clip-cov": Preset(
        {"objective": clip(), "covariance": {"action": "drop"}},
        "PPO clip(r); of the tokens with 1 < (A - mean A) (log theta - mean log theta) < 5 that it doesn't clip, 0.02% of all, drawn at "
        "random, are left out",
        "The Entropy Mechanism (arXiv 2505.22617); its authors' code, where means and draw are a micro-batch's",
        "Against the fall of entropy, at its cause: tokens that are probable and rewarded. Each optimizer step needs a forward pass before "
        "it.",
        "covariance.share: at least one token of a step is left out, of a step of 5,000 tokens that is the 0.02%",
        found="Its authors: on Qwen2.5 entropy stays up, and the mean of seven tests is 1.8 points above GRPO (7B), 4.5 (32B); clip-higher "
        "0.2 and 1.4.",
    ),
    "kl-cov": Preset(
        {"objective": score("r"), "covariance": {"action": "penalty"}},
        "-sg[r] A log theta, plus |log r| at the 0.02% of tokens with the largest (A - mean A) (log theta - mean log theta)",
        "The Entropy Mechanism (arXiv 2505.22617); its authors' code, where the means are a micro-batch's; the paper has a KL, not |log r|",
        "As clip-cov; holds the tokens that would take most entropy to the proximal policy. Needs several optimizer steps a batch: at "
        "r = 1, in the first one, |log r| has no slope.",
        "covariance.coefficient: 1 in the code, 0.1 in verl's configuration",
        found="Its authors: as clip-cov, 2.0 points above GRPO (7B) and 6.4 (32B), with entropy at ten times GRPO's where that levels off.",
    ),
    "opsm": Preset(
        {
            "objective": clip(),
            "denominator": SEQUENCE_MEAN,
            "rejection": [{"statistic": "k1", "ratio": "q", "level": "geometric", "upper": 0.1, "side": "negative"}],
        },
        "PPO clip; sequences with A < 0 and mean log(mu / theta) > 0.1 dropped",
        "DeepSeek-V3.2 (arXiv 2512.02556), Eq. 9",
        "When wrong answers are stale: leaves out those that the policy would hardly give any more.",
        "rejection.upper: unpublished; 1e-4 (slime), 0.05-0.2 (Trinity), 0.5 (TRL) are in use",
        found="Trust Region, takeaway 3, points the same way: what destabilises is a small share of updates on negative samples.",
    ),
}
"""Presets by name."""
