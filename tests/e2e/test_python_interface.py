"""`evenkeel.train` from a notebook's point of view: a loop runs, a Ray of the user's is up, and all of that stays as it was."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from pathlib import Path

import pytest

import evenkeel
from tests.e2e.launch import RECIPE


@pytest.mark.slow
def test_train_from_a_running_loop_beside_a_ray_of_the_user_s_and_twice(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals, the collector and that Ray stay as they were; the second run goes on from the first; another thread evaluates it."""
    import ray

    monkeypatch.setenv("PYTHONPATH", str(RECIPE.parent))  # the reward function lies there

    def of_this_process() -> tuple[object, ...]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        return *(signal.getsignal(number) for number in numbers), gc.isenabled()

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        before, frozen = of_this_process(), gc.get_freeze_count()

        async def trained() -> evenkeel.Run:
            return evenkeel.train(evenkeel.load_recipe(RECIPE, model=small_model), steps=2, run_dir=tmp_path / "run")

        run = asyncio.run(trained())
        assert list(run.metrics.index) == [1, 2] and len(run.checkpoints) >= 1
        run = evenkeel.resume(run, steps=3)
        assert list(run.metrics.index) == [1, 2, 3]
        found: list[evenkeel.HeldOut] = []
        thread = threading.Thread(target=lambda: found.append(evenkeel.evaluate(run, problems=8)))
        thread.start()
        thread.join()
        assert 0 <= found[0].interval[0] <= found[0].accuracy <= found[0].interval[1] <= 1
        assert found[0].numbers["held_out/problems"] == 8
        assert of_this_process() == before and gc.get_freeze_count() <= frozen, "of what was frozen some may be gone"
        assert ray.get(ray.remote(num_cpus=0)(lambda: 42).remote()) == 42
    finally:
        ray.shutdown()
