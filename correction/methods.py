"""Named methods of the literature, each a few lines of data over the same parts. A preset is no code path.

`settings` is what CorrectionConfig is built from; values not named there are the config's defaults. Where sources disagree,
docs/correction.md says what was decided and why. Symbols: rho = prox/mu, r = theta/prox, q = theta/mu, A advantage, w weight.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

PresetSettings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Preset:
    """One method."""

    settings: PresetSettings
    """Keys of CorrectionConfig."""
    formula: str
    """What is optimised, in one line."""
    source: str
    """Paper or code that defines it."""
    when: str
    """When to use it."""
    open_constant: str = ""
    """A constant that the source leaves open and that the user should choose; empty: none."""


def clip(low: float = 0.2, high: float = 0.2, **more: Any) -> PresetSettings:
    """PPO's objective."""
    return {"kind": "clip", "clip_low": low, "clip_high": high, **more}


def score(ratio: str | None = "q", **more: Any) -> PresetSettings:
    """A score-form objective."""
    return {"kind": "score", "ratio": ratio, **more}


def band(lower: float, upper: float, level: str = "token", **more: Any) -> PresetSettings:
    """A criterion on a ratio, rho unless said otherwise."""
    return {"statistic": "ratio", "level": level, "lower": lower, "upper": upper, **more}


def truncate(upper: float, level: str = "token") -> PresetSettings:
    """Truncated importance weights on rho."""
    return {"mode": "truncate", "level": level, "upper": upper}


SEQUENCE_MEAN: PresetSettings = {"kind": "sequence_mean"}
SEQUENCE_SUM: PresetSettings = {"kind": "sequence_sum"}
NO_STD: PresetSettings = {"estimator": "grpo_no_std"}
BYPASS: PresetSettings = {"proximal": "behavior"}


def dppo(divergence: str, threshold: float, *, upper: float | None = None) -> PresetSettings:
    """DPPO: policy gradient on q with a divergence gate anchored on the behaviour policy."""
    gate = {"kind": "divergence", "divergence": divergence, "threshold": threshold}
    return {**BYPASS, "objective": score(upper=upper, gate=gate), "denominator": SEQUENCE_SUM, "advantage": NO_STD}


def minirl(high: float, upper: float | None) -> PresetSettings:
    """MiniRL: policy gradient on q, gated like PPO on r."""
    gate = {"kind": "clip", "ratio": "r", "low": 0.2, "high": high}
    return {"objective": score(upper=upper, gate=gate), "denominator": SEQUENCE_SUM, "advantage": NO_STD}


TRUST_REGION = "Trust Region (arXiv 2602.04879)"

