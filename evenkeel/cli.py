"""The command line: parse, call, print. Nothing is decided here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from typer.core import TyperCommand

from evenkeel.actors.processes import signals
from evenkeel.actors.processes.children import inherit
from evenkeel.actors.processes.output import prepare_streams, put, refused_file
from evenkeel.correction.errors import ConfigError, EvenkeelError
from evenkeel.deploy_command import deploy
from evenkeel.doctor_command import doctor
from evenkeel.engines.machine import environment
from evenkeel.plan_command import plan
from evenkeel.rollout.module_path import SAFE_PATH

if TYPE_CHECKING:
    from evenkeel.actors.config import RunConfig


def _examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(["Examples:", "", "```", *lines, "```"])


class TakesSettings(TyperCommand):
    """A command with KEY=VALUE among its words: an option that it doesn't have may be meant as a setting."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # which parsing takes away
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if option := getattr(error, "option_name", ""):  # click's NoSuchOption, which is where typer has its click
                from evenkeel.other_words import as_setting

                vars(error)["message"] = f"No such option: {option}. Settings are KEY=VALUE: {as_setting(option, words)}"
                vars(error)["possibilities"] = None
            raise


app = typer.Typer(
    name="evenkeel",
    help="Asynchronous RL post-training for language models: SGLang rollouts, a Megatron learner, a correction service between them.",
    epilog="Exit codes: 0 done; 1 an error, with a message; 2 wrong usage; 3 train: ended by an alarm; 4 diff-engines: some bits differ; "
    "129, 130, 143 ended by SIGHUP, Ctrl-C, SIGTERM.\n\n"
    + _examples("evenkeel init-model recipes/nano_spell_backward.yaml", "evenkeel train recipes/nano_spell_backward.yaml"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"evenkeel {version('evenkeel')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version)] = False,
) -> None:
    pass


ENGINES_DIFFER = 4
"""Exit code of diff-engines when a bit differs."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings that replace the recipe's, by dotted key, e.g. correction.preset=icepop rollout.workers=2. "
        "`evenkeel config` lists the usual ones.",
    ),
]


def quiet() -> None:
    """Silence warnings and the logs of libraries, in this process and in those that it starts."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of child processes
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    handler = ToStandardError()
    handler.addFilter(lambda record: record.name.startswith("evenkeel") or record.levelno >= logging.ERROR)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])


