"""What the sources found about corrections, in which setting, and who found the opposite: data for the page."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = {
    "K": "KPop post (2026)",
    "M": "Miles post on mismatch (2025)",
    "O": "Probing RLVR training instability through the lens of objective-level hacking",
    "S": "notes on When Speed Kills Stability (2025)",
    "T": "Rethinking the Trust Region in LLM Reinforcement Learning (arXiv 2602.04879)",
}
"""Letters of the table."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One subject on which there are experiments."""

    subject: str
    """A few words; messages and presets refer to it by them."""
    found: str
    """What, by whom, in which setting."""
    opposite: str
    """Who found otherwise, or what limits it; empty: nobody so far."""
    presets: tuple[str, ...]
    """Whose use depends on it."""


FINDINGS = (
    Finding(
        "truncated weights (TIS)",
        "O: added to GRPO on Qwen3-30B-A3B, they slow the growth of mismatch and the fall of entropy, and validation is better; mismatch "
        "still grows. M: with masks and batch normalisation they turn its growth round on Qwen3-4B, and do no harm from the start.",
        "T: they make runs less stable, PG-TIS and MiniRL-TIS collapse before the same without truncation (1.5B): rare tokens lose their "
        "gradient. S: token weights hold in simple settings only; sequence weights save a run that token weights don't, but its "
        "reward wavers, and it tests worse than the plain run at its best.",
        ("tis-token", "tis-sequence", "mis-full", "pg-tis", "minirl", "minirl-tis", "cispo"),
    ),
    Finding(
        "masks on token ratios",
        "M: token weights with masks train as well as without, and suppress k3. K's earlier IcePop was introduced for large mixtures of "
        "experts.",
        "K: later IcePop masks fewer and fewer tokens while the gap grows; a narrower band (0.4 to 5) makes it grow faster; rare tokens "
        "are masked too often. S: token masks collapse on long reasoning. O: the stronger a token clip, the faster mismatch grows.",
        ("icepop", "mis-token", "mis-full", "rollout-is", "kpop"),
    ),
    Finding(
        "tokens or sequences",
        "S: sequence masks are the most stable and reach the highest reward. O: sequence clipping (GSPO) has no growth of mismatch where "
        "token clipping has; prefer it for mixtures of experts.",
        "T: trust regions on tokens (DPPO) are stable in five settings, mixtures of experts among them. M: sequence weights are unbiased "
        "but of extreme variance, for small mismatch or large batches; tokens for most uses. Here: a product of ratios keeps half of the "
        "answers only while their length times k3 is under about a half.",
        ("gspo", "mis-sequence", "mis-sequence-upper", "tis-sequence", "mis-geometric", "dppo-binary-tv"),
    ),
    Finding(
        "anchor of the trust region",
        "T: it must be the sampling policy mu; the same DPPO anchored to the recomputed policy collapses, and so does MiniRL. Leaving the "
        "forward pass out saves about 25 %.",
        "M offers both and prefers neither. Decoupled PPO (Hilton et al., AReaL) and MiniRL's own paper anchor to the recomputed policy.",
        ("dppo-binary-tv", "dppo-binary-kl", "bypass", "decoupled-ppo", "minirl", "grpo"),
    ),
    Finding(
        "whether to correct at all",
        "S, O, T, K: growing mismatch ends in collapse. O: the loop is irreversible, neither an earlier checkpoint nor other data helps.",
        "M: never saw a collapse, in GLM-4.6 neither; late growth of k3 left rewards as they were. It recommends a correction by default "
        "all the same. S: a failed run went on well on another GPU.",
        ("ppo", "grpo", "tis-token"),
    ),
    Finding(
        "bad updates",
        "T: blocking tokens of negative advantage with mu - pi >= 0.5, at most 0.5 % of all, is enough to keep PG-IS stable; 0.8 is too "
        "loose, and anchored to the recomputed policy it fails.",
        "",
        ("dppo-binary-tv", "dppo-binary-kl"),
    ),
    Finding(
        "rare tokens",
        "T: a clip blocks rare tokens most; without it for mu < 0.1, on both sides, learning is faster and stable. One side alone is not: "
        "the lower one ends in entropy collapse. K: ratios of rare tokens are noisier, bounds should follow the probability.",
        "O: a weight that depends on the probability makes mismatch grow, whether rare tokens count 1.2 times or not at all; noise "
        "without a bias does not.",
        ("dppo-binary-tv", "kpop", "cispo", "dapo"),
    ),
    Finding(
        "routing replay (R3)",
        "R3 paper (arXiv 2510.11370): it about halves the k3 of Qwen3-30B-A3B. Here: an eleventh is left of a nano model's.",
        "T: DPPO without it does better than the baselines with it, and better still with it.",
        ("dppo-binary-tv-scale", "minirl", "gspo"),
    ),
    Finding(
        "order of the signs",
        "O, S: mismatch grows first, gradient norm, perplexity and entropy follow.",
        "Here, on runs of a nano model that a learning rate ruins: drift, bad updates and the KL of stale tokens come first. Mismatch at "
        "equal weights hardly grows before the collapse, and falls once the policy is deterministic.",
        (),
    ),
    Finding(
        "arithmetic",
        "S: a float32 head, no chunked prefill and no CUDA graphs did not help; A100, L20 and H20 differ by orders of magnitude. M: "
        "bitwise equal engines remove the mismatch.",
        "",
        (),
    ),
)
"""The first five are those on which the sources contradict each other most."""


def findings_table() -> str:
    """Markdown, one row for each finding, under the list of sources."""
    sources = "; ".join(f"{letter}: {title}" for letter, title in SOURCES.items())
    lines = [sources + ".", "", "| on | found | found otherwise | presets |", "| --- | --- | --- | --- |"]
    for one in FINDINGS:
        lines.append(f"| {one.subject} | {one.found} | {one.opposite} | {', '.join(f'`{name}`' for name in one.presets)} |")
    return "\n".join(lines)
