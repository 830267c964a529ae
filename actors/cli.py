"""The command line: parse, call, print. Nothing is decided here."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from correction.errors import ConfigError, EvenkeelError

if TYPE_CHECKING:
    from actors.config import RunConfig

app = typer.Typer(
    name="evenkeel",
    help="Asynchronous RL post-training for language models: SGLang rollouts, a Megatron learner, a correction service between them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ENDED_BY_ALARM = 3
"""Exit code of a run that monitor.on_alarm = stop has ended, with a checkpoint; 1 and 2 are errors."""

ENGINES_DIFFER = 4
"""Exit code of diff-engines when a bit differs."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings over the recipe's, e.g. correction.preset=icepop rollout.workers=2."),
]


def main() -> None:
    """Entry point of the console script: one sentence and a non-zero exit for whatever is wrong with the input."""
    _quiet()
    try:
        app()
    except EvenkeelError as error:
        sys.exit(f"evenkeel: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("evenkeel: interrupted", file=sys.stderr)
        sys.exit(130)  # as shells have it, and typer, which takes most interrupts before this


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe (YAML); left out with --resume.")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Go on with an earlier run from its newest checkpoint.")] = None,
) -> None:
    """Train a policy; everything about the run ends up in its folder, with a report.html at the end."""
    # With --resume the first positional argument, if any, is an override.
    words = [*([str(recipe)] if recipe and resume else []), *(overrides or [])]
    if recipe is None and resume is None:
        raise ConfigError("evenkeel train needs a recipe, such as recipes/nano_spell_backward.yaml, or --resume RUN_DIR")
    from actors.session import train_run

    summary = train_run(None if resume else recipe, words, resume)
    if summary.alarm:
        raise typer.Exit(ENDED_BY_ALARM)


@app.command("init-model")
def init_model(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) with a section `init`.")],
    overrides: Overrides = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing when the model folder is there already.")] = False,
) -> None:
    """Make the recipe's model folder from nothing: a small model with its own tokenizer, warmed up on demonstrations of the task."""
    from actors.init_model import init_model_folder

    config = _load(recipe, overrides)
    init_model_folder(config, if_missing=if_missing, say=typer.echo)


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder; every checkpoint has one under hf/.")],
    overrides: Overrides = None,
    task: Annotated[str, typer.Option(help="A recipe (its task and reward), or the name of a reasoning-gym data set.")] = "",
    problems: Annotated[int, typer.Option(min=1, help="Held-out questions.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature, 0 for greedy; default: the recipe's.")] = None,
    samples: Annotated[Path | None, typer.Option(help="Write the answers to this text file.")] = None,
) -> None:
    """Measure held-out accuracy of a model through SGLang, with its 95% Wilson interval."""
    from actors.offline_evaluation import evaluate_folder

    if not task:
        raise ConfigError(
            "evenkeel eval needs --task: a recipe such as recipes/nano_spell_backward.yaml, or a reasoning-gym data set such as chain_sum"
        )
    evaluate_folder(model, task, overrides or [], problems=problems, temperature=temperature, samples=samples, say=typer.echo)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")]) -> None:
    """Write a run's report.html anew."""
    from actors.report import write_report
    from actors.run_folder import RunFolder

    typer.echo(f"report: {write_report(RunFolder.view(run_dir))}")


@app.command()
def config(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe (YAML) to show with all defaults filled in.")] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every key with its type, default and meaning.")] = False,
    section: Annotated[str, typer.Option(help="Only the keys under this one, e.g. rollout.engine.")] = "",
) -> None:
    """Show a recipe as it will be used, or explain every key there is."""
    from actors.config import RunConfig
    from actors.config_tools import explain as explain_model

    if explain or section or recipe is None:
        typer.echo(explain_model(RunConfig, section))
        return
    import yaml

    typer.echo(yaml.safe_dump(_load(recipe, overrides).model_dump(mode="json"), sort_keys=False))


@app.command()
def presets() -> None:
    """The correction methods that have a name, with source, parts and when to use which."""
    from correction.methods import presets_table

    typer.echo(presets_table())


@app.command()
def precision(
    dtypes: Annotated[list[str] | None, typer.Argument(metavar="[DTYPE]...", help="Formats; default: bfloat16 float16.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Seed of logits and samples.")] = 1234,
) -> None:
    """What a softmax in low precision alone does to the ratio of two engines that agree in everything else (a few seconds)."""
    from correction.precision import precision_gap, precision_table

    gaps = [precision_gap(dtype, tokens=tokens, seed=seed) for dtype in dtypes or ["bfloat16", "float16"]]
    typer.echo(precision_table(gaps))


@app.command("diff-engines")
def diff_engines(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, such as one of `evenkeel init-model`.")],
    true_on_policy: Annotated[bool, typer.Option("--true-on-policy/--no-true-on-policy", help="Operators of fixed order?")] = True,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of both engines.")] = "float32",
    prompts: Annotated[int, typer.Option(min=1, help="Random prompts, in flight together.")] = 6,
    tokens: Annotated[int, typer.Option(min=2, help="Sampled for each.")] = 16,
) -> None:
    """Compute the same tokens with SGLang and with Megatron, and name the operator at which the two part (about a minute)."""
    from rich.console import Console

    from actors.diff_engines import diff_engines as compare_engines

    found = compare_engines(model, true_on_policy=true_on_policy, dtype=dtype, prompts=prompts, tokens=tokens)
    Console().print(found.table())
    typer.echo(str(found))
    if found.parting is not None:
        raise typer.Exit(ENGINES_DIFFER)


@app.command()
def capabilities() -> None:
    """What the installed engines offer on this machine."""
    from dataclasses import asdict

    from rollout.capabilities import probe
    from rollout.engine_config import EngineConfig

    typer.echo(json.dumps(asdict(probe(EngineConfig().resolved_device)), indent=2, default=str))


def _load(recipe: Path, overrides: list[str] | None) -> RunConfig:
    from actors.config import RunConfig
    from actors.config_tools import load_config

    return load_config(RunConfig, recipe, overrides or [])


def _quiet() -> None:
    """Keep third parties' chatter off the terminal; their warnings are about things that a user can't change."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of child processes
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    main()