class ToStandardError(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is when a record comes: a live panel replaces it by a stream that prints above the panel."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def home_of_the_homeless() -> dict[str, str]:
    """HOME, where it can't be determined (an id without an entry in /etc/passwd, as containers are often given one, and no HOME); nothing
    where it can. Libraries look for their caches below it: some fail without, some make a
    folder called "~" where the run was started."""
    with contextlib.suppress(RuntimeError):
        Path.home()
        return {}
    folder = Path(tempfile.gettempdir(), f"evenkeel-home-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return {"HOME": str(folder) if is_ours else tempfile.mkdtemp(prefix=f"{folder.name}-")}


def main() -> None:
    """Entry point of the console script: one sentence and a non-zero exit for whatever is wrong with the input."""
    quiet()
    prepare_streams()
    inherit()
    with signals.guarded(), environment(SAFE_PATH | home_of_the_homeless()):
        try:
            app()
        except EvenkeelError as error:
            sys.exit(_sentence(str(error), error))
        except OSError as error:
            sys.exit(_sentence(refused_file(error), error))
        except (KeyboardInterrupt, asyncio.CancelledError, signals.Interrupted) as error:
            number = error.number if isinstance(error, signals.Interrupted) else int(signal.SIGINT)
            ended = "interrupted" if number == signal.SIGINT else f"ended by {signals.NAMES[number]}"
            put(f"{_sentence(ended, error)}\n", sys.stderr)
            sys.exit(signals.code_after(number))


def _sentence(text: str, error: BaseException) -> str:
    """What a command ends with, and below it what can be done after that."""
    return "\n".join([f"evenkeel: {text}", *getattr(error, "__notes__", ())])


_DISCARD_GROUPS = "With --resume: discard finished groups that the new settings make unusable, and sample their prompts again."


@app.command(
    cls=TakesSettings,
    epilog=_examples(
        "evenkeel train recipes/nano_spell_backward.yaml",
        "evenkeel train recipes/nano_spell_backward.yaml steps=100 correction.preset=icepop",
        "evenkeel train --resume runs/nano-spell-backward-20260101-120000 steps=200",
        "evenkeel train recipes/nano_spell_backward.yaml --retries 3",
        "evenkeel train recipes/qwen3_8b_8gpu.yaml --smoke",
    ),
)
def train(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe: YAML that says model, task and steps. Left out with --resume.")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Continue an earlier run from its newest checkpoint; its folder holds the recipe."),
    ] = None,
    discard_groups: Annotated[bool, typer.Option("--discard-groups", help=_DISCARD_GROUPS)] = False,
    retries: Annotated[int, typer.Option(min=0, help="Restart the run's process at most this many times if it dies or hangs.")] = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="Make one step on a model of two layers, say what passed, and remove it.")] = False,
) -> None:
    """Train a model by reinforcement learning, as a recipe says.

    On a terminal it shows a live panel, anywhere else one line a step: reward, tokens a second, mismatch between the engines. Everything
    is kept in a folder of its own (runs/NAME-DATE-TIME, or run_dir): settings, metrics, sampled answers, checkpoints, and report.html at
    the end. Ctrl-C finishes the current step, SIGTERM aborts it; both write a checkpoint. A second signal ends the run at once.

    With --retries a run whose process dies (a crash, kill -9, out of memory) or hangs resumes from its newest checkpoint, or starts over if
    there is none. An error before its first new step is final: what the run was given is wrong.

    With --smoke it makes one step of the same run on two layers of the model with random weights, and says what passed: ranks, engines, the
    step, the weight sync, and by how much engine and learner differ. Its folder is removed, or kept and named if something fails.

    Exit codes: 0 done, or ended by Ctrl-C with a checkpoint; 1 an error, with a message; 3 ended by an alarm
    (monitor.on_alarm=stop) or for want of groups with a gradient (dynamic_sampling); 129 or 143 ended by SIGHUP or SIGTERM with a
    checkpoint: continue with --resume.
    """
    # With --resume the first positional argument, if any, is an override.
    words = [*([str(recipe)] if recipe and resume else []), *(overrides or [])]
    if smoke and (resume or retries or discard_groups):
        raise ConfigError("evenkeel train --smoke makes one step of a new run: leave --resume, --retries and --discard-groups out")
    if (recipe is None or discard_groups) and resume is None:
        raise ConfigError("evenkeel train needs a recipe, such as recipes/nano_spell_backward.yaml, or --resume RUN_DIR")
    from evenkeel.resume_point import run_dir_of

    run_dir = run_dir_of(recipe, words, resume)  # a typo shows before the imports, which take seconds
    if retries:
        from evenkeel.retries import run_with_retries

        raise typer.Exit(run_with_retries(None if resume else recipe, words, run_dir, retries=retries, discard_groups=discard_groups))
    from evenkeel.engines.machine import gc_paused

    if smoke:
        from evenkeel.smoke import smoke_run

        assert recipe is not None
        raise typer.Exit(smoke_run(recipe, words, typer.echo))
    with gc_paused():
        from evenkeel.training import train_run

    summary = train_run(None if resume else recipe, words, resume, discard_groups=discard_groups)
    raise typer.Exit(summary.exit_code)


@app.command(
    "init-model",
    cls=TakesSettings,
    epilog=_examples(
        "evenkeel init-model recipes/nano_spell_backward.yaml",
        "evenkeel init-model recipes/nano_spell_backward.yaml model=models/wider init.architecture.hidden_size=512",
    ),
)
def init_model(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) with a section `init`: published weights, or the shape of a small model.")],
    overrides: Overrides = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing if the model folder is there already.")] = False,
) -> None:
    """Make the Hugging Face folder that the recipe names in `model`.

    With init.hub or init.gguf it is made of published weights: the hub's, or those of a GGUF file, which become float32. Otherwise it is a
    small model from nothing: a tokenizer of its own, and random weights after a short supervised warm-up on solved examples of the recipe's
    task, so that reinforcement learning starts from a model that is sometimes right.
    """
    config = _load(recipe, overrides)
    from evenkeel.init_model import init_model_folder

    init_model_folder(config, if_missing=if_missing, say=typer.echo)


