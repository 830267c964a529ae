"""Presets that correct the mismatch: weights and rejection on rho = prox/mu, PPO on r = theta/prox; or on rho's part that is mismatch
alone, and PPO on all that training did since the token was sampled."""

from __future__ import annotations

from .preset import NORMALIZED, SEQUENCE_MEAN, Preset, band, clip, truncate

_TOKEN_TRUNCATION = (
    "Objective-level hacking (mixture-of-experts, GRPO): slows the growth of the mismatch and the fall of the entropy, and validates "
    "better; the mismatch still grows. Miles post: no harm. The contrary: Trust Region, sec. 5.4: truncation makes runs less stable "
    "throughout, since it takes weight from rare tokens; Speed-kills note: enough in simple settings alone, does not bring a crashed run "
    "back, and rewards fluctuate under it."
)
_TOKEN_MASK = (
    "Miles post: IS with rejection does no harm, and with normalisation (from step 650) made a growing k3 fall again. The contrary: "
    "Speed-kills note: masks by token collapse on long reasoning, masks by sequence hold."
)
_OLD_LOGITS = "Missing Old Logits (arXiv 2605.12070), the exact form, which its abstract names"
_EARLIER_WEIGHTS = "Every rank keeps its last max_staleness versions, and stale tokens take a forward pass at each that they have."
_SPLIT_FOUND = (
    "Its authors: with the two told apart again, agents train faster and better; what they recommend is an average of weights in the place "
    "of pi_v, which costs no copies and isn't this."
)
_MILES = "Miles post, 'IS won't harm performance'"
_MILES_SOURCE = "clip and group advantages of its example script; bounds of slime's and Miles' example files, the post prints none"
_MILES_BOUNDS = "the post prints no bounds; 0.5-2 by token, and 0.99-1.001 of the geometric mean, have been in the example file"
_MILES_COUNT = (
    f"{_MILES_BOUNDS}. Whether rejected tokens counted in the post's runs is open: since slime pull request 657 (November 2025) the mean "
    "there is over kept tokens, before it was over all, as here; denominator.count: kept is the other reading"
)
_MILES_CLIP = clip(0.2, 0.28)

