"""How many rollout workers a run has: a fixed number, or one that follows the load between two bounds."""

from __future__ import annotations

from pydantic import Field, PositiveInt, model_validator

from correction.settings.base import Settings


class PoolSizeConfig(Settings):
    """Part of rollout's settings."""

    min_workers: PositiveInt | None = Field(default=None, le=10**4)
    """With max_workers: the pool follows the load, between these two. It grows while the learner waits for data, and shrinks while workers
    wait for work (docs/sizing.md)."""
    max_workers: PositiveInt | None = Field(default=None, le=10**4)
    """With min_workers: the most workers. The pool never grows beyond those that admission can keep busy."""
    workers: PositiveInt = Field(default_factory=lambda before: before.get("min_workers") or 1, le=10**4)
    """Rollout workers, each with an engine of its own. With min_workers and max_workers: how many the run begins with; not given,
    min_workers."""

    @model_validator(mode="after")
    def _sizes_of_the_pool_fit(self) -> PoolSizeConfig:
        low, high = self.min_workers, self.max_workers
        if (low is None) != (high is None):
            given, missing = ("min_workers", "max_workers") if high is None else ("max_workers", "min_workers")
            raise ValueError(
                f"{given} = {low or high} without {missing}: a pool that follows the load needs both; set {missing}, or set workers alone "
                f"for a fixed pool"
            )
        if low is not None and high is not None:
            if low > high:
                raise ValueError(f"min_workers = {low} is more than max_workers = {high}: lower the one or raise the other")
            if not low <= self.workers <= high:
                raise ValueError(
                    f"workers = {self.workers}, which the run would begin with, is not between min_workers = {low} and max_workers = "
                    f"{high}: change it, or leave it out"
                )
        return self

    @property
    def is_elastic(self) -> bool:
        """The pool follows the load."""
        return self.max_workers is not None

    @property
    def fewest_workers(self) -> int:
        return self.min_workers or self.workers

    @property
    def most_workers(self) -> int:
        return self.max_workers or self.workers
