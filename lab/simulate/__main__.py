"""Predicts how many workers and how much staleness pay off, without starting any.

    python -m lab.simulate RECIPE [KEY=VALUE ...] --run RUN_DIR --workers 1,2,4 --max-staleness 0,1,2
    python -m lab.simulate RECIPE --decode 1:50,64:1600,128:2600 --learner-speed 60000 --lengths 6000,32000 --workers 8,16,32

Engines and learner take as long as you say, or as a run has measured (--run): the throughput of each shape, and what the learner waits for.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.errors import ConfigError
from evenkeel.recipe import load_config
from lab.simulate.costs import AnswerLengths, DecodeSpeed, RunCosts
from lab.simulate.measured import MeasuredRun, measure, shape_of
from lab.simulate.run import FULL_ENGINES, HANDOVER, PUBLISH, UNDER_WAY, Outcome, simulate

ENOUGH = 0.95
"""Share of the best throughput that the choice in the last sentence has to reach."""
_TIMES = ("handover_s", "publish_s", "sync_s", "pause_s")


def _numbers(text: str) -> list[int]:
    return sorted({int(word) for word in text.split(",")})


def _decode(text: str) -> DecodeSpeed:
    points = [part.split(":") for part in text.split(",")]
    return DecodeSpeed(tuple(sorted((int(number), float(rate)) for number, rate in points)))


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that replace the recipe's")
    parser.add_argument("--workers", type=_numbers, help="numbers of workers to try, 1,2,4; default: the recipe's")
    parser.add_argument("--max-staleness", type=_numbers, help="bounds on the staleness to try; default: the recipe's")
    parser.add_argument("--run", type=Path, help="take speeds and lengths from this run; what is given as well replaces them")
    parser.add_argument("--lengths", metavar="P50,P99", help="answers in tokens, lognormal, cut at max_tokens")
    parser.add_argument("--prompt-tokens", type=int, help="length of a prompt; default: the run's, or 0")
    parser.add_argument("--decode", type=_decode, metavar="N:SPEED,...", help="tokens/s of one engine with N requests in it")
    parser.add_argument("--prompt-speed", type=float, help="tokens/s that an engine reads; left out: reading takes no time")
    parser.add_argument("--learner-speed", type=float, help="prompt and response tokens/s that the learner trains on")
    parser.add_argument("--handover-s", type=float, help="from a batch's last answer until the learner begins on it")
    parser.add_argument("--publish-s", type=float, help="in which the learner publishes the weights of a step")
    parser.add_argument("--sync-s", type=float, help="from their publication until the engines hold them")
    parser.add_argument("--pause-s", type=float, help="the last seconds of --sync-s, in which an engine samples nothing")
    parser.add_argument("--steps", type=int, default=100, help="of each simulated run, after those that fill its queue")
    return parser.parse_args(words)


def inputs(given: argparse.Namespace, config: RunConfig) -> MeasuredRun:
    """What was given, the rest from --run. Raises: ConfigError for what neither says."""
    named = {name: getattr(given, name) for name in _TIMES if getattr(given, name) is not None}
    if given.decode is not None:
        named["decode"] = given.decode
    if given.learner_speed:
        named["learner_token_s"] = 1 / given.learner_speed
    if given.prompt_speed:
        named["prompt_token_s"] = 1 / given.prompt_speed
    lengths = None
    if given.lengths:
        p50, p99 = (float(word) for word in given.lengths.split(","))
        lengths = AnswerLengths.lognormal(p50, p99, max_tokens=config.rollout.sampling.max_tokens)
    if given.run is not None:
        run = measure(given.run)
        run = replace(run, shape=shape_of(config), costs=replace(run.costs, **named), lengths=lengths or run.lengths)
    elif lengths is None or not {"decode", "learner_token_s"} <= named.keys():
        raise ConfigError("give --decode, --learner-speed and --lengths, or --run RUN_DIR to take speeds and lengths from")
    else:
        run = MeasuredRun(shape_of(config), RunCosts(**named), lengths, 0)
    return run if given.prompt_tokens is None else replace(run, prompt_tokens=given.prompt_tokens)


def row(one: Outcome, first: Outcome) -> str:
    waits = {cause: seconds / one.seconds for cause, seconds in one.learner_waits_s.items()}
    other = waits.get(HANDOVER, 0.0) + waits.get(PUBLISH, 0.0)
    return (
        f"{one.shape.workers:7} {one.shape.max_staleness:9} {one.step_s:8.3g} {one.tokens_per_s:10,.0f} "
        f"{one.tokens_per_s / first.tokens_per_s:7.2f} {one.learner_share:8.0%} {waits.get(FULL_ENGINES, 0.0):8.0%} "
        f"{waits.get(UNDER_WAY, 0.0):8.0%} {other:6.0%} {one.engine_share:8.0%} {one.mean_staleness:9.2f}"
    )


def cheapest(outcomes: list[Outcome]) -> Outcome:
    """Within 5 % of the best throughput: with the fewest workers, and of these with the least staleness."""
    most = max(one.tokens_per_s for one in outcomes)
    enough = [one for one in outcomes if one.tokens_per_s >= ENOUGH * most]
    return min(enough, key=lambda one: (one.shape.workers, one.shape.max_staleness))


def main(words: list[str] | None = None) -> None:
    given = arguments(words)
    try:
        config = with_devices(load_config(RunConfig, given.recipe, given.overrides), has_gpu=False)
        run = inputs(given, config)
        outcomes = [
            simulate(
                replace(run.shape, workers=workers, max_staleness=bound),
                run.costs,
                run.lengths.afresh(),
                prompt_tokens=run.prompt_tokens,
                steps=given.steps,
            )
            for workers in given.workers or [run.shape.workers]
            for bound in given.max_staleness or [run.shape.max_staleness]
        ]
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    print(
        f"{run.shape.groups_per_step} groups of {run.shape.samples_per_group} a step; {run.shape.slots} slots and "
        f"{run.shape.max_running_requests} requests an engine; lengths: {run.lengths.description}; an engine decodes {run.costs.decode} "
        f"(requests:tokens/s), the learner trains on {1 / run.costs.learner_token_s:,.0f} tokens/s\n\n"
        "                                        x the  learner    waits for:               engines      mean\n"
        "workers staleness   step s   tokens/s   first   trains  engines  answers  other   sample staleness"
    )
    for one in outcomes:
        print(row(one, outcomes[0]))
    best = cheapest(outcomes)
    print(
        f"\n{best.shape.workers} workers with max_staleness {best.shape.max_staleness}: the fewest within "
        f"{1 - ENOUGH:.0%} of the most tokens/s of those tried."
    )


if __name__ == "__main__":
    main()
