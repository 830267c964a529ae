"""evenkeel simulate: how many workers, and which staleness, before there are any."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from correction.errors import ConfigError

if TYPE_CHECKING:
    from actors.config import RunConfig
    from actors.simulation.costs import AnswerLengths, DecodeSpeed, RunCosts

_SPEEDS = "Speeds"
_MOST_SHAPES = 100


_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's, by dotted key, e.g. groups_per_step=128."),
]
_Run = Annotated[
    Path | None,
    typer.Option(metavar="RUN_DIR", help="Take speeds and lengths from this run; what is given as well replaces them."),
]
_Lengths = Annotated[
    str, typer.Option(metavar="P50,P99", help="Answers in tokens, lognormal: median and 99th percentile, cut at max_tokens.")
]
_Decode = Annotated[
    str,
    typer.Option(
        metavar="N:SPEED,...",
        help="Tokens/s of one engine with N requests in it, for one N or more, e.g. 1:50,64:1600,128:2600.",
        rich_help_panel=_SPEEDS,
    ),
]
_PromptSpeed = Annotated[
    float | None,
    typer.Option(help="Tokens/s that an engine reads; left out: reading takes no time.", rich_help_panel=_SPEEDS),
]
_LearnerSpeed = Annotated[
    float | None,
    typer.Option(help="Prompt and response tokens/s that the learner trains on.", rich_help_panel=_SPEEDS),
]
_Handover = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds from a batch's last answer until the learner begins on it.", rich_help_panel=_SPEEDS),
]
_Publish = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds a step in which the learner publishes weights.", rich_help_panel=_SPEEDS),
]
_Sync = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds from their publication until the engines hold them.", rich_help_panel=_SPEEDS),
]
_Pause = Annotated[
    float | None,
    typer.Option(min=0, help="The last seconds of --sync-s, in which an engine samples nothing.", rich_help_panel=_SPEEDS),
]
_Cores = Annotated[
    float | None,
    typer.Option(min=1, help="Engines and learner share one machine of so many cores; left out: they don't.", rich_help_panel=_SPEEDS),
]
_OtherCores = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Cores of --cores that the rest of the run takes (rewards, queue, service, driver), on average.",
        rich_help_panel=_SPEEDS,
    ),
]


def simulate(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML): groups in a step, samples of a group, slots, requests of an engine.")],
    overrides: _Overrides = None,
    workers: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of workers to try; default: the recipe's.")] = "",
    max_staleness: Annotated[str, typer.Option(metavar="N,N,...", help="Bounds on the staleness to try; default: the recipe's.")] = "",
    run: _Run = None,
    lengths: _Lengths = "",
    prompt_tokens: Annotated[int | None, typer.Option(min=0, help="Length of a prompt; default: the run's, or 0.")] = None,
    decode: _Decode = "",
    prompt_speed: _PromptSpeed = None,
    learner_speed: _LearnerSpeed = None,
    handover_s: _Handover = None,
    publish_s: _Publish = None,
    sync_s: _Sync = None,
    pause_s: _Pause = None,
    cores: _Cores = None,
    other_cores: _OtherCores = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each simulated run, after those that fill its queue.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the lengths that are drawn.")] = 0,
    picture: Annotated[Path, typer.Option(help="The picture to write.")] = Path("simulation.png"),
) -> None:
    """Predict how many workers and how much staleness pay off, without starting any.

    It runs the queue and the dispatch rule of a real run in simulated time. Engines and learner take as long as you say, or as a run has
    measured (--run). For each number of workers and each max_staleness the table shows the time of a step, how busy both sides are, what
    the learner waits for, and how old its training tokens are. A picture shows the same; docs/sizing.md explains both.
    """
    worker_counts, bounds = _numbers("--workers", workers, least=1), _numbers("--max-staleness", max_staleness, least=0)
    if len(worker_counts or [0]) * len(bounds or [0]) > _MOST_SHAPES:
        raise ConfigError(f"--workers {workers} with --max-staleness {max_staleness}: more than {_MOST_SHAPES} runs; name fewer of each")
    if picture.suffix != ".png" or not picture.parent.is_dir():
        raise ConfigError(f"--picture {picture}: name a .png file in a folder that exists")
    given = {"handover_s": handover_s, "publish_s": publish_s, "sync_s": sync_s, "pause_s": pause_s}
    given |= {"cores": cores, "other_cores": other_cores}
    if other_cores is not None and other_cores >= (cores or 0):
        raise ConfigError(f"--other-cores {other_cores:g}: give the machine's cores as well, which have to be more (--cores)")
    from actors.commands.told_recipe import load_told
    from actors.settings.derived import derived, needs_gpu
    from actors.settings.devices import visible_gpus

    config = derived(asked_for := load_told(recipe, overrides), has_gpu=needs_gpu(asked_for) or visible_gpus() > 0)
    asked = _lengths(lengths, config) if lengths else None
    speeds = {
        "decode": _decode(decode) if decode else None,
        "learner_token_s": _seconds("--learner-speed", learner_speed),
        "prompt_token_s": _seconds("--prompt-speed", prompt_speed),
    }
    costs, its_lengths, its_prompt = _costs({name: value for name, value in (given | speeds).items() if value is not None}, run, asked)
    _simulate_all(
        config,
        costs,
        its_lengths.afresh(seed),
        worker_counts or [config.rollout.workers],
        bounds or [config.max_staleness],
        prompt_tokens=its_prompt if prompt_tokens is None else prompt_tokens,
        steps=steps,
        picture=picture,
    )


def _simulate_all(
    config: RunConfig,
    costs: RunCosts,
    lengths: AnswerLengths,
    worker_counts: list[int],
    bounds: list[int],
    *,
    prompt_tokens: int,
    steps: int,
    picture: Path,
) -> None:
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import track

    from actors.commands.measured_costs import shape_of
    from actors.commands.simulate_views import draw_outcomes, show_outcomes
    from actors.simulation.run import simulate as simulate_run

    shape = shape_of(config)
    shapes = [replace(shape, workers=number, max_staleness=bound) for number in worker_counts for bound in bounds]
    console = Console(highlight=False)
    outcomes = [
        simulate_run(one, costs, lengths.afresh(), prompt_tokens=prompt_tokens, steps=steps)
        for one in track(shapes, "simulating", console=Console(stderr=True), transient=True)
    ]
    reading = "" if costs.prompt_token_s else "; it reads prompts, and what is in flight after an update, in no time (--prompt-speed)"
    console.print(
        f"{shape.groups_per_step} groups of {shape.samples_per_group} a step; {shape.slots} slots and {shape.max_running_requests} "
        f"requests an engine; lengths: {lengths.description}; an engine decodes {costs.decode} (requests:tokens/s), "
        f"the learner trains on {1 / costs.learner_token_s:,.0f} tokens/s{reading}\n",
        soft_wrap=not console.is_terminal,
    )
    show_outcomes(console, outcomes)
    draw_outcomes(outcomes, picture, f"{config.name}: {shape.groups_per_step} groups of {shape.samples_per_group} a step")
    console.print(f"picture: {picture}", soft_wrap=True)


def _costs(given: dict[str, Any], run: Path | None, lengths: AnswerLengths | None) -> tuple[RunCosts, AnswerLengths, int]:
    """Costs, lengths and the length of a prompt: as given, the rest from the run. Raises: ConfigError for what neither says."""
    from dataclasses import replace

    from actors.simulation.costs import RunCosts

    if run is not None:
        from actors.commands.measured_costs import MeasuredRun

        measured = MeasuredRun.of(run, cores=given.get("cores", math.inf), other_cores=given.get("other_cores", 0.0))
        return replace(measured.costs, **given), lengths or measured.lengths, measured.prompt_tokens
    missing = [option for name, option in (("decode", "--decode"), ("learner_token_s", "--learner-speed")) if name not in given]
    if missing or lengths is None:
        missing += ["--lengths"] * (lengths is None)
        raise ConfigError(f"evenkeel simulate needs {', '.join(missing)}, or --run RUN_DIR to take speeds and lengths from")
    return RunCosts(**given), lengths, 0


def _numbers(option: str, text: str, *, least: int) -> list[int]:
    """In growing order. Raises: ConfigError."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(f"{option} {text}: give whole numbers from {least} on, with commas between them, such as {option} {least},2,4")
    return sorted({int(word) for word in words})


def _lengths(text: str, config: RunConfig) -> AnswerLengths:
    from actors.simulation.costs import AnswerLengths

    try:
        p50, p99 = map(float, text.split(","))
    except ValueError:
        raise ConfigError(f"--lengths {text}: give two numbers of tokens, median and 99th percentile, such as 6000,32000") from None
    return AnswerLengths.lognormal(p50, p99, max_tokens=config.rollout.sampling.max_tokens)


def _decode(text: str) -> DecodeSpeed:
    from actors.simulation.costs import DecodeSpeed

    try:
        points = sorted((int(number), float(rate)) for number, rate in (part.split(":") for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--decode {text}: give REQUESTS:TOKENS_PER_S, with commas between several, such as 1:50,64:1600") from None
    return DecodeSpeed(tuple(points))


def _seconds(option: str, speed: float | None) -> float | None:
    """Seconds of a token at so many tokens/s. Raises: ConfigError."""
    if speed is None:
        return None
    if not 0 < speed < math.inf:
        raise ConfigError(f"{option} {speed:g}: a speed is above 0 tokens/s")
    return 1 / speed