@app.command(
    "eval",
    cls=TakesSettings,
    epilog=_examples(
        "evenkeel eval models/nano-spell-backward --task recipes/nano_spell_backward.yaml",
        "evenkeel eval RUN_DIR",
        "evenkeel eval MODEL_FOLDER --task chain_sum --temperature 0 --samples answers.txt",
        "evenkeel eval MODEL_FOLDER --task chain_sum --answers 32 --temperature 0.7 --top-p 0.95",
        "evenkeel eval MODEL_FOLDER --task chain_sum rollout.task.options.max_terms=2",
    ),
)
def evaluate(
    model: Annotated[Path, typer.Argument(help="Model: a Hugging Face folder, a checkpoint, or a run's folder, for its best checkpoint.")],
    overrides: Overrides = None,
    task: Annotated[
        str,
        typer.Option(
            metavar="RECIPE|NAME",
            help="What to ask: a recipe (its task and its reward), or the name of a reasoning-gym data set (scored by that data set). "
            "Default for a run's folder: that run's recipe.",
        ),
    ] = "",
    problems: Annotated[int, typer.Option(min=1, help="How many held-out questions to ask. Training never sees these.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; 0 takes the likeliest token. Default: evaluation.temperature of the recipe."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens that hold this share. Default: evaluation.top_p of the recipe.")
    ] = None,
    answers: Annotated[
        int | None, typer.Option(help="Answers to each question; several give pass@k, too. Default: evaluation.samples of the recipe.")
    ] = None,
    samples: Annotated[Path | None, typer.Option(help="Write every question, answer and reward to this text file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file, by the names of docs/metrics.md.")] = None,
) -> None:
    """Ask a model the held-out questions of a task and print its accuracy.

    SGLang answers each question once, or several times. The accuracy comes with its 95% Wilson interval, whose unit is the question,
    and with the number of answers that could not be scored. Several answers also give pass@k, the unbiased estimate of the chance that at
    least one of k is right.

    If --task names a data set, answers have at most 256 tokens, or a quarter of the model's context if that is less.
    """
    from evenkeel.task_config import meant_model

    given = model
    model, recipe = meant_model(given)
    if model != given:
        typer.echo(f"model: {model}")
    task = task or str(recipe or "")
    if not task:
        raise ConfigError(
            "evenkeel eval needs --task: a recipe such as recipes/nano_spell_backward.yaml, or a reasoning-gym data set such as chain_sum"
        )
    from evenkeel.task_config import task_config

    chosen = {"temperature": temperature, "top_p": top_p, "samples": answers}
    words = [*(overrides or []), *(f"evaluation.{key}={value}" for key, value in chosen.items() if value is not None)]
    task_config(model, task, words, problems=problems)  # a typo shows before the imports, which take seconds
    from evenkeel.evaluation import evaluate_folder

    result = evaluate_folder(model, task, words, problems=problems, samples=samples, say=typer.echo)
    if json is not None:
        json.write_text(dumps(result.metrics()))


@app.command(
    "filter",
    cls=TakesSettings,
    epilog=_examples(
        "evenkeel filter recipes/nano_spell_backward.yaml --questions 500 --output solvable.jsonl",
        "evenkeel filter RECIPE --answers 16 --max-solved 15 --output between.jsonl",
    ),
)
def filter_rows(
    recipe: Annotated[Path, typer.Argument(help="Recipe whose model is asked the training questions of its task, sampled as in training.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="The .jsonl file of the questions that are kept.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers to each question.")] = 8,
    questions: Annotated[int | None, typer.Option(min=1, help="How many to ask. Default: all; a generated task has no end.")] = None,
    min_solved: Annotated[int, typer.Option(min=0, help="Keep a question if at least this many of its answers are right.")] = 1,
    max_solved: Annotated[int | None, typer.Option(min=0, help="And at most this many. Default: all of them.")] = None,
) -> None:
    """Keep the training questions that a model solves sometimes, as rows that a recipe can train on.

    Questions that it never solves or always solves carry no gradient. Answers are sampled as in training. Every question asked is recorded
    next to the output (OUTPUT.asked.jsonl): the same command continues after an interruption, and other bounds need no new answers.
    """
    if output is None or output.suffix != ".jsonl":
        raise ConfigError(f"evenkeel filter needs --output, a file that ends in .jsonl{'' if output is None else f'; {output} does not'}")
    config = _load(recipe, overrides)
    from evenkeel.filter import Bounds, filter_questions

    filter_questions(config, output, Bounds.of(answers, min_solved, max_solved), questions=questions, say=typer.echo)


@app.command(epilog=_examples("evenkeel report runs/nano-spell-backward-20260101-120000"))
def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a run: finished, interrupted or still training.")]) -> None:
    """Write the report of a run again: RUN_DIR/report.html, the page of `evenkeel dashboard` frozen into one file.

    A run writes its report when it ends. Use this for one that is still training or was killed.
    """
    from evenkeel.actors.record.run_folder import RunFolder

    folder = RunFolder.view(run_dir)
    from evenkeel.dashboard.frozen import write_report

    typer.echo(f"report: {write_report(folder)}")


@app.command(
    epilog=_examples(
        "evenkeel trace runs/nano-spell-backward-20260101-120000", "evenkeel trace RUN_DIR --otlp http://127.0.0.1:4318/v1/traces"
    )
)
def trace(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run: finished, interrupted or still training.")],
    output: Annotated[Path | None, typer.Option(help="File to write. Default: trace.json in the run's folder.")] = None,
    otlp: Annotated[str, typer.Option(metavar="URL", help="Send to this OpenTelemetry collector (OTLP over HTTP) instead.")] = "",
) -> None:
    """Write what each process of a run did when, for a trace viewer: open the file at ui.perfetto.dev or chrome://tracing.

    A run keeps its spans in timeline.jsonl, a line for each: who sampled, waited, updated, trained or published, when, and for which
    version and group. Time of which nothing is known is empty.
    """
    from evenkeel.actors.record.run_folder import RunFolder
    from evenkeel.trace import send_spans, write_trace

    if output is not None and otlp:
        raise ConfigError("evenkeel trace takes --output or --otlp: it writes a file, or sends to a collector instead")
    folder = RunFolder.view(run_dir)
    typer.echo(f"sent: {send_spans(folder, otlp)} spans" if otlp else f"trace: {write_trace(folder, output)}")


@app.command(
    epilog=_examples(
        "evenkeel dashboard runs/nano-spell-backward-20260101-120000",
        "evenkeel dashboard RUN_DIR OTHER_RUN_DIR --port 8790",
    )
)
def dashboard(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs, each training or finished; one or several.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 0,
) -> None:
    """Show runs in a browser: a page of this machine alone, which follows them while they train.

    It prints the page's address, with a token that the page asks for, and serves until Ctrl-C. Only the files of these runs are read, and
    nothing is changed.
    """
    from evenkeel.dashboard.server import serve

    serve(run_dirs, port=port, say=typer.echo)


@app.command(
    cls=TakesSettings,
    epilog=_examples(
        "evenkeel config",
        "evenkeel config --section rollout.engine",
        "evenkeel config recipes/nano_spell_backward.yaml correction.preset=icepop",
        "evenkeel config --explain | less",
    ),
)
def config(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe (YAML) to print with all of its defaults filled in.")] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain every key that there is: type, default, meaning.")] = False,
    section: Annotated[str, typer.Option(metavar="KEY", help="Explain the keys of one section, e.g. rollout.engine.")] = "",
) -> None:
    """Print a recipe as it will be used, or explain the settings.

    With a recipe it prints YAML with the defaults filled in and the KEY=VALUE settings applied, and starts nothing. What a run derives from
    other settings, the hardware or the model is left out, unless the recipe gives it; config.yaml of a run shows that. With --explain or
    --section it says of each key where its value comes from, and what it means. Without a recipe it explains the settings that one usually
    sets, two lines for each; with --explain or --section all, or those of a section.
    """
    from evenkeel.actors.config import RunConfig
    from evenkeel.explain import explain as explain_keys
    from evenkeel.explain import explain_basics, explain_values

    if recipe is None:
        typer.echo(explain_keys(RunConfig, section) if explain or section else explain_basics(RunConfig))
        return
    import yaml

    from evenkeel.recipe import as_recipe, read_recipe

    read = read_recipe(RunConfig, recipe, overrides or [])
    if explain or section:
        typer.echo(explain_values(read.config, read.source.exact, section))
        return
    typer.echo(yaml.safe_dump(as_recipe(read.config), sort_keys=False))


@app.command(epilog=_examples("evenkeel presets", "evenkeel presets icepop", "evenkeel presets | grep -i experts"))
def presets(name: Annotated[str, typer.Argument(metavar="[NAME]", help="The preset to show in full.")] = "") -> None:
    """List the named correction methods, or show one in full.

    The list says when to use each method, and its source. With a NAME it shows what that method optimises, its settings as YAML, and what
    is left for you to choose. A recipe selects a method with `correction: {preset: NAME}`.
    """
    from rich.console import Console

    from evenkeel.explain import show_preset, show_presets

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    if name:
        show_preset(console, name)
    else:
        show_presets(console)


@app.command(
    "diff-engines",
    epilog=_examples(
        "evenkeel diff-engines models/nano-spell-backward",
        "evenkeel diff-engines models/nano-spell-backward --no-true-on-policy --dtype bfloat16",
    ),
)
def diff_engines(
    model: Annotated[Path, typer.Argument(help="Model: a Hugging Face folder, such as `evenkeel init-model` makes.")],
    true_on_policy: Annotated[
        bool,
        typer.Option(
            "--true-on-policy/--no-true-on-policy",
            help="Batch-invariant operators, the same in both engines, as true on-policy has them; or each engine's usual ones.",
        ),
    ] = True,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Number format of both engines; auto: bfloat16 on a GPU, else float32.")
    ] = "auto",
    prompts: Annotated[int, typer.Option(min=1, help="How many random prompts SGLang answers at the same time.")] = 6,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens it samples for each of them.")] = 16,
) -> None:
    """Compute the same tokens with SGLang and with Megatron, and name the first operator at which they differ.

    SGLang answers random prompts, Megatron computes the same tokens again, and both record what each operator made of them. A table has a
    row for each operator with its largest difference; the last line names the first that differs. Progress goes to standard error.

    Exit codes: 0 all bits are equal; 1 an error; 4 some bit differs.
    """
    say = _stopwatch()
    say("loading torch, SGLang and Megatron")
    from rich.console import Console

    from evenkeel.diff_engines import diff_engines as compare_engines

    found = compare_engines(model, true_on_policy=true_on_policy, dtype=dtype, prompts=prompts, tokens=tokens, say=say)
    say("done")
    Console().print(found.table())
    typer.echo(str(found))
    if found.parting is not None:
        raise typer.Exit(ENGINES_DIFFER)


