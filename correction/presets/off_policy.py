"""Presets on q = theta/mu: most need no proximal forward."""

from __future__ import annotations

from .preset import (
    BYPASS,
    NO_STD,
    SEQUENCE_MEAN,
    SEQUENCE_SUM,
    Preset,
    band,
    clip,
    clip_gate,
    divergence_gate,
    gated,
    score,
)

TRUST_REGION = "Trust Region (arXiv 2602.04879)"
_NO_REGION = "Trust Region, takeaway 1: without a trust region the mismatch grows until the run collapses, small learning rate or not."
_RECOMPUTED = (
    "Trust Region, takeaway 2: with the recomputed policy as anchor the mismatch grows and the run collapses; take dppo-binary-tv. The "
    "contrary: MiniRL's authors, AReaL and verl anchor there."
)
_STABLE = (
    "Trust Region: stable, close to 100% in its sanity test, where no trust region, or one round the recomputed policy, ends in collapse. "
    "Against gates on single tokens in general: Objective-level hacking, for mixture-of-experts models."
)
_AT_SCALE = "Trust Region: stable and best in its five large runs; without routing replay better than the baselines with it."

OFF_POLICY: dict[str, Preset] = {
    "bypass": Preset(
        {**BYPASS, "objective": clip()},
        "PPO(q): prox = mu",
        "verl bypass_ppo_clip; Miles post, 'bypassing'",
        "The cheapest: no proximal forward; the clip sees mismatch, staleness and drift together.",
        found="Trust Region, takeaway 2: the trust region belongs round the sampling policy, and a quarter of the cost is saved. Its runs "
        "with a clip on theta/mu (grpo-clip-higher) are less stable than DPPO's.",
    ),
    "pg": Preset(
        {**BYPASS, "objective": score(None)},
        "-A log theta, token mean",
        "REINFORCE; GPG",
        "On-policy data and one optimizer step a batch; there is no correction at all.",
        found="Miles post: with REINFORCE k3 first fell, and after 600 steps rose steeply; rewards stayed.",
    ),
    "pg-is": Preset(
        gated(None, proximal=BYPASS),
        "-sg[q] A log theta, token sum",
        f"{TRUST_REGION}, Eq. 23",
        "The plain off-policy estimator, for comparison.",
        found=_NO_REGION + " It lasts longer than truncated (pg-tis), and is stable with minimal-mask's gate.",
    ),
    "pg-tis": Preset(
        gated(None, upper=3.0, proximal=BYPASS),
        "-sg[min(q, 3)] A log theta, token sum",
        f"{TRUST_REGION}, sec. 5: 'PG-TIS (CISPO)', C = 3",
        "For comparison: bounded variance, and no trust region.",
        found=_NO_REGION + " Sec. 5.4: truncating makes it collapse earlier.",
    ),
    "pg-tis-scale": Preset(
        gated(None, upper=5.0, proximal=BYPASS),
        "-sg[min(q, 5)] A log theta, token sum",
        f"{TRUST_REGION}, sec. 7: 'CISPO', C = 5",
        "For comparison: the Trust Region paper's CISPO at scale.",
        found="Trust Region: collapsed suddenly on a mixture-of-experts model without routing replay, decayed on a dense one.",
    ),
    "pg-sequence": Preset(
        {**BYPASS, "objective": score(None), "importance": {"mode": "truncate", "level": "sequence", "upper": 2.0}},
        "-min(prod q, 2) A log theta",
        "verl bypass_pg_is",
        "Correction of whole sequences without a proximal forward; the weights follow pi_theta.",
    ),
    "pg-clip": Preset(
        {**BYPASS, "objective": score(lower=0.8, upper=1.28), "denominator": SEQUENCE_MEAN},
        "-sg[clip(q, 0.8, 1.28)] A log theta, mean over sequences of token means",
        "miles pull request 1344 (off_policy_is_function on REINFORCE, with its default bounds)",
        "One weight for mismatch and staleness that no token can raise or lower much: every token keeps a gradient, as in cispo.",
        "objective.lower, objective.upper: 0 and 5 give the one-sided form that MiniMax-M1 and ScaleRL use",
        found="tinker-cookbook pull request 763: on stale data a lower bound keeps up the weight of tokens that the policy has moved away "
        "from, and the KL of sampler and trainer may run away; it recommends no lower bound and an upper one of about 4.",
    ),
    "dro": Preset(
        {
            **BYPASS,
            "objective": score(None),
            "denominator": SEQUENCE_SUM,
            "advantage": NO_STD,
            "kl": {"coefficient": 0.05, "estimator": "k2", "anchor": "behavior"},
        },
        "-A log theta + 0.05 / 2 (log q)^2, token sum",
        "Kimi k1.5 (arXiv 2501.12599), DRO (arXiv 2405.19107), in the form by token of Tinker's and verl's dro; in the papers (log q)^2 is "
        "of the whole sequence. The 0.05 is Tinker's example",
        "Stale data without any weight or clip: a square pulls each token back to the policy that sampled it, the further the harder.",
        "kl.coefficient: the papers' tau or beta; on rewards of 0 and 1 none is printed that was read",
        found="Kimi k1.5 was trained with the form by sequence. Trust Region has no run with it.",
    ),
    "mirror-descent": Preset(
        {
            **BYPASS,
            "objective": score(None),
            "denominator": SEQUENCE_SUM,
            "advantage": NO_STD,
            "kl": {"coefficient": 1e-3, "estimator": "k2", "anchor": "behavior", "level": "sequence"},
        },
        "-A log theta + 1e-3 / 2 (sum of log q over the sequence)^2, token sum",
        "Kimi k1.5 (arXiv 2501.12599), Eq. 3; the 1e-3 is OAPL's",
        "Stale data, as dro, held back by whole answers: what a token did may be made up for by another. The pull grows with length.",
        "kl.coefficient: the paper prints no tau; whether its anchor is the sampler's own logprobs or recomputed (proximal: recompute, "
        "kl.anchor: proximal) isn't said either",
        found="Kimi k1.5 was trained with it; its report has no run without the square.",
    ),
    "oapl": Preset(
        {
            **BYPASS,
            "objective": score(None),
            "denominator": SEQUENCE_SUM,
            "advantage": {"estimator": "soft_value"},
            "kl": {"coefficient": 1e-3, "estimator": "k2", "anchor": "behavior", "level": "sequence"},
        },
        "-A log theta + 1e-3 / 2 (sum of log q)^2, A = R - log mean exp R over the group: the gradient of (1e-3 sum of log q - A)^2 / 2e-3",
        "OAPL (arXiv 2602.19362); form and constants of its authors' code, whose loss is 2e-3 times this one",
        "Very stale data: a regression of the answer's log ratio onto the advantage of the best policy; no weight, no clip.",
        found="OAPL: ahead of GRPO with importance weights on competition mathematics, and stable at lags over 400 steps; the code that "
        "was read is that of its offline experiment.",
    ),
    "delightful": Preset(
        {**BYPASS, "objective": score(None, delight={})},
        "-sg[sigmoid(A min(-log theta, 10))] A log theta, token mean",
        "Delightful Policy Gradient (arXiv 2603.14608); the 10 is miles' (pull request 2348), the paper has no limit",
        "When rare tokens of wrong answers take up the update: they fade out, rare tokens of right answers weigh up to twice as much as "
        "probable ones. There is no correction and no trust region; objective.ratio: q adds the first, objective.gate the second.",
        "objective.delight.gain: 2 where the learning rate is that of a policy gradient without the factor",
        found="Its paper: ahead of REINFORCE and PPO on MNIST, sequence modelling and control; no run on a language model was read. The "
        "contrary: Objective-level hacking finds any weight by a token's probability harmful in mixture-of-experts models.",
    ),
    "grpo-clip-higher": Preset(
        gated(clip_gate("q", 0.28), proximal=BYPASS),
        "-M(q; 0.8, 1.28) sg[q] A log theta, token sum",
        f"{TRUST_REGION}, sec. 5 and App. D: 'GRPO' with Clip-Higher, C = inf",
        "The Trust Region paper's main baseline: PPO's clip, anchored on the sampling policy.",
        found="Trust Region: a baseline of its sec. 5, whose text has it at scale alone: see grpo-clip-higher-scale.",
    ),
    "grpo-clip-higher-scale": Preset(
        gated(clip_gate("q", 0.27), upper=5.0, proximal=BYPASS),
        "-M(q; 0.8, 1.27) sg[min(q, 5)] A log theta, token sum",
        f"{TRUST_REGION}, sec. 7 and App. F: 'GRPO-ClipHigher', C = 5",
        "The same baseline with the constants of the large runs.",
        found="Trust Region: slower and lower than DPPO in all five large runs, with too high an entropy; collapsed on a thinking model.",
    ),
    "grpo-relax-both": Preset(
        gated(clip_gate("q", 0.28, relax={"below": 0.1, "ends": "both"}), proximal=BYPASS),
        "-M(q; 0.8, 1.28, none where mu < 0.1) sg[q] A log theta, token sum",
        f"{TRUST_REGION}, sec. 6: 'Relax-both', alpha = 0.1",
        "When a clip on the ratio holds rare tokens back. objective.gate.relax.ends: low or high gives the paper's other two.",
        found="Trust Region: learns clearly faster than with the clip for all tokens (grpo-clip-higher). Relax-low is fast, then drops as "
        "entropy collapses; relax-high keeps the entropy and gains little. The contrary: Objective-level hacking finds any token-level "
        "modulation risky in mixture-of-experts models, and more weight on rare tokens harmful.",
    ),
    "minimal-mask": Preset(
        gated(divergence_gate("binary_tv", 0.5, side="negative", is_open=True), proximal=BYPASS),
        "-M sg[q] A log theta, M = 0 if A < 0 and mu - theta >= 0.5, token sum",
        f"{TRUST_REGION}, sec. 5.3",
        "To see whether a few updates that push likely tokens down are what destabilises a run: it blocks those alone.",
        found="Trust Region, takeaway 3: enough to keep policy gradient stable, though bad updates are at most 0.5% of all; a threshold "
        "of 0.8 is not, nor is the recomputed policy as anchor (proximal: recompute, objective.gate.ratio: r).",
    ),
    "minirl": Preset(
        gated(clip_gate("r", 0.27), upper=5.0),
        "-M(r; 0.8, 1.27) sg[min(q, 5)] A log theta, token sum",
        "MiniRL (arXiv 2512.01374); the 5 is second-hand",
        "To train as MiniRL's authors do large mixture-of-experts models, with routing replay when off-policy.",
        "objective.upper: 5 was not checked against the paper; Trust Region runs it with 3 and without bound",
        found=_RECOMPUTED,
    ),
    "minirl-untruncated": Preset(
        gated(clip_gate("r", 0.28)),
        "-M(r; 0.8, 1.28) sg[q] A log theta, token sum",
        f"{TRUST_REGION}, sec. 5 and App. D: 'MiniRL', C = inf",
        "For comparison, with minirl-tis: the two differ in truncation alone.",
        found=_RECOMPUTED + " It lasts longer than minirl-tis.",
    ),
    "minirl-tis": Preset(
        gated(clip_gate("r", 0.28), upper=3.0),
        "-M(r; 0.8, 1.28) sg[min(q, 3)] A log theta, token sum",
        f"{TRUST_REGION}, sec. 5 and App. D: 'MiniRL-TIS', C = 3",
        "For comparison, with minirl-untruncated: the two differ in truncation alone.",
        found="Trust Region, sec. 5.4: collapses earlier and ends lower than minirl-untruncated. The contrary, for TIS: see tis-token.",
    ),
    "dppo-binary-tv": Preset(
        gated(divergence_gate("binary_tv", 0.15), proximal=BYPASS),
        "-M sg[q] A log theta, M = 0 if |mu - theta| > 0.15 and moving out, token sum",
        f"{TRUST_REGION}, sec. 5",
        "A trust region in probability: rare tokens may move, nearly certain ones are held.",
        found=_STABLE,
    ),
    "dppo-binary-tv-scale": Preset(
        gated(divergence_gate("binary_tv", 0.2), upper=5.0, proximal=BYPASS),
        "-M sg[min(q, 5)] A log theta, |mu - theta| > 0.2, token sum",
        f"{TRUST_REGION}, sec. 7 (0.15 with LoRA)",
        "DPPO (dppo-binary-tv) on large models.",
        found=_AT_SCALE + " Its bound C = 5 is at odds with its own sec. 5.4 against truncation.",
    ),
    "dppo-binary-kl": Preset(
        gated(divergence_gate("binary_kl", 0.05), proximal=BYPASS),
        "-M sg[q] A log theta, binary KL(mu||theta) > 0.05, token sum",
        f"{TRUST_REGION}, sec. 5",
        "Like dppo-binary-tv, stricter on nearly certain tokens.",
        found=_STABLE + " Anchored on the recomputed policy (proximal: recompute, objective.gate.ratio: r) it collapses.",
    ),
    "dppo-binary-kl-scale": Preset(
        gated(divergence_gate("binary_kl", 0.05), upper=5.0, proximal=BYPASS),
        "-M sg[min(q, 5)] A log theta, binary KL(mu||theta) > 0.05, token sum",
        f"{TRUST_REGION}, sec. 7 and App. F",
        "DPPO (dppo-binary-kl) on large models.",
        found=_AT_SCALE,
    ),
    "dppo-topk-tv": Preset(
        gated(divergence_gate("topk_tv", 0.2), upper=5.0, proximal=BYPASS),
        "-M sg[min(q, 5)] A log theta, top-K TV > 0.2 (K = 20), token sum",
        f"{TRUST_REGION}, sec. 7 and App. G.2",
        "Closer to the true divergence than dppo-binary-tv; the engine must return its top 20 logprobs.",
        found="Trust Region: no better than the binary form, which is enough.",
    ),
    "dppo-topk-kl": Preset(
        gated(divergence_gate("topk_kl", 0.05), upper=5.0, proximal=BYPASS),
        "-M sg[min(q, 5)] A log theta, top-K KL > 0.05 (K = 20), token sum",
        f"{TRUST_REGION}, sec. 7 and App. G.2",
        "Like dppo-topk-tv, with a KL divergence.",
        found="Trust Region: no better than the binary form, which is enough.",
    ),
    "topr": Preset(
        {
            **BYPASS,
            "objective": score(level="sequence", upper=1.0, only_negative=True),
            "denominator": SEQUENCE_SUM,
            "advantage": NO_STD,
        },
        "-sg[1 if A >= 0 else min(prod q, 1)] A log theta",
        "TOPR (arXiv 2503.14286)",
        "Old data: wrong answers lose weight as they grow old, right ones are learnt like demonstrations.",
    ),
    "vespo": Preset(
        {**BYPASS, "objective": {"kind": "gamma"}},
        "-sg[e^l w^k e^(-l w)] A log theta, w = prod q",
        "VESPO (arXiv 2602.10693); constants as in TRL, second-hand",
        "When whole sequences are weighted and no hard bound is wanted: weights fade out on both sides.",
    ),
    "rollout-is": Preset(
        {**BYPASS, "objective": score(), "rejection": [band(0.8, 1.28, ratio="q", is_open=True)]},
        "-sg[q 1(0.8 < q < 1.28)] A log theta",
        "GLM-5 (arXiv 2602.15763); SkyRL rollout_is",
        "No proximal forward: tokens outside of the band are left out, whatever their advantage.",
    ),
    "sao-mask": Preset(
        {**BYPASS, "objective": score(), "rejection": [band(0.2, 4.0, ratio="q", is_open=True)]},
        "-sg[q 1(0.2 < q < 4)] A log theta, A of the group instead of a critic",
        "SAO (arXiv 2607.07508), 'direct double-sided importance sampling'; the 0.2 and 4 are those of Lego-RL pull request 8",
        "rollout-is with the bounds that were meant for agents' long answers: only what is far off is left out.",
        "rejection bounds: the paper's were not read; 0.8 and 1.28 are in use (rollout-is)",
        found="SAO, as verl issue 7100 quotes it: with one answer a prompt and a critic stable for about 1,000 asynchronous steps, where "
        "GRPO collapsed at about 160. The critic isn't part of it here, so the finding says nothing about the mask alone.",
    ),
    "prime-tv": Preset(
        {
            **gated(divergence_gate("binary_tv", 0.2), proximal=BYPASS),
            "denominator": {"kind": "token_mean"},
            "kl": {"coefficient": 2e-3, "estimator": "k2", "anchor": "behavior"},
        },
        "-M sg[q] A log theta + 1e-3 (log q)^2, |mu - theta| > 0.2",
        "prime-rl default loss, code of 559b44772",
        "To reproduce prime-rl's default loss.",
    ),
    "prime-ipo": Preset(
        {
            **BYPASS,
            "objective": score(),
            "rejection": [{"statistic": "binary_tv", "ratio": "q", "upper": 0.1}],
            "advantage": NO_STD,
            "kl": {"coefficient": 2e-3, "estimator": "k2", "anchor": "behavior"},
        },
        "-1[|theta - mu| <= 0.1] sg[q] A log theta + 1e-3 (log q)^2",
        "prime-rl ipo",
        "A trust region in probability that is the same on both sides.",
    ),
}
"""Presets by name."""
