"""What befalls a learner rank whose process lives: its device or a collective fails, and torch raises in the middle of a call.

The other ranks may still wait in that call, and what the rank holds may be of no one step. So it counts as lost, like one that has died,
and the run goes back to its last checkpoint (actors/driver/recovery.py). Any other error is a bug, and stays what it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from evenkeel.correction.errors import EvenkeelError, RankFailed, one_line

log = logging.getLogger("evenkeel.ranks")
M = TypeVar("M", bound=Callable[..., Any])
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
_FAILED = (
    *("cuda error", "cuda driver error", "cublas error", "cudnn error", "triton error"),
    *("nccl error", "gloo/"),
)
"""In what torch says, in small letters, where it has no class of its own for it; gloo gives the path of its source file."""
_LONGEST = 200
_REMEDY = (
    "lower learner.tokens_per_microbatch, set learner.recompute_activations: true, or spread the model over more ranks "
    "(`evenkeel plan RECIPE` counts what each of them needs)"
)


def as_rank_failure(error: BaseException, rank: str, method: str) -> BaseException:
    """RankFailed, in a sentence, if this is what torch raises when a device or a collective fails; any other error itself.

    The traceback goes to the log of the rank's process: who gets the sentence can't see it.
    Args:
        rank: its name in messages.
        method: of the rank, which has raised it.
    """
    if isinstance(error, EvenkeelError) or not isinstance(error, RuntimeError | MemoryError):
        return error
    import torch  # not in the driver; a rank has it by now

    what, plain = one_line(error, named=True)[:_LONGEST], one_line(error)[:_LONGEST].lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in plain for sign in _OUT_OF_MEMORY):
        failure = RankFailed(f"{rank}: out of memory in {method} ({what})", remedy=_REMEDY, rank=rank)
    elif isinstance(error, torch.AcceleratorError | torch.distributed.DistError) or any(sign in plain for sign in _FAILED):
        failure = RankFailed(f"{rank}: its device or a collective has failed in {method} ({what})", rank=rank)
    else:
        return error
    log.error("%s", failure, exc_info=error)
    failure.__cause__ = error
    return failure


def names_failures(method: M) -> M:
    """Decorates a method of a NumberedRank that is no collective call: raises as `as_rank_failure` says."""

    @wraps(method)
    def call(rank: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return method(rank, *arguments, **named)
        except Exception as error:
            if (failure := as_rank_failure(error, rank.name, method.__name__)) is error:
                raise
            raise failure from error

    return cast(M, call)
