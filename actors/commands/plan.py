"""`evenkeel plan`: what a run would need, on GPUs that need not be here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def plan(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) of the run that is meant; of its model only config.json is read.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.")] = None,
    gpus: Annotated[
        str, typer.Option(metavar="NAMExCOUNT[xNODES]", help="GPUs to plan for, such as H100x8, H200x8x4 or 24GBx1.")
    ] = "H100x8",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON, in bytes.")
    ] = False,
) -> None:
    """Say what a run would need, without a GPU: memory by role, requests that fit, bytes of a version and a checkpoint, other layouts.

    Weights, gradients and optimizer are counted, activations are what autograd keeps of the learner's layers. What would be refused
    is said as `evenkeel doctor` says it.

    Exit codes: 0 there is a plan, whatever is said of it; 1 the recipe or the model's config.json leaves nothing to plan with.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from actors.commands.plan_view import in_numbers, make_plan, sections
    from actors.commands.told_recipe import load_told
    from actors.doctor.paper_rules import enough, on_paper, worst_first
    from actors.doctor.start_checks import check_on_paper_or_refuse
    from actors.doctor.views import UNFIT, findings, show
    from actors.plan.gpus import Gpus

    kind, console = Gpus.parse(gpus), Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    found = check_on_paper_or_refuse(load_told(recipe, overrides), has_gpu=True, meant=[kind])
    if isinstance(found, list):
        if as_json:
            typer.echo(json.dumps({"gpus": str(kind), "findings": findings(found)}, indent=2, allow_nan=False))
        else:
            show(console, found, [])
        raise typer.Exit(UNFIT)
    config, facts = found
    complaints = worst_first(on_paper(facts, config) + enough(kind, config))
    made = make_plan(facts, config, kind, complaints)
    if as_json:
        typer.echo(json.dumps(in_numbers(made), indent=2, allow_nan=False))
        return
    for title, rows in sections(made, config).items():
        console.print(f"[bold]{escape(title)}[/]")
        table = Table(box=None, show_header=False, pad_edge=False)
        for what, text in rows:
            table.add_row(f"  {what}", escape(text))
        console.print(table)
    show(console, complaints, [])
