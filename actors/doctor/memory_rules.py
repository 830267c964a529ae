"""The rules about a GPU's memory, for the GPUs that nodes have: of several sizes, maybe, while the driver's machine has none."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from actors.config import RunConfig
from actors.doctor.facts import Complaint, PaperFacts
from actors.doctor.paper_rules import both_sides_fit_one_gpu, engine_fits_its_gpu, gib, rank_fits_its_gpu
from actors.plan.shape import ModelShape


def on_gpus(shape: ModelShape, config: RunConfig, *, of_ranks: Collection[int], of_engines: Collection[int]) -> Iterator[Complaint]:
    """What doesn't fit the smallest GPU that could be given; it fails if it doesn't fit the largest either.

    Args: of_ranks, of_engines: bytes of each GPU that a rank, or an engine, may get; none: not known.
    """
    for rule, sizes in ((rank_fits_its_gpu, of_ranks), (engine_fits_its_gpu, of_engines), (both_sides_fit_one_gpu, of_engines)):
        if not sizes:
            continue
        always = any(one.severity == "fail" for one in rule(PaperFacts(shape, max(sizes)), config))
        for found in rule(PaperFacts(shape, min(sizes)), config):
            if found.severity == "fail" and not always:
                found = replace(found, severity="warn", sentence=f"on the smallest GPUs there are, of {gib(min(sizes))}: {found.sentence}")
            yield found