PRESETS: dict[str, Preset] = {
    # --- Objectives on r, no correction of the mismatch.
    "ppo": Preset(
        {"objective": clip()},
        "max(-A r, -A clip(r, 0.8, 1.2)), token mean",
        "PPO (arXiv 1707.06347)",
        "Baseline with a proximal policy of the learner's own; mismatch is ignored.",
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
        "DeepSeekMath (arXiv 2402.03300)",
        "The usual first choice. The paper's KL to a reference policy is off; set kl.coefficient: 0.04 and kl.estimator: k3 for it.",
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
    ),
    "gspo": Preset(
        {"objective": clip(3e-4, 4e-4, level="geometric"), "denominator": SEQUENCE_MEAN},
        "max(-A s, -A clip(s, 1 - 3e-4, 1 + 4e-4)), s = (prod r)^(1/n)",
        "GSPO (arXiv 2507.18071)",
        "Mixture-of-experts models, where token ratios jump with the routing.",
    ),
    "luspo": Preset(
        {"objective": clip(3e-4, 4e-4, level="geometric"), "denominator": SEQUENCE_SUM},
        "GSPO times the sequence's length",
        "LUSPO (arXiv 2602.05261)",
        "Like GSPO, but long answers count by their length, so short ones are not preferred.",
    ),
    "gmpo": Preset(
        {"objective": {"kind": "geometric_clip", "log_clip": 0.4}, "denominator": SEQUENCE_MEAN},
        "-A exp(mean of log r clipped to 0.4 on A's side)",
        "GMPO (arXiv 2507.20673)",
        "When single outlier tokens dominate the mean ratio; a wider trust region than GSPO.",
    ),
    "sapo": Preset(
        {"objective": {"kind": "soft_gate"}, "denominator": SEQUENCE_MEAN},
        "-A sigmoid(tau (r - 1)) 4 / tau, tau = 1 (A > 0) or 1.05",
        "SAPO (arXiv 2511.20347)",
        "When a clip's hard edge is unwanted: the gradient fades out instead of ending.",
    ),
    "cispo": Preset(
        {"objective": score("r", upper=5.0)},
        "-sg[min(r, 5)] A log theta, token mean",
        "CISPO in MiniMax-M1 (arXiv 2506.13585)",
        "When rare tokens such as 'wait' and 'however' must not lose their gradient: every token keeps one.",
        "objective.upper: unpublished; 5 is what SkyRL and AReaL recommend (1 + 4)",
    ),
    "m2po": Preset(
        {"objective": clip(), "rejection": [{"statistic": "second_moment", "ratio": "rho", "upper": 0.04}]},
        "PPO clip; tokens of largest (log rho)^2 dropped until the mean is < 0.04",
        "M2PO (arXiv 2510.01161), removal rule of AReaL",
        "Very stale data: only the few worst tokens are left out. Always needs the proximal forward.",
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
    ),
    # --- Weights and rejection on rho, PPO on r.
    "tis-token": Preset(
        {"objective": clip(), "importance": truncate(2.0)},
        "min(rho, 2) PPO(r)",
        "Yao et al. (2025), truncated importance sampling; verl decoupled_token_is",
        "The first choice against a small mismatch: low variance, some bias.",
    ),
    "tis-sequence": Preset(
        {"objective": clip(), "importance": truncate(2.0, "sequence")},
        "min(prod rho, 2) PPO(r)",
        "verl decoupled_seq_is",
        "Short answers: unbiased up to the bound, but the variance of the product grows with length.",
    ),
    "mis-token": Preset(
        {"objective": clip(), "importance": truncate(2.0), "rejection": [band(0.5, 2.0)]},
        "1[0.5 <= rho <= 2] min(rho, 2) PPO(r)",
        "Miles mis example",
        "When few tokens have a large mismatch: those are left out.",
    ),
    "mis-sequence": Preset(
        {"objective": clip(), "importance": truncate(2.0, "sequence"), "rejection": [band(0.5, 2.0, "sequence")]},
        "1[0.5 <= prod rho <= 2] min(prod rho, 2) PPO(r)",
        "Speed-kills-stability note; two-sided as verl decoupled_seq_is_rs",
        "Long reasoning, where runs with token-level masks were seen to collapse; it drops long answers first.",
    ),
    "mis-sequence-upper": Preset(
        {"objective": clip(), "importance": {"mode": "mask", "level": "sequence", "upper": 3.0}},
        "1[prod rho <= 3] prod rho PPO(r)",
        "Original MIS; TRL sequence_mask, its default",
        "To reproduce TRL's defaults.",
    ),
    "mis-geometric": Preset(
        {"objective": clip(), "importance": truncate(2.0), "rejection": [band(0.999, 1.001, "geometric")]},
        "1[0.999 <= geo rho <= 1.001] min(rho, 2) PPO(r)",
        "verl decoupled_geo_rs_token_tis; sequence masking, part 3 of the RL-collapse series",
        "Long answers: the criterion does not grow with length. The band must suit the precision of engine and learner.",
        "rejection bounds: 0.999-1.001, 0.99-1.01, 0.9999-1.0001 are in use",
    ),
    "mis-geometric-miles": Preset(
        {
            "objective": clip(),
            "importance": {"mode": "clip", "lower": 0.5, "upper": 1.5},
            "rejection": [band(0.99, 1.001, "geometric")],
        },
        "1[0.99 <= geo rho <= 1.001] clip(rho, 0.5, 1.5) PPO(r)",
        "Miles mismatch experiment",
        "To repeat the mismatch experiment that Miles published.",
    ),
    "mis-full": Preset(
        {
            "objective": clip(),
            "importance": truncate(2.0),
            "rejection": [band(0.5, 2.0)],
            "veto": {"quantity": "ratio", "lower": 1e-4},
            "normalize": {"population": "all"},
        },
        "1[0.5 <= rho <= 2] 1[no rho < 1e-4] min(rho, 2) / mean PPO(r)",
        "Miles mis example file, everything on",
        "Strong mismatch, or mismatch of unknown cause: all safeguards together.",
    ),
    "icepop": Preset(
        {"objective": clip(), "importance": {"mode": "mask", "lower": 0.5, "upper": 5.0}, "denominator": SEQUENCE_MEAN},
        "rho 1[0.5 <= rho <= 5] PPO(r), mean over sequences of token means",
        "IcePop, Ring-1T (arXiv 2510.18855)",
        "Mismatch of mixture-of-experts models: tokens outside the band are left out on both sides, the others keep their ratio as weight.",
    ),
    "kpop": Preset(
        {"objective": clip(), "importance": {"mode": "raw"}, "rejection": [{"statistic": "binary_kl_max", "upper": 0.1}]},
        "rho 1[max(KL(prox||mu), KL(mu||prox)) <= 0.1, binary] PPO(r)",
        "KPop post; prime-rl pull request 3283",
        "A band in probability instead of ratio: wide for rare tokens, narrow for those that are nearly certain.",
        "rejection.upper: 0.1 is second-hand; AReaL ships 2.0, almost inert",
    ),
    "seq-mask-tis": Preset(
        {"objective": clip(), "importance": {"mode": "raw"}, "rejection": [band(0.999, 1.002, "geometric")]},
        "1[0.999 <= geo rho <= 1.002] rho PPO(r)",
        "NeMo-RL seq-mask-tis",
        "Leaves out sequences by their geometric mean ratio; the tokens of the others have unbounded weights.",
    ),
    "decoupled-ppo": Preset(
        {"objective": clip(), "importance": {"mode": "raw"}},
        "rho PPO(r), token mean",
        "Hilton et al. (2022); AReaL (arXiv 2505.24298)",
        "Stale data, with the trust region round the newest policy; the weights are unbounded.",
    ),
    "a-3po": Preset(
        {"proximal": "interpolate", "objective": clip(), "importance": {"mode": "raw"}},
        "decoupled PPO with log prox = log mu / d + (1 - 1/d) log theta, d staleness",
        "A-3PO (arXiv 2512.06547); AReaL loglinear",
        "Decoupled PPO without the proximal forward.",
    ),
    # --- On q: no proximal forward.
    "bypass": Preset(
        {**BYPASS, "objective": clip()},
        "PPO(q): prox = mu",
        "verl bypass_ppo_clip",
        "The cheapest: no proximal forward; the clip sees mismatch, staleness and drift together.",
    ),
    "pg": Preset(
        {**BYPASS, "objective": score(None)},
        "-A log theta, token mean",
        "REINFORCE; GPG",
        "On-policy data and one optimizer step a batch; there is no correction at all.",
    ),
    "pg-is": Preset(
        {**BYPASS, "objective": score(), "denominator": SEQUENCE_SUM, "advantage": NO_STD},
        "-sg[q] A log theta",
        f"{TRUST_REGION}, Eq. 23",
        "The plain off-policy estimator, for comparison.",
    ),
    "pg-tis": Preset(
        {**BYPASS, "objective": score(upper=3.0), "denominator": SEQUENCE_SUM, "advantage": NO_STD},
        "-sg[min(q, 3)] A log theta",
        f"{TRUST_REGION}, 'CISPO' there (C = 3; 5 in its scaling runs)",
        "Policy gradient with bounded variance and no trust region.",
    ),
    "pg-sequence": Preset(
        {**BYPASS, "objective": score(None), "importance": {"mode": "truncate", "level": "sequence", "upper": 2.0}},
        "-min(prod q, 2) A log theta",
        "verl bypass_pg_is",
        "Correction of whole sequences without a proximal forward; the weights follow pi_theta.",
    ),
    "minirl": Preset(
        minirl(0.27, 5.0),
        "-M(r; 0.8, 1.27) sg[min(q, 5)] A log theta, token sum",
        "MiniRL (arXiv 2512.01374); the 5 is second-hand",
        "Large mixture-of-experts models, with routing replay when off-policy.",
    ),
    "minirl-tis": Preset(
        minirl(0.28, 3.0),
        "-M(r; 0.8, 1.28) sg[min(q, 3)] A log theta, token sum",
        f"{TRUST_REGION}, sec. 5",
        "To reproduce MiniRL as the Trust Region paper ran it.",
    ),
    "dppo-binary-tv": Preset(
        dppo("binary_tv", 0.15),
        "-M sg[q] A log theta, M = 0 if |mu - theta| > 0.15 and moving out",
        f"{TRUST_REGION}, sec. 5",
        "A trust region in probability: rare tokens may move, nearly certain ones are held.",
    ),
    "dppo-binary-tv-scale": Preset(
        dppo("binary_tv", 0.2, upper=5.0),
        "-M sg[min(q, 5)] A log theta, |mu - theta| > 0.2",
        f"{TRUST_REGION}, sec. 7",
        "DPPO (dppo-binary-tv) on large models.",
    ),
    "dppo-binary-kl": Preset(
        dppo("binary_kl", 0.05),
        "-M sg[q] A log theta, binary KL(mu||theta) > 0.05",
        f"{TRUST_REGION}, sec. 5",
        "Like dppo-binary-tv, stricter on nearly certain tokens.",
    ),
    "dppo-topk-tv": Preset(
        dppo("topk_tv", 0.2, upper=5.0),
        "-M sg[min(q, 5)] A log theta, top-K TV > 0.2 (K = 20)",
        f"{TRUST_REGION}, sec. 7",
        "Closer to the true divergence than dppo-binary-tv; the engine must return its top 20 logprobs.",
    ),
    "dppo-topk-kl": Preset(
        dppo("topk_kl", 0.05, upper=5.0),
        "-M sg[min(q, 5)] A log theta, top-K KL > 0.05 (K = 20)",
        f"{TRUST_REGION}, sec. 7",
        "Like dppo-topk-tv, with a KL divergence.",
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
        "VESPO (arXiv 2602.10693); TRL",
        "When whole sequences are weighted and no hard bound is wanted: weights fade out on both sides.",
    ),
    "rollout-is": Preset(
        {**BYPASS, "objective": score(), "rejection": [band(0.8, 1.28, ratio="q", is_open=True)]},
        "-sg[q 1(0.8 < q < 1.28)] A log theta",
        "GLM-5 (arXiv 2602.15763); SkyRL rollout_is",
        "No proximal forward: tokens outside of the band are left out, whatever their advantage.",
    ),
    "prime-tv": Preset(
        {
            **dppo("binary_tv", 0.2),
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


def preset_settings(name: str) -> PresetSettings:
    """PresetSettings of a preset.

    Raises: ConfigError with the nearest name.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"correction.preset = {name}: there is no such preset. {hint}`evenkeel presets` lists all {len(PRESETS)}.")
    return PRESETS[name].settings


def presets_table() -> str:
    """Markdown, one row for each preset, for README and command line."""
    titles = ["preset", "optimises", "when to use it", "source"]
    lines = [_row(titles), _row(["---"] * len(titles))]
    for name, preset in PRESETS.items():
        note = f" **Choose** `{preset.open_constant}`." if preset.open_constant else ""
        lines.append(_row([f"`{name}`", f"`{preset.formula}`", preset.when + note, preset.source]))
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
