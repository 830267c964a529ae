"""report.html: the page of a run, frozen into one file: the same views over the numbers that its folder holds now."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import ConfigError
from evenkeel.dashboard.columns import those_of
from evenkeel.dashboard.correction_view import BUCKETS, correction
from evenkeel.dashboard.curves import CORRECTION_CURVES, CURVES, POOL_CURVES, STALENESS
from evenkeel.dashboard.facts import ELAPSED, SUMMARY
from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.server import PAGE, beginning, json_bytes
from evenkeel.dashboard.tokens import kept_steps, tokens
from evenkeel.dashboard.views import VIEWS

SHOWN = (
    *(name for curves in (*CURVES, *CORRECTION_CURVES, *POOL_CURVES) for name in curves.names),
    *(name for name, _ in SUMMARY),
    *BUCKETS,
    STALENESS,
    ELAPSED,
)
"""Metrics and families whose values of all steps are on it."""
_OF_STEPS = ("tokens", "correction")  # views of a step, the newest if none is named
# What a file's own scripts and styles may be: those with these sums. Nothing else runs, and nothing is fetched.
_POLICY = "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none'; form-action 'none'"


def write_report(folder: RunFolder) -> Path:
    """Write the page of a run, finished or not.

    Returns: path of report.html in the run folder.
    Raises: ConfigError if the run's config.yaml is damaged; OSError.
    """
    run = OpenRun(folder.path, wanted=those_of(SHOWN))
    return folder.write_text(folder.report_path.name, page_of(frozen_data(run)))


def frozen_data(run: OpenRun) -> dict[str, Any]:
    """What each view has, by its address: its name, and the step where one is chosen (page/page.js)."""
    kept = {kind: _ends(steps) for kind, steps in kept_steps(run).items()}
    written = f"{datetime.now().isoformat(sep=' ', timespec='seconds')} by evenkeel {version('evenkeel')}"
    found: dict[str, Any] = {"start": beginning([run]) | {"written": written}}
    whole = _whole(run)
    for view in VIEWS:
        if view.name not in _OF_STEPS or not kept["step"]:
            found[view.name] = _shown(view.data, run, whole if view.name == "timeline" else {})
    for step in kept["step"]:
        found[f"tokens?step={step}"] = _shown(tokens, run, {"step": str(step)})
        found[f"correction?step={step}"] = _shown(correction, run, {"step": str(step)})
    for step in kept["held_out"]:
        found[f"tokens?kind=held_out&step={step}"] = _shown(tokens, run, {"kind": "held_out", "step": str(step)})
    for name, one in found.items():
        if "kept" in one:
            one["kept"] = kept if name.startswith("tokens") else kept["step"]
    # The newest step is there once: whoever names none is sent to it.
    newest = {name: f"{name}?step={kept['step'][-1]}" for name in _OF_STEPS if kept["step"]}
    if kept["held_out"]:
        newest["tokens?kind=held_out"] = f"tokens?kind=held_out&step={kept['held_out'][-1]}"
    return found | {name: {"same_as": other} for name, other in newest.items()}


def _ends(steps: Sequence[int]) -> list[int]:
    """The first, the middle and the last."""
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []


def _whole(run: OpenRun) -> dict[str, str]:
    """The query for all of the timeline, from the first step on: a start may be longer than all that follows."""
    spans = run.spans
    if not len(spans.begin):
        return {}
    steps = [begin for begin, kind in zip(spans.begin, spans.kind, strict=True) if spans.kinds[kind][1] == "step"]
    return {"begin": str(min(steps or spans.begin)), "end": str(max(spans.end))}


def _shown(data: Callable[[OpenRun, Mapping[str, str]], dict[str, Any]], run: OpenRun, query: Mapping[str, str]) -> dict[str, Any]:
    """A view's data, or the sentence that it is refused with: the others are worth having."""
    try:
        return data(run, query)
    except (ValueError, OSError, ConfigError) as error:
        return {"error": " ".join(str(error).split())}


def page_of(found: dict[str, Any]) -> str:
    """The page as one file: its styles, scripts and data within."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    scripts = [(PAGE / name).read_text(encoding="utf-8") for name in re.findall(r'<script src="page/([\w.]+)">', page)]
    assert not any("</script" in text or "<!--" in text for text in scripts)
    policy = _POLICY.format(scripts=" ".join(map(_sum_of, scripts)), styles=_sum_of(style))
    # Every "<" of the data is escaped: what a model wrote can't end the element.
    data = json_bytes(found).decode().replace("<", "\\u003c")
    head, rest = page.split('<link rel="stylesheet" href="page/style.css">')
    body, _ = rest.split('<script src="page/', 1)
    head = head.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">')
    held = f'<script type="application/json" id="frozen">{data}</script>'
    return "\n".join(
        [head + f"<style>{style}</style>" + body + held, *(f"<script>{text}</script>" for text in scripts), "</body>", "</html>\n"]
    )


def _sum_of(text: str) -> str:
    """How a content policy names a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
