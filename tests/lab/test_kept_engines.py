"""The harness of short runs: what is compared between two of its runs is the correction alone.

Behaviours locked here: a run begins at the start weights in learner and engine, whatever the run before it did; a batch is as stale as
asked; a replay is the run again, bit for bit; injected noise is seen by the diagnostics; the policy learns.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.kept_engines import KeptEngines, recipe

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptEngines]:
    with KeptEngines.start(recipe(tmp_path_factory.mktemp("kept") / "model")) as kept:
        yield kept


def test_runs_begin_alike_and_are_stale_as_asked(kept: KeptEngines) -> None:
    for max_staleness in (1, 3, 0):
        record = kept.run("mis-full", steps=5, max_staleness=max_staleness)
        assert [step["staleness_max"] for step in record.steps] == [min(k, max_staleness) for k in range(5)]
        first, last = record.steps[0], record.steps[-1]
        assert first["log_ratio_abs_max"] < 2e-5, "engine and learner must both be back at the start weights"
        assert first["mixed_version_share"] == 0
        if max_staleness > 0:
            assert last["k3_kl"] > 1e-4, "the weights have moved since the batch was sampled"
        else:
            assert last["log_ratio_abs_max"] < 2e-5, "the engine follows every step"


def test_a_replay_is_the_run_again(kept: KeptEngines) -> None:
    record = kept.run("tis-token", steps=3)
    again = kept.replay("tis-token", record)
    assert again.checksum == record.checksum
    assert again.series("loss") == record.series("loss")
    assert kept.replay("tis-token", record, learning_rate=1e-5).checksum != record.checksum


def test_noise_on_mu_is_seen(kept: KeptEngines) -> None:
    """Noise of standard deviation s shifts log rho by as much: its own std at step 0 is s, but for logprobs that are cut at 0."""
    quiet = kept.run("tis-token", steps=1)
    noisy = kept.replay("tis-token", quiet, mu_noise=0.3)
    assert quiet.steps[0]["log_ratio_std"] < 1e-5
    assert 0.15 < noisy.steps[0]["log_ratio_std"] < 0.33


def test_reward_rises(kept: KeptEngines) -> None:
    rewards = kept.run("tis-token", steps=60).series("reward_mean")
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.05