app.command(
    cls=TakesSettings,
    epilog=_examples("evenkeel doctor recipes/nano_spell_backward.yaml", "evenkeel doctor RECIPE --gpus H100x8", "evenkeel doctor RUN_DIR"),
)(doctor)

app.command(cls=TakesSettings, epilog=_examples("evenkeel plan RECIPE --gpus H100x8", "evenkeel plan RECIPE --gpus H100x8x4 --json"))(plan)

app.command(
    cls=TakesSettings,
    epilog=_examples(
        "evenkeel deploy RECIPE --kuberay --image REGISTRY/evenkeel:gpu --volume shared --gpus H200x8 | kubectl apply -f -",
        "evenkeel deploy RECIPE --aws --image REGISTRY/evenkeel:gpu --volume FILE_SERVER rollout.min_workers=1 rollout.max_workers=16",
        "evenkeel deploy RECIPE --local --host 10.0.0.1 --host 10.0.0.2 | tee cluster.yaml",
        "evenkeel deploy RECIPE --slurm --gpus H100x8 | sbatch --time=24:00:00",
    ),
)(deploy)


@app.command(epilog=_examples("evenkeel capabilities"))
def capabilities() -> None:
    """Print what the installed engines can do on this machine, as JSON.

    Versions of SGLang and torch, the device, and which of the functions that evenkeel needs are there. Worth attaching to a bug report.
    """
    from dataclasses import asdict

    from evenkeel.rollout.engine_settings.engine_capabilities import EngineCapabilities
    from evenkeel.rollout.engine_settings.engine_config import EngineConfig

    device = EngineConfig().on_this_machine().resolved_device
    typer.echo(dumps(asdict(EngineCapabilities.of_this_machine(device)), indent=2, default=str))


def _load(recipe: Path | None, overrides: list[str] | None) -> RunConfig:
    from evenkeel.actors.config import RunConfig
    from evenkeel.recipe import load_config

    return load_config(RunConfig, recipe, overrides or [])


def _stopwatch() -> Callable[[str], None]:
    """Prints what is done next on standard error, with the seconds since now."""
    began = time.monotonic()
    return lambda text: typer.echo(f"{time.monotonic() - began:6.1f} s  {text}", err=True)


if __name__ == "__main__":
    main()
