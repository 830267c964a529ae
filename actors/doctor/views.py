"""What the doctor says, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.doctor.facts import Complaint, Severity
from actors.doctor.room_rules import Request
from correction.errors import counted

UNFIT = 1
"""Exit code when something can't work."""
_COLOURS: dict[Severity, str] = {"fail": "bold red", "warn": "yellow", "note": "dim"}


def summary(complaints: Sequence[Complaint]) -> str:
    """A sentence for the last line."""
    fails = sum(one.severity == "fail" for one in complaints)
    warns = sum(one.severity == "warn" for one in complaints)
    if fails:
        return f"{counted(fails, 'failure')}: the run can't work like this"
    return f"ready, with {counted(warns, 'warning')}" if warns else "ready"


def show(console: Console, complaints: Sequence[Complaint], rows: Sequence[Request]) -> None:
    """Print the table of resources, then the complaints in the order given, and the summary."""
    if rows:
        console.print(table_of(rows))
    for one in complaints:
        console.print(f"[{_COLOURS[one.severity]}]{one.severity}[/]  {escape(str(one))}")
    console.print(summary(complaints))


def table_of(rows: Sequence[Request]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("resource", "asked", "there", "free", "for"):
        table.add_column(name, justify="left" if name in ("resource", "for") else "right")
    for row in rows:
        table.add_row(row.kind, f"{row.asked:g}", f"{row.there:g}", f"{row.free:g}", row.parts)
    return table


def as_json(complaints: Sequence[Complaint], rows: Sequence[Request]) -> dict[str, Any]:
    """The same as JSON, for programs."""
    return {
        "summary": summary(complaints),
        "findings": findings(complaints),
        "resources": [asdict(row) for row in rows],
    }


def findings(complaints: Sequence[Complaint]) -> list[dict[str, str]]:
    return [{"level": one.severity, "sentence": one.sentence, "setting": one.setting[:1].upper() + one.setting[1:]} for one in complaints]
