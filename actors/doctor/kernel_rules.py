"""Rules about kernels, by the kind of GPU: whether it has those that ranks and engines compute with, and what SGLang's make of the weights
that an engine was sent.

Some kernels want weights in another order, or in another type. SGLang 0.5.21 brings them into it once, after loading; a weight update
writes what files have, so that the engine would compute with something else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from actors.config import RunConfig
from actors.doctor.facts import Complaint
from actors.plan.shape import ModelShape


class Architecture(NamedTuple):
    """Of a GPU. Later ones are greater."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}"


RUNNER = "moe_runner_backend"
PRODUCTS = "fp8_gemm_runner_backend"
_KEPT_BY = ("auto", "triton")
"""SGLang's runners of experts that leave their weights as files have them; auto does so on all GPUs but Blackwell. Engines on GPUs get
triton where a recipe says nothing (rollout/engine_settings/engine_config.py)."""
_ROUNDED_ANEW_BY = ("auto", "deep_gemm")
"""Products of float8 whose scales are powers of two on Blackwell (fp8_utils.py, requant_block_scale_ue8m0_for_deepgemm); ours is triton."""
_GB10 = Architecture(12, 1)
"""An architecture where deep_gemm's are so, too: DEEPGEMM_SCALE_UE8M0 covers sm_120 and sm_121, and of these sm_120 is left out when it
comes to weights (model_loader/utils.py, should_deepgemm_weight_requant_ue8m0). auto is CUTLASS's on both, which leaves them alone."""
_BLACKWELL = 10
"""Major number of its architectures for data centres: sm_100, sm_103 (arg_groups/model_overrides/qwen3_moe.py)."""
_HALF, _FLOAT8 = Architecture(8, 0), Architecture(8, 9)
"""Lowest architectures that either side's kernels in half precision are made for (Ampere), and with products of float8."""


def experts_stay_as_sent(shape: ModelShape, config: RunConfig) -> Iterator[Complaint]:
    """The weights of experts must keep their layout in the engine, on GPUs and on CPUs (SGLang's layers/quantization/unquant.py,
    layers/moe/fused_moe_triton/layer.py)."""
    runner = _runner(config)
    if shape.experts and runner not in _KEPT_BY:
        yield Complaint(
            "fail",
            f"rollout.engine.engine_args.{RUNNER} = {runner}: SGLang may lay the weights of experts out otherwise for it, and new weights "
            "as files have them would have no place",
            "Set it to triton",
        )


def half_precision_has_kernels(config: RunConfig, *, of_ranks: Collection[str], of_engines: Collection[str]) -> Iterator[Complaint]:
    """In bfloat16 and in float16: torch's variable-length attention, which ranks take for both (learner/model/attention.py), is
    FlashAttention, and SGLang's own kernels (sglang-kernel) have no code for older GPUs. A failure if all GPUs of a side are so.

    Args: architectures of the GPUs that a rank, and that an engine may get, such as sm_90; those that aren't known are left out.
    """
    learner, engine = config.learner, config.rollout.engine
    on_half = learner.resolved_device == "cuda" and learner.resolved_dtype != "float32"
    ranks = _known(of_ranks) if on_half else []
    engines = _known(of_engines) if engine.resolved_device == "cuda" else []
    sides = {"the learner's attention in half precision (FlashAttention)": ranks, "SGLang's kernels": engines}
    old = {what: known for what, known in sides.items() if known and known[0] < _HALF}
    if old:
        yield Complaint(
            "fail" if any(known[-1] < _HALF for known in old.values()) else "warn",
            f"GPUs of {min(known[0] for known in old.values())} are too old for {' and '.join(old)}",
            f"Take GPUs of {_HALF} (Ampere) and later, or compute on the CPU (device: cpu)",
        )


def weights_stay_as_sent(shape: ModelShape, config: RunConfig, architectures: Collection[str]) -> Iterator[Complaint]:
    """An engine must hold the weights in the order and type in which it was sent them.

    Args: architectures: of the GPUs that an engine may get, such as sm_90; those that aren't known are left out.
    """
    known = _known(architectures)
    if config.rollout.engine.resolved_device != "cuda" or not known:
        return
    if shape.experts and _runner(config) == "auto" and any(one.major == _BLACKWELL for one in known):
        yield Complaint(
            "fail",
            f"rollout.engine.engine_args.{RUNNER} = auto: on Blackwell SGLang lays the weights of experts out for other kernels, where new "
            "weights as files have them have no place",
            "Set it to triton, or leave it out",
        )
    products = config.rollout.engine.engine_args.get(PRODUCTS, "triton")
    if config.rollout.engine.has_float8 and any(_rounds_anew(products, one) for one in known):
        yield Complaint(
            "fail",
            f"rollout.engine.engine_args.{PRODUCTS} = {products}: on Blackwell SGLang rounds the scales of float8 anew for it, and an "
            "engine would not hold what it was sent",
            "Set it to triton, or leave it out",
        )
    yield from _types_stay(config, known)


def _rounds_anew(products: str, one: Architecture) -> bool:
    """Whether these products of float8 have scales of their own on an architecture."""
    return (products in _ROUNDED_ANEW_BY and one.major == _BLACKWELL) or (products == "deep_gemm" and one == _GB10)


def _types_stay(config: RunConfig, known: list[Architecture]) -> Iterator[Complaint]:
    """GPUs without products of float8 make SGLang pack the weights anew (layers/quantization/fp8_utils.py). A failure if no GPU has them, a
    warning if some have: the engines may be on those."""
    engine = config.rollout.engine
    packed = [one for one in known if _HALF <= one < _FLOAT8]
    if engine.has_float8 and packed:
        yield Complaint(
            "fail" if known[-1] < _FLOAT8 else "warn",
            f"rollout.engine.quantization = float8_block on {packed[0]}, which has no products of float8: SGLang packs the weights anew "
            "for another kernel (Marlin), where those that are sent have no place",
            f"Set it to none, or take GPUs of {_FLOAT8} and later",
        )


def _runner(config: RunConfig) -> str:
    return str(config.rollout.engine.engine_args.get(RUNNER, "triton"))


def _known(names: Collection[str]) -> list[Architecture]:
    """The known architectures, lowest first."""
    return sorted({found for name in names if (found := architecture_of(name)) is not None})


def architecture_of(name: str) -> Architecture | None:
    """(9, 0) of sm_90 or sm_90a; None: its driver doesn't say."""
    found = re.search(r"(\d+)(\d)", name)
    return Architecture(int(found[1]), int(found[2])) if found else None
