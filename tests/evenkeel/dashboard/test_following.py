"""All views in a real Chromium over one run that is written, torn, cut back by a resume and written anew: they show what its files hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evenkeel.actors.carriers import ScatterSample, TokenSample
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.timeline import LaneSpan, append_spans
from tests.evenkeel.dashboard.conftest import Seen, served
from tests.evenkeel.dashboard.made_runs import made, numbers, sample, with_tokens

Look = Callable[..., Seen]
Compared = tuple[Any, Any]
NOON = 1_767_225_600.0
CUT = 7
"""Token whose weight the correction cuts, of nine."""


def write(folder: RunFolder, step: int, *, time: int, seed: int = 0) -> None:
    """A step: two seconds of which the driver waits for longer each time, tokens, a scatter of all steps up to it, and its numbers."""
    at, waits_to = NOON + 2 * time, NOON + 2.1 * time
    wait = LaneSpan("wait", at, waits_to, step, None, "a batch", lane="driver")
    folder.append_spans([wait, LaneSpan("step", waits_to, at + 2, step, None, None, lane="driver")])
    folder.write_tokens(step, sample(step, seed=seed).save)
    steps, draw = np.repeat(np.arange(1, step + 1, dtype=np.int32), 4), np.random.default_rng(seed)
    mu, far = (draw.integers(1, 64, len(steps)).astype(np.float32) / sign for sign in (-64, 64))
    folder.write_file("scatter.npz", ScatterSample(mu, mu + far, np.arange(len(steps), dtype=np.int32) % 3, steps).save)
    folder.append_metrics(numbers(step))


# Of each view what its page shows, and what that is by the files.


def overview(seen: Seen, folder: RunFolder) -> Compared:
    steps = folder.read_metrics()
    found = seen.points("Reward", 0), seen.page.locator("#view > p").first.inner_text()
    return found, ([[one.step, one["reward/mean"]] for one in steps], f"Stands at step {steps[-1].step} of 40. {folder.path}")


def timeline(seen: Seen, folder: RunFolder) -> Compared:
    spans: list[Any] = [one["span"] for one in seen.points("Timeline", 1)]  # type: ignore[call-overload]
    found = sorted([one["begin"], one["end"], one["what"], one["version"]] for one in spans)
    there = folder.read_timeline()
    whole = there[-1].end - there[0].begin
    busy, waits = (sum(one.end - one.begin for one in there if one.what == what) / whole for what in ("step", "wait"))  # none overlap
    shares = [f"{round(100 * share, 6):.3g}%" for share in (busy, waits, max(0, 1 - busy - waits))]
    told = sorted([one.begin, one.end, one.what, one.version] for one in there)
    return (found, seen.page.locator("#shares td").all_inner_texts()[2:]), (told, shares)


def tokens(seen: Seen, folder: RunFolder) -> Compared:
    """What is said of the token under the pointer, the fourth that was sampled in the first answer."""
    seen.page.mouse.move(0, 0)
    seen.page.locator(".tokens").first.locator(".t").nth(CUT).hover()
    step = folder.read_metrics()[-1].step
    there, _ = TokenSample.load(folder.tokens_path(step))
    of = {name: values[CUT].item() for name, values in there.columns.items()}
    mu, proximal, theta = (of[name] for name in ("behavior", "proximal", "target"))
    policies = {"log mu        ": mu, "log proximal  ": proximal, "log theta     ": theta}
    told = [
        f'" c", token {CUT}',
        f"version {of['versions']}, staleness {there.version - of['versions']}, turn 0",
        *(f"{name}{value:.4f}  (p = {np.exp(value):.4g})" for name, value in policies.items()),
        f"proximal/mu {np.exp(proximal - mu):.4g}, theta/proximal {np.exp(theta - proximal):.4g}",
        f"weight 2, coefficient 1, advantage -1.5, entropy {of['entropy']:.4g}",
        "kept, weight cut to a bound",
    ]
    found = seen.page.inner_text("h2"), seen.page.inner_text(".tip").splitlines()
    return found, (f"4 of 4 trajectories of step {step}", told)


def correction(seen: Seen, folder: RunFolder) -> Compared:
    region = sorted(point for fate in range(4) for point in seen.points("Acceptance region", fate))
    by_engine, far = (
        [seen.points(chart, i) for i in range(n)] for chart, n in (("Mismatch by probability under the engine", 3), ("Distance", 2))
    )
    caption = seen.page.locator("figcaption", has_text="drawn at random").inner_text().split(",")[0]
    last, scatter = folder.read_metrics()[-1], ScatterSample.load(folder.scatter_path)
    of = TokenSample.load(folder.tokens_path(last.step))[0].columns
    own = of["sampled"]
    points = zip(of["behavior"][own].tolist(), (of["proximal"] - of["behavior"])[own].tolist(), strict=True)
    bars = Counter(np.floor(5 * np.log2(of["importance_weight"][own]) + 15).tolist())  # five to a power of two, 1/8 the first
    pairs, is_there = (
        np.stack([scatter.behavior_logprobs, scatter.proximal_logprobs - scatter.behavior_logprobs], axis=1),
        scatter.step <= last.step,
    )
    distances = [pairs[is_there & chosen].tolist() for chosen in (scatter.staleness > 0, scatter.staleness == 0)]
    counts, mean, std = ([last[f"correction/bucket_behavior_{kind}_{i}"] for i in range(5)] for kind in ("tokens", "rho_mean", "rho_std"))
    spread = [list(one) for one in zip(range(5), mean, std, strict=True)]
    found = region, seen.points("Effective weights", 0), far, by_engine, caption
    said = f"Trained tokens of steps 1 to {last.step}"
    return found, (sorted(points), [bars[i] for i in range(30)], distances, [counts, mean, spread], said)


def pool(seen: Seen, folder: RunFolder) -> Compared:
    rows = (row.split("\t") for row in seen.page.locator("#counters tbody tr").all_inner_texts())
    found = {name: count for count, name, _ in rows if name.startswith("pool/failures_total/")}
    steps = folder.read_metrics()
    counts = {f"pool/failures_total/{kind}": f"{steps[-1][f'pool/failures_total/{kind}']:g}" for kind in ("engine_lost", "request_failed")}
    ages = [[[one.step, one[name]] for one in steps] for name in ("staleness/mean", "staleness/max")]
    book = [f"{steps[-1][f'groups/{name}']:g}" for name in ("admitted_total", "trained_total", "discarded_total", "outstanding")]
    shown = seen.page.locator("#book b").all_inner_texts()[:4], [seen.points("Staleness", i) for i in (0, 1)]
    return (*shown, found), (book, ages, counts)


VIEWS = {overview: ".facts", timeline: "#shares", tokens: ".tokens .t", correction: "#bounds", pool: "#book"}


def rounded(found: Any) -> Any:
    """Numbers of single precision, as the page has them and as doubles."""
    if isinstance(found, list | tuple):
        return [rounded(one) for one in found]
    return round(found, 6) if isinstance(found, float) else found


def test_each_view_follows_a_run_that_is_written_torn_and_cut_by_a_resume(tmp_path: Path, look: Look) -> None:
    with made(tmp_path, steps=0) as folder, served(folder.path) as address:
        with_tokens(folder, 1)
        for step in (1, 2, 3):
            write(folder, step, time=step)
        pages = {view: look(address, view.__name__, ready) for view, ready in VIEWS.items()}
        before = dict.fromkeys(VIEWS)

        def compare() -> None:
            """After some looks for news each page shows what the files hold, which is something else than before."""
            for view, seen in pages.items():
                looks = 100
                while (both := rounded(view(seen, folder)))[0] != both[1] and (looks := looks - 1):
                    seen.page.wait_for_timeout(250)
                assert both[0] == both[1] != before[view], view.__name__
                before[view] = both[1]

        compare()
        write(folder, 4, time=4)
        for path in (folder.metrics_path, folder.timeline_path):
            with path.open("a") as file:
                file.write('{"step": 5, "lane": "dri')
        compare()
        folder.close()
        with RunFolder.open(folder.path) as again:  # a resume cuts the torn lines, and goes back; the timeline loses its older half
            again.rewind(2)
            first = LaneSpan("step", NOON + 10, NOON + 11, 2, None, None, lane="driver")
            append_spans(again.timeline_path, [first], most_bytes=again.timeline_path.stat().st_size)
            assert again.read_timeline()[0].version == 3
            compare()
            write(again, 3, time=6, seed=1)
            compare()
