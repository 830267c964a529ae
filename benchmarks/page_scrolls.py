"""How smoothly trajectories scroll in the page, in a real Chromium: time between its frames while a wheel goes from top to bottom.

    python benchmarks/page_scrolls.py [--answers 1000] [--notch 400] [--repeats 2]

The trajectories are made up: 200 to 400 tokens each, of which 60 are read, coloured by their log ratio. The wheel turns by so many pixels
twenty times a second, which is faster than one reads. A frame is what requestAnimationFrame says is one. Others may use the machine, so
processor time is told beside it: that of all of the browser's processes (there is no GPU where this was run: they paint, too) by frame, and
from a last pass, of which no frame counts because Chromium traces it, that of the page's own thread for each frame: nothing else can start
before it is over.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import orjson
from playwright.sync_api import Browser, Page, sync_playwright
from tokenizers import Tokenizer, decoders, models

from benchmarks.page_opens import CHROMIUM, long_run, of_browser, page_of
from benchmarks.sides import options
from evenkeel.actors.carriers import ShownAnswer, TokenSample
from evenkeel.actors.record.run_folder import RunFolder

VOCABULARY = 4000
READ = 60
NOTCH_S = 0.05
FRAMES = """() => {
  const mine = window.frames_at = [];
  const each = (now) => { if (window.frames_at === mine) { mine.push(now); requestAnimationFrame(each); } };
  requestAnimationFrame(each);
}"""
# What Chromium's trace calls the parts of a frame.
PARTS = {
    "script": {"FunctionCall", "EvaluateScript"},
    "style and layout": {"UpdateLayoutTree", "Layout"},
    "paint": {"PrePaint", "Paint", "Layerize", "Commit"},
}


def with_trajectories(folder: RunFolder, answers: int) -> None:
    """A step with so many, in groups of eight."""
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    pieces = [
        "<end>",
        *sorted({" " + "".join(draw.choice(letters, size)) for size in draw.integers(2, 8, 2 * VOCABULARY)})[: VOCABULARY - 1],
    ]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.decoder = decoders.Fuse()
    folder.model_path.mkdir(exist_ok=True)
    tokenizer.save(str(folder.model_path / "tokenizer.json"))
    lengths = draw.integers(200, 401, answers)
    n = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    sampled = np.arange(n) - np.repeat(offsets[:-1], lengths) >= READ
    behavior = np.where(sampled, -draw.exponential(1.0, n), np.nan).astype(np.float32)
    columns = {
        "token_ids": draw.integers(0, len(pieces), n).astype(np.int32),
        "turns": np.zeros(n, np.int32),
        "versions": np.where(sampled, 0, -1).astype(np.int32),
        "sampled": sampled,
        "behavior": behavior,
        "proximal": behavior + draw.normal(0.0, 0.1, n).astype(np.float32),
        "target": behavior + draw.normal(0.0, 0.1, n).astype(np.float32),
        "entropy": np.where(sampled, draw.exponential(1.0, n), np.nan).astype(np.float32),
        "advantage": np.where(sampled, draw.normal(0.0, 1.0, n), np.nan).astype(np.float32),
        "importance_weight": np.where(sampled, draw.lognormal(0.0, 0.1, n), np.nan).astype(np.float32),
        "coefficient": np.where(sampled, 1.0, np.nan).astype(np.float32),
        "kept": sampled,
        "clipped": np.zeros(n, np.bool_),
        "is_cut": np.zeros(n, np.bool_),
        "dropped_by": np.zeros(n, np.uint8),
    }
    told = tuple(
        ShownAnswer(i // 8, i % 8, f"train/0/{i // 8}", f"question {i // 8}", "an answer", float(draw.integers(0, 2)), {}, "stop", None)
        for i in range(answers)
    )
    folder.write_tokens(1, TokenSample(0, told, offsets, columns, ("other",)).save)


def shown(page: Page, address: str) -> float:
    """Seconds until the first trajectories are there."""
    before = time.monotonic()
    page.goto(f"{address}#tokens?step=1", wait_until="commit")
    page.wait_for_selector(".tokens .t", timeout=120_000)
    return time.monotonic() - before


def scrolled(page: Page, notch: int) -> tuple[np.ndarray, float]:
    """[f] milliseconds between the frames of a scroll from top to bottom, and the browser's processor time for it, seconds."""
    page.evaluate("() => document.querySelector('.answers').scrollIntoView()")  # past tables that take the wheel for themselves
    page.wait_for_timeout(500)
    page.mouse.move(640, 500)
    page.evaluate(FRAMES)
    spent, next_at = of_browser(), time.monotonic()
    while not page.evaluate("() => scrollY + innerHeight >= document.documentElement.scrollHeight - 2"):
        page.mouse.wheel(0, notch)
        time.sleep(max(0.0, (next_at := max(next_at + NOTCH_S, time.monotonic())) - time.monotonic()))
    spent = of_browser() - spent
    return np.diff(np.array(page.evaluate("() => frames_at"))), spent


def traced(browser: Browser, page: Page, notch: int) -> tuple[np.ndarray, dict[str, float]]:
    """[f] milliseconds of processor time of the page's thread for each frame of a scroll, and by part their mean."""
    browser.start_tracing(page=page, categories=["cc", "devtools.timeline", "toplevel"])
    scrolled(page, notch)
    events = orjson.loads(browser.stop_tracing())["traceEvents"]
    threads = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"}
    own = [one for one in events if "tdur" in one and (one["pid"], one["tid"]) in threads]  # not what is cut by an end of the trace
    frames = np.array([one["tdur"] for one in own if one["name"] == "ProxyMain::BeginMainFrame"]) / 1e3
    return frames, {part: sum(one["tdur"] for one in own if one["name"] in names) / 1e3 / len(frames) for part, names in PARTS.items()}


def told(milliseconds: np.ndarray) -> str:
    median, most, nearly_all = np.percentile(milliseconds, [50, 95, 99])
    return f"median {median:.1f} ms, 95 % {most:.1f}, 99 % {nearly_all:.1f}, longest {milliseconds.max():.1f}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--notch", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("no Chromium: run deploy/fetch_chromium.sh")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        folder = long_run(Path(scratch) / "long", 2, 40)
        with_trajectories(folder, arguments.answers)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with page_of(folder, browser) as (page, address, _):
            print(f"{arguments.answers:,} trajectories, the first of them there after {shown(page, address):.1f} s")
            for _ in range(arguments.repeats):
                frames, spent = scrolled(page, arguments.notch)
                height = page.evaluate("() => document.documentElement.scrollHeight")
                print(f"{height:,} pixels, {len(frames)} frames: {told(frames)}; processor time {1e3 * spent / len(frames):.1f} ms a frame")
            frames, parts = traced(browser, page, arguments.notch)
        browser.close()
    print(f"processor time of the page's thread, {len(frames)} frames: {told(frames)}")
    print("of that, on average: " + ", ".join(f"{part} {ms:.1f} ms" for part, ms in parts.items()))


if __name__ == "__main__":
    main()
