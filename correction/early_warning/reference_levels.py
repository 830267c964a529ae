"""Levels of mismatch that were published or measured, by setting: data, for the page and for a monitor without a start to compare with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReferenceLevel:
    """What is usual for one kind of engine and learner at equal weights."""

    text: str
    """The setting, in words."""
    low: float
    """Least k3 KL seen, nats; where the source has another estimator, its text says so."""
    high: float
    """Largest one seen in a run that went well."""
    alarm: float
    """k3 KL, nats, from which `mismatch_k3_kl` is an alarm though the run has known nothing else. A published limit if there is one;
    otherwise ten times the largest usual value, which leaves room for another model, or the level at which a source saw a run go bad."""
    source: str
    """Where the figures are from, and how the alarm level follows."""


LEVELS: dict[str, ReferenceLevel] = {
    "float32": ReferenceLevel(
        "both in float32",
        0.0,
        1e-10,
        1e-9,
        "this project on CPUs; true on-policy gives 0. It grows with depth and size: up to 7.6e-14 with 3 layers and 6M parameters, "
        "4.7e-11 with 30 layers and 135M, rounded up here. Ten times the largest",
    ),
    "dense_bfloat16": ReferenceLevel(
        "dense, bfloat16",
        1e-5,
        1e-3,
        1e-2,
        "Miles post (1e-5 to 1e-3); Qwen3-8B 6.4e-4 (arXiv 2510.11370). Ten times the largest",
    ),
    "cpu_bfloat16": ReferenceLevel(
        "dense, bfloat16 on CPUs",
        4e-5,
        8e-3,
        8e-2,
        "this project: 4e-5 with 3 layers and 6M parameters, 8e-3 with 30 and 135M; SGLang rounds after each operator there. Ten times "
        "the largest",
    ),
    "moe_bfloat16": ReferenceLevel(
        "mixture of experts, bfloat16",
        1e-3,
        1e-1,
        1e-1,
        "Miles post (1e-3 to 1e-1); Qwen3-30B-A3B 1.5e-3 (arXiv 2510.11370). The end of the published range, which is wide already",
    ),
    "moe_bfloat16_replay": ReferenceLevel(
        "the same with routing replay from the engine (R3)",
        5e-4,
        1e-3,
        1e-2,
        "Qwen3-30B-A3B: about half of 1.5e-3 (arXiv 2510.11370). Ten times the largest",
    ),
    "float8_blocks": ReferenceLevel(
        "float8 with a scale for each block, or mxfp8",
        1.4e-3,
        2.4e-3,
        4e-3,
        "NeMo-RL pull request 2744: 1.4e-3 to 1.8e-3 (9B), 2.4e-3 (35B); its nightly limits are 3e-3 and 4e-3. "
        "With a float8 cache and answers of 8k more: 9e-3 (verl issue 7519, KL)",
    ),
    "float8_tensor": ReferenceLevel(
        "float8 with one scale a tensor",
        1.0e-2,
        1.0e-2,
        3e-2,
        "verl issue 7519 (KL, answers of 8k, float8 cache): 1.0e-2 at first, growing by 40 to 50 % in 8 steps; at 3.1e-2 "
        "chi-square was 1.0",
    ),
    "float8_both": ReferenceLevel(
        "mixture of experts, engine and learner in float8",
        3.4e-4,
        3.7e-4,
        3.7e-3,
        "Qwen3.5-35B-A3B (xtuner issue 2044); 8.7e-3 one step later if the learner quantises float32 masters instead of bfloat16 weights. "
        "Ten times the largest",
    ),
}
"""By the name that `monitor.thresholds.setting` takes."""


def usual_level(
    setting: str | None,
    dtype: str,
    *,
    device: str = "cuda",
    has_experts: bool = False,
    has_float8: bool = False,
    replays_routes: bool = False,
) -> ReferenceLevel | None:
    """What is usual for a run: the level of its `setting`, or without one that of its types. None: none is known.

    Args:
        dtype: of the learner's weights.
        device: the engine's.
        has_float8: the engine's projections are in float8.
        replays_routes: the learner takes the engine's choice of experts (R3).
    """
    if setting is None and dtype == "bfloat16":
        of_experts = "moe_bfloat16_replay" if replays_routes else "moe_bfloat16"
        of_dense = "cpu_bfloat16" if device == "cpu" else "dense_bfloat16"
        setting = "float8_blocks" if has_float8 else of_experts if has_experts else of_dense
    elif setting is None and dtype == "float32":
        setting = "float32"
    return LEVELS.get(setting or "")


def levels_table() -> str:
    """Markdown, one row for each level."""
    lines = ["| `setting` | engine and learner | usual k3 KL, nats | alarm | from |", "| --- | --- | --- | --- | --- |"]
    for name, level in LEVELS.items():
        usual = f"{level.low:.2g}" if level.low == level.high else f"{level.low:.2g} to {level.high:.2g}"
        lines.append(f"| `{name}` | {level.text} | {usual} | {level.alarm:.2g} | {level.source} |")
    return "\n".join(lines)
