"""The page in a real Chromium: what it shows is what the files hold, over files that are being written, cut and gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, geometric_mean

import pytest
from playwright.sync_api import Route

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.timeline import LaneSpan
from tests.evenkeel.dashboard.conftest import Seen, served
from tests.evenkeel.dashboard.made_runs import made, numbers, reward, with_tokens

Look = Callable[..., Seen]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunFolder, str]]:
    """A run of forty steps that nothing is added to, and where its page is."""
    with made(tmp_path_factory.mktemp("page")) as folder, served(folder.path) as address:
        yield folder, address


def near(step: int) -> range:
    """Steps over which the running mean of forty is taken: one on either side, fewer at the ends."""
    return range(max(1, step - 1), min(40, step + 1) + 1)


def test_curves_are_the_numbers_of_the_files(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address)
    assert seen.points("Reward", 0) == [[step, pytest.approx(reward(step))] for step in range(1, 41)]
    assert seen.points("Reward", 1) == [[x, pytest.approx(fmean(reward(k) for k in near(x)))] for x in range(1, 41)]
    k3 = seen.points("k3 KL from behaviour to proximal policy", 1)
    assert k3 == [[x, pytest.approx(geometric_mean(1e-4 * k for k in near(x)))] for x in range(1, 41)], "on its axis, which is logarithmic"
    assert [step for step, _ in seen.points("Gradient norm", 0)] == [1, *range(3, 41)], "an infinite value has no point"
    assert seen.points("Held-out accuracy", 0) == [[0, 0.5, 0.45, pytest.approx(0.55)], [40, 0.9, pytest.approx(0.85), pytest.approx(0.95)]]
    shares = [seen.points("Staleness", age)[-1] for age in (0, 1)]
    assert shares == [[40, 0.7], [40, 0.3]]
    text = seen.page.inner_text("main")
    for shown in ("Finished after 40 steps.", "0.500 [0.450, 0.550]", "0.900 [0.850, 0.950]", "+0.400", f"{reward(40):.3f}"):
        assert shown in text
    assert "token" not in seen.page.url, "the token has left the address, and so the history and what is copied"


def test_alarms_and_events_stand_on_the_axis_of_the_curves(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address)
    seen.points("What happened", 0)
    marks = seen.page.evaluate("charts.get('What happened').drawn.getOption().series[0].data.map(d => d.value)")
    assert sorted(map(tuple, marks)) == [(12, "watch"), (20, "alarm"), (30, "warning"), (40, "saved")]
    for chart in ("Reward", "Staleness"):
        seen.points(chart, 0)
        lines = seen.page.evaluate("name => charts.get(name).drawn.getOption().series[0].markLine.data.map(d => d.xAxis)", chart)
        assert lines == [12, 20], chart


def test_a_part_of_the_steps_is_the_same_part_in_all_charts(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address)
    seen.points("Reward", 0)
    seen.page.evaluate("charts.get('Reward').drawn.dispatchAction({type: 'dataZoom', startValue: 10, endValue: 19})")
    drawn = "() => location.hash.includes('from=10') && charts.get('Entropy').drawn.getOption().series[0].data.length === 10"
    seen.page.wait_for_function(drawn)
    assert [step for step, _ in seen.points("Entropy", 0)] == list(range(10, 20))


def test_what_a_model_wrote_is_shown_and_not_obeyed(finished: tuple[RunFolder, str], look: Look) -> None:
    """Markup is text; control characters, and those that turn the direction of what follows, are shown by their numbers."""
    _, address = finished
    seen = look(address)
    item = seen.page.locator(".log li.warning").first
    shown = "a reward raised <script>document.title='taken'</script>⟨U+202E⟩gnp.exe⟨U+0007⟩⟨U+200B⟩"
    assert shown in item.inner_text() and seen.page.title().endswith("Overview (evenkeel)")


DRAWN = "n => charts.get('Reward')?.drawn?.getOption().series[0].data.length === n"


def test_what_is_written_while_the_page_opens_is_shown(tmp_path: Path, look: Look) -> None:
    """Between the answer of which the first picture is made and the first look for news."""
    with made(tmp_path, steps=3) as folder, served(folder.path) as address:

        def then_write(route: Route) -> None:
            answer = route.fetch()
            folder.append_metrics(numbers(4))
            route.fulfill(response=answer)

        seen = look(address, before=lambda page: page.route("**/data/overview*", then_write, times=1))
        seen.page.wait_for_function(DRAWN, arg=4)


def test_a_view_that_takes_longer_than_a_look_follows_the_run(tmp_path: Path, look: Look) -> None:
    """As of a long run over a slow line: begun anew at each look it would never be drawn while the run goes on."""
    with made(tmp_path, steps=3) as folder, served(folder.path) as address:
        seen = look(address)
        seen.page.wait_for_function(DRAWN, arg=3)
        seen.page.evaluate("""() => { const before = fetch; window.fetch = async (url) => {
          if (url.startsWith("data/overview")) await new Promise((done) => setTimeout(done, 3000));
          return before(url);
        }; }""")
        steps = iter(range(4, 404))
        while seen.page.evaluate("() => charts.get('Reward').drawn.getOption().series[0].data.length") == 3:
            folder.append_metrics(numbers(next(steps)))
            seen.page.wait_for_timeout(500)


def test_two_runs_stand_in_one_chart_by_name(tmp_path: Path, look: Look) -> None:
    with made(tmp_path, "first") as one, made(tmp_path, "second", steps=30) as other, served(one.path, other.path) as address:
        seen = look(address)
        seen.points("Entropy", 1)
        names = seen.page.evaluate("charts.get('Entropy').drawn.getOption().series.map(s => [s.name, s.data.length])")
        assert [(name, count) for name, count in names if not name.endswith("\0")] == [("first: entropy", 40), ("second: entropy", 30)]


def test_it_is_used_by_keyboard_and_fits_a_telephone(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address, width=400, height=800)
    seen.page.wait_for_selector(".facts")
    seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("document.activeElement.textContent") == "Skip to the view"
    seen.page.fill("#more", "worker/x")
    seen.page.fill("#more", "time/step_s")
    seen.page.keyboard.press("Enter")
    assert len(seen.points("time/step_s", 0)) == 40


def test_a_chart_is_drawn_when_one_comes_to_it(finished: tuple[RunFolder, str], look: Look) -> None:
    """A page of twenty charts opens in the time of those on the screen; a part of the steps is that part in those that come later, too."""
    _, address = finished
    seen = look(address)
    seen.points("What happened", 0)
    assert seen.page.evaluate("[charts.get('Reward'), charts.get('Where the time goes')].map(one => Boolean(one.drawn))") == [True, False]
    seen.page.evaluate("charts.get('Reward').drawn.dispatchAction({type: 'dataZoom', startValue: 10, endValue: 19})")
    seen.page.wait_for_function("() => location.hash.includes('from=10')")
    assert seen.points("Where the time goes", 0) == [[step, 2.0] for step in range(10, 20)]


@pytest.mark.parametrize("width", [1280, 400])
def test_every_view_fits_a_screen_and_a_telephone(tmp_path: Path, look: Look, width: int) -> None:
    """Also with what is wide: long names, a table of many columns; digits lead from view to view."""
    with made(tmp_path, f"{'x' * 80}") as folder, served(folder.path) as address:
        with_tokens(folder, 40)
        folder.append_spans([LaneSpan("step", 1e9 + k, 1e9 + k + 0.5, k, None, None, lane=f"worker-{k % 3}-{'y' * 30}") for k in range(20)])
        seen = look(address, width=width)
        for digit, ready in (("2", "#shares"), ("3", ".tokens .t"), ("4", "#bounds"), ("5", "#book"), ("1", ".facts")):
            seen.page.keyboard.press(digit)
            seen.page.wait_for_selector(ready)
            assert seen.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), digit
            assert seen.page.locator("nav a[aria-current]").count() == 1