MISMATCH: dict[str, Preset] = {
    "tis-token": Preset(
        {"objective": clip(), "importance": truncate(2.0)},
        "min(rho, 2) PPO(r)",
        "Yao et al. (2025), truncated importance sampling; the 2 is verl's (decoupled_token_is)",
        "A small mismatch and a simple setting: low variance, some bias. Sources disagree about it.",
        found=_TOKEN_TRUNCATION,
    ),
    "tis-sequence": Preset(
        {"objective": clip(), "importance": truncate(2.0, "sequence")},
        "min(prod rho, 2) PPO(r)",
        "Speed-kills note (sequence-level TIS, which prints no bound); the 2 is verl's (decoupled_seq_is)",
        "Short answers: unbiased up to the bound, but the variance of the product grows with length.",
        found="Speed-kills note: brings a run back that crashed with token-level TIS; rewards fluctuate, and it tests below no "
        "correction; mis-sequence-upper does better. Miles post: only for a very small mismatch or large batches, and normalised.",
    ),
    "tis-sequence-normalized": Preset(
        {"objective": clip(), "importance": truncate(5.0, "sequence"), "normalize": NORMALIZED},
        "min(prod rho, 5) / mean PPO(r)",
        "Miles post, batch normalisation, which prints no bound; the 5 is SkyRL's at this level",
        "Weights of whole sequences whose mean would change from batch to batch, and with it the step: the mean is 1, the bound is wider.",
        "importance.upper: 2 to 10 are usual at this level (verl)",
        found="Miles post: recommends the normalisation strongly at this level; its experiments are on tokens.",
    ),
    "tis-geometric-normalized": Preset(
        {"objective": clip(), "importance": truncate(2.0, "geometric"), "normalize": NORMALIZED},
        "min(geo rho, 2) / mean PPO(r)",
        "Miles post, geometric level with batch normalisation, which prints no bound; its example file has 1.0001 without normalisation",
        "Long answers: a weight for each sequence that does not grow with length; biased, of low variance.",
        "importance.upper: 2 hardly ever takes hold at this level; the normalisation does the work",
        found="Miles post: recommends the normalisation strongly at this level; its own code refuses the two together.",
    ),
    "split-tis": Preset(
        {"objective": clip(ratio="since_sampling"), "importance": truncate(2.0, ratio="mismatch")},
        "min(m, 2) PPO(theta / pi_v); pi_v: the learner at the weights that sampled the token, m = pi_v / mu",
        f"{_OLD_LOGITS}; the constants are tis-token's",
        "Stale data from an engine that differs from the learner: the weight sees the engines' difference alone, the clip how far training "
        f"has moved the token since it was sampled. {_EARLIER_WEIGHTS}",
        "importance.upper, objective.clip_low, clip_high: the paper's were not read",
        found=_SPLIT_FOUND,
    ),
    "split-mis": Preset(
        {
            "objective": clip(ratio="since_sampling"),
            "importance": truncate(2.0, ratio="mismatch"),
            "rejection": [band(0.5, 2.0, ratio="mismatch")],
        },
        "1[0.5 <= m <= 2] min(m, 2) PPO(theta / pi_v); m = pi_v / mu",
        f"{_OLD_LOGITS}; the constants are mis-token's",
        f"split-tis where few tokens have a large mismatch: those are left out, and none for its age. {_EARLIER_WEIGHTS}",
        "rejection bounds, objective.clip_low, clip_high: the paper's were not read",
        found=_SPLIT_FOUND,
    ),
    "mis-token": Preset(
        {"objective": clip(), "importance": truncate(2.0), "rejection": [band(0.5, 2.0)]},
        "1[0.5 <= rho <= 2] min(rho, 2) PPO(r)",
        "Miles mis example; its bounds",
        "When few tokens have a large mismatch: those are left out.",
        found=_TOKEN_MASK,
    ),
    "mis-token-upper": Preset(
        {"objective": clip(), "importance": {"mode": "mask", "upper": 3.0}},
        "1[rho <= 3] rho PPO(r)",
        "Token-level MIS of the Speed-kills note, which prints no bound; the 3 is TRL's (token_mask)",
        "For comparison with mis-sequence-upper: the same rule, token by token.",
        "importance.upper: 3 (TRL), 2 (verl's usual bound), 5 (AReaL) are in use",
        found="Speed-kills note: collapses where mis-sequence-upper holds.",
    ),
    "mis-sequence": Preset(
        {"objective": clip(), "importance": truncate(2.0, "sequence"), "rejection": [band(0.5, 2.0, "sequence")]},
        "1[0.5 <= prod rho <= 2] min(prod rho, 2) PPO(r)",
        "verl decoupled_seq_is_rs",
        "Short answers of which the learner finds some very unlikely: those are left out too. It drops long answers first.",
        found="The findings about MIS are about mis-sequence-upper, which has no lower bound.",
    ),
    "mis-sequence-upper": Preset(
        {"objective": clip(), "importance": {"mode": "mask", "level": "sequence", "upper": 3.0}},
        "1[prod rho <= 3] prod rho PPO(r)",
        "Sequence-level MIS of the Speed-kills note, which prints no bound; the 3 is TRL's (sequence_mask, its default)",
        "Long reasoning, and runs that collapse with corrections by token. Long answers weigh little or fall out.",
        "importance.upper: 3 (TRL), 2 to 10 (verl) are in use",
        found="Speed-kills note: stable, and above the best rewards of no correction and of TIS, where MIS by token collapses. "
        "Objective-level hacking prefers whole sequences too. The contrary: Miles post: the product's variance is extreme, for a very "
        "small mismatch alone.",
    ),
    "mis-geometric": Preset(
        {"objective": clip(), "importance": truncate(2.0), "rejection": [band(0.999, 1.001, "geometric")]},
        "1[0.999 <= geo rho <= 1.001] min(rho, 2) PPO(r)",
        "verl decoupled_geo_rs_token_tis; sequence masking, part 3 of the RL-collapse series",
        "Engines that agree almost to the last bit: only while KL < 1e-3 (the mean of log rho is -KL, at any length) and answers have "
        "more than (std/1e-3)^2 tokens, std that of log rho. Beyond, it leaves out nearly everything.",
        "rejection bounds: 0.999-1.001, 0.99-1.01, 0.9999-1.0001 are in use; take the width from the run's own KL",
        found="With an exact sampler, answers of 16 to 2048 tokens and a k3 of 0.008 it rejects 97 of 100 sequences. slime's example "
        "calls the level extremely selective.",
    ),
    "mis-geometric-miles": Preset(
        {
            "objective": clip(),
            "importance": {"mode": "clip", "lower": 0.5, "upper": 1.5},
            "rejection": [band(0.99, 1.001, "geometric")],
        },
        "1[0.99 <= geo rho <= 1.001] clip(rho, 0.5, 1.5) PPO(r)",
        "Miles' example file, examples/train_infer_mismatch_helper/mis.yaml of radixark/miles at commit 5522da06: its band and its 0.5 and "
        "1.5. There the weights are truncated at 1.5, and veto and batch normalisation are on besides; the clip at 0.5 is unverified",
        "A KL up to 0.01 and long answers. The band is lopsided since the mean of log rho is -KL: sequences lie below 1, not round it.",
        "rejection.lower: exp(-KL) of the run must lie above it, with room for the scatter of short answers",
        found="Miles post: turned on at step 650 (IS, rejection, normalisation; the level isn't said) it made a growing k3 fall again.",
    ),
    "mis-full": Preset(
        {
            "objective": clip(),
            "importance": truncate(2.0),
            "rejection": [band(0.5, 2.0)],
            "veto": {"quantity": "ratio"},
            "normalize": NORMALIZED,
        },
        "1[0.5 <= rho <= 2] 1[no rho < 1e-4] min(rho, 2) / mean PPO(r)",
        "Miles mis example file, everything on",
        "Strong mismatch, or mismatch of unknown cause: all safeguards together.",
        found=_TOKEN_MASK,
    ),
    "miles-baseline": Preset(
        {"objective": _MILES_CLIP, "denominator": SEQUENCE_MEAN},
        "PPO(r; 0.8, 1.28), A = (R - mean) / std, mean over sequences of token means",
        f"{_MILES}, configuration 1: no correction; clip and group advantages of its example script",
        "To repeat the Miles post's comparison.",
        found="Miles post: as stable as its three other configurations.",
    ),
    "miles-is": Preset(
        {"objective": _MILES_CLIP, "importance": truncate(2.0), "denominator": SEQUENCE_MEAN},
        "min(rho, 2) PPO(r; 0.8, 1.28), mean over sequences of token means",
        f"{_MILES}, configuration 2: token-level IS; {_MILES_SOURCE}",
        "To repeat the Miles post's comparison.",
        _MILES_BOUNDS,
        found=_TOKEN_TRUNCATION,
    ),
    "miles-mis": Preset(
        {"objective": _MILES_CLIP, "importance": truncate(2.0), "rejection": [band(0.5, 2.0)], "denominator": SEQUENCE_MEAN},
        "1[0.5 <= rho <= 2] min(rho, 2) PPO(r; 0.8, 1.28), mean over sequences of token means",
        f"{_MILES}, configuration 3: token-level IS and rejection; {_MILES_SOURCE}",
        "To repeat the Miles post's comparison.",
        _MILES_COUNT,
        found=_TOKEN_MASK,
    ),
    "miles-mis-normalized": Preset(
        {
            "objective": _MILES_CLIP,
            "importance": truncate(2.0),
            "rejection": [band(0.5, 2.0)],
            "normalize": NORMALIZED,
            "denominator": SEQUENCE_MEAN,
        },
        "1[0.5 <= rho <= 2] min(rho, 2) / mean PPO(r; 0.8, 1.28), mean over sequences of token means",
        f"{_MILES}, configuration 4: token-level IS, rejection and batch normalisation; {_MILES_SOURCE}",
        "To repeat the Miles post's comparison, and what it turns on at step 650.",
        _MILES_COUNT,
        found=_TOKEN_MASK,
    ),
    "icepop": Preset(
        {"objective": clip(), "importance": {"mode": "mask", "lower": 0.5, "upper": 5.0}, "denominator": SEQUENCE_MEAN},
        "rho 1[0.5 <= rho <= 5] PPO(r), mean over sequences of token means",
        "IcePop, Ring-1T (arXiv 2510.18855); formula as the KPop post repeats it; 0.5 and 5 as in verl, AReaL and NeMo-RL, second-hand",
        "Mismatch of mixture-of-experts models: tokens outside the band are left out on both sides, the others keep their ratio as weight.",
        "importance.lower, importance.upper: the post prints no default; 0.5-5, 0.5-2, 0.2-5, 0-2 are in use",
        found="KPop post, by its authors: as training goes on it masks ever fewer tokens while the gap widens; it is sensitive to its "
        "bounds (with 0.4 and 5 the gap grew dramatically) and masks rare tokens too much. Speed-kills note: masks by token collapse on "
        "long reasoning.",
    ),
    "kpop": Preset(
        {
            "objective": clip(),
            "importance": {"mode": "raw"},
            "rejection": [{"statistic": "binary_kl_max", "upper": 0.1}],
            "denominator": SEQUENCE_MEAN,
        },
        "rho 1[max(KL(prox||mu), KL(mu||prox)) <= 0.1, binary] PPO(r), mean over sequences of token means",
        "KPop post: IcePop with another mask; it says 'symmetric' and prints one direction. The 0.1 is from prime-rl pull request 3283",
        "A band in probability instead of ratio: wide for rare tokens, narrow for those that are nearly certain.",
        "rejection.upper: 0.1 is second-hand; AReaL ships 2.0, almost inert",
        found="KPop post: proposed against what its authors saw with IcePop; the copy that was read ends before its results.",
    ),
    "seq-mask-tis": Preset(
        {"objective": clip(), "importance": {"mode": "raw"}, "rejection": [band(0.999, 1.002, "geometric")]},
        "1[0.999 <= geo rho <= 1.002] rho PPO(r)",
        "NeMo-RL seq-mask-tis",
        "Engines that agree almost to the last bit (see mis-geometric: only while KL < 1e-3); the kept tokens have unbounded weights.",
        "rejection bounds: NeMo-RL leaves them to the user; 0.999 and 1.002 are its example's",
    ),
    "decoupled-ppo": Preset(
        {"objective": clip(), "importance": {"mode": "raw"}},
        "rho PPO(r), token mean",
        "Hilton et al. (2022); AReaL (arXiv 2505.24298)",
        "Stale data, with the trust region round the newest policy; the weights are unbounded.",
        found="AReaL and verl train so; Miles post: rho acts like a learning rate that shrinks where the policies part. The contrary: "
        "Trust Region, takeaway 2: with the recomputed policy as anchor the mismatch grows and the run collapses.",
    ),
    "a-3po": Preset(
        {"proximal": "interpolate", "objective": clip(), "importance": {"mode": "raw"}},
        "decoupled PPO with log prox = log mu / d + (1 - 1/d) log theta, d staleness",
        "A-3PO (arXiv 2512.06547); the weights 1/d as in AReaL's loglinear, second-hand",
        "Decoupled PPO without the proximal forward.",
    ),
}
"""Presets by name."""
