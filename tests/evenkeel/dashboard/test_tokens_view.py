"""Tokens in a real Chromium: text, colours, classes and numbers are those of the file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from evenkeel.actors.carriers import TokenSample
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.tokens import tokens
from tests.evenkeel.dashboard.conftest import Seen, served
from tests.evenkeel.dashboard.made_runs import PIECES, made, sample, with_tokens

Look = Callable[..., Seen]
ALL_MADE = "() => [...document.querySelectorAll('.tokens')].every(body => body.firstChild)"
SHOWN = "<script>document.title='taken'</script>⟨U+202E⟩gnp.exe⟨U+0007⟩⟨U+200B⟩"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunFolder, str]]:
    with made(tmp_path_factory.mktemp("tokens")) as folder, served(folder.path) as address:
        yield with_tokens(folder, 3, 7, 40), address


def bodies(seen: Seen) -> list[list[str]]:
    """Text of each token of each trajectory that is shown, once all are made."""
    seen.page.wait_for_function(ALL_MADE)
    found: list[list[str]] = seen.page.evaluate(
        "() => [...document.querySelectorAll('.tokens')].map(b => [...b.querySelectorAll('.t')].map(t => t.textContent))"
    )
    return found


def test_the_text_is_that_of_the_tokens_and_is_not_obeyed(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address, "tokens?step=7", ".tokens .t")
    assert bodies(seen) == [[SHOWN if i == 4 else PIECES[i] for i in range(9)]] * 4
    assert "taken" not in seen.page.title()
    heads = seen.page.locator(".answer header").all_text_contents()
    assert "group 70, answer 1" in heads[1] and "reward 0.25" in heads[1] and "advantage -0.5" in heads[1] and "9 tokens" in heads[1]


def test_what_the_correction_did_is_a_class_of_each_token(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address, "tokens?step=7&colour=fate", ".tokens .t.dropped")
    classes = seen.page.evaluate("() => [...document.querySelectorAll('.tokens')[0].querySelectorAll('.t')].map(t => t.className)")
    assert classes == ["t read"] * 4 + ["t kept", "t weighted", "t dropped", "t cut", "t clipped"]


def test_what_was_read_and_what_was_said_are_blocks_with_the_names_of_turns(tmp_path: Path, look: Look) -> None:
    with made(tmp_path) as folder, served(folder.path) as address:
        with_tokens(folder, 7)
        found = sample(7, turns=True)
        found.columns["kept_set"] = np.where(found.columns["sampled"], 3, 0).astype(np.int32)
        folder.write_tokens(7, found.save)
        seen = look(address, "tokens?step=7", ".tokens .t")
        blocks = "() => [...document.querySelector('.tokens').children].map(b => [b.className, ...[...b.children].map(c => c.textContent)])"
        assert seen.page.evaluate(blocks) == [
            ["heard", "prompt", *PIECES[:4]],
            ["said", "turn 0", SHOWN],
            ["heard", "read", PIECES[5]],
            ["said", "turn 1", *PIECES[6:]],
        ]
        seen.page.locator(".tokens").first.focus()
        for _ in range(6):
            seen.page.keyboard.press("ArrowRight")
        assert "read, not sampled" in seen.page.inner_text(".tip"), "arrow keys go on over the ends of blocks"
        seen.page.keyboard.press("ArrowRight")
        assert "turn 1\n" in seen.page.inner_text(".tip") and "drawn from 3 tokens" in seen.page.inner_text(".tip")
        assert "kept set of the draw" in seen.page.locator("#choose-colour option").all_inner_texts()


HUES: dict[str, tuple[Callable[..., float], tuple[float, float], bool]] = {
    "all": (lambda c, k: c["target"][k] - c["behavior"][k], (0.02, 3), True),
    "ratio": (lambda c, k: c["proximal"][k] - c["behavior"][k], (0.02, 3), True),
    "staleness": (lambda c, k: 6 - c["versions"][k], (1, 8), False),
    "entropy": (lambda c, k: c["entropy"][k], (0.1, 5), False),
    "advantage": (lambda c, k: c["advantage"][k], (0.5, 4), True),
    "weight": (lambda c, k: math.log(c["importance_weight"][k]), (0.02, 3), True),
}
"""What is coloured, where the scale ends, and whether it has two sides."""


def test_colours_are_as_strong_as_the_numbers(finished: tuple[RunFolder, str], look: Look) -> None:
    """Strength grows with the logarithm up to the scale's end; blue is below 0, orange above; what was read has none."""
    _, address = finished
    seen, columns = look(address), sample(7).columns
    for hue, (value, (step, end), has_sides) in HUES.items():
        seen.view(f"tokens?step=7&colour={hue}", ".tokens")
        seen.page.wait_for_selector(f"#choose-colour option[value={hue}]:checked", state="attached")
        seen.page.wait_for_function(ALL_MADE)
        drawn = seen.page.evaluate("() => [...document.querySelectorAll('.tokens .t')].map(t => t.style.backgroundColor)")
        assert len(drawn) == 36
        for k, colour in enumerate(drawn):
            if not columns["sampled"][k]:
                assert colour == ""
                continue
            v = float(value(columns, k))
            strength = 0.75 * min(1.0, math.log1p(abs(v) / step) / math.log1p(end / step))
            *rgb, alpha = (float(number) for number in colour.removeprefix("rgba(").rstrip(")").split(","))
            assert alpha == pytest.approx(strength, abs=0.003), (hue, k, v)
            assert rgb == ([0, 158, 115] if not has_sides else [213, 94, 0] if v >= 0 else [0, 114, 178])


def test_each_version_has_a_colour_of_its_own(finished: tuple[RunFolder, str], look: Look) -> None:
    """Tokens alternate between those of versions 5 and 6, which have the palette's sixth and seventh colour; the learner has 6."""
    _, address = finished
    seen = look(address, "tokens?step=7&colour=version", ".tokens .t")
    drawn = seen.page.evaluate("() => [...document.querySelector('.tokens').querySelectorAll('.t')].map(t => t.style.backgroundColor)")
    new, old = "rgba(85, 85, 85, 0.32)", "rgba(86, 180, 233, 0.32)"
    assert drawn == ["", "", "", "", new, old, new, old, new]
    of_key = "() => [...document.querySelectorAll('.key .t')].map(t => [t.parentElement.textContent, t.style.backgroundColor])"
    assert seen.page.evaluate(of_key) == [[" v5  staleness 1", old], [" v6  staleness 0", new]]


def test_arrow_keys_go_from_token_to_token_with_the_file_s_numbers(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address, "tokens?step=7", ".tokens >> nth=1 >> .t")
    seen.page.locator(".tokens").nth(1).focus()
    for _ in range(7):
        seen.page.keyboard.press("ArrowRight")
    tip, columns, k = seen.page.inner_text(".tip"), sample(7).columns, 9 + 6
    for shown in (
        "version 6, staleness 0, turn 0",
        f"log mu        {columns['behavior'][k]:.4f}",
        f"log proximal  {columns['proximal'][k]:.4f}",
        f"log theta     {columns['target'][k]:.4f}",
        f"entropy {columns['entropy'][k]:.4g}",
        "weight 1, coefficient 1, advantage -0.5",
        "dropped by veto",
    ):
        assert shown in tip
    seen.page.keyboard.press("Escape")
    assert seen.page.locator(".tip").is_hidden()


def test_groups_and_rewards_lead_to_their_trajectories(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address, "tokens?step=7", ".tokens .t")
    assert seen.page.inner_text("#degenerate") == "1 of 3 groups have rewards all alike: no gradient."
    bars = seen.points("Rewards of the batch", 0)
    assert sum(bars) == 6 and bars[-1] == 2 and bars[0] == 1 and bars[5] == bars[10] == bars[15] == 1
    seen.page.get_by_role("button", name="71", exact=True).click()
    seen.page.wait_for_selector(".beside-each-other")
    assert ["group 71, answer 0" in text for text in seen.page.locator(".answer header").all_text_contents()] == [True, False]
    seen.page.click("#all-groups")
    seen.view("tokens?step=7&low=0.5&high=0.6", "h2")
    seen.page.wait_for_function("() => document.querySelectorAll('.answer').length === 1")
    assert "reward 0.5" in (seen.page.text_content(".answer header") or "")
    seen.view("tokens?find=NUMBER 1", "section .scroll tbody tr")
    rows = seen.page.locator("section .scroll tbody tr").all_inner_texts()
    assert len(rows) == 8 and rows[0].split("\t")[1] == "40", "of three steps and the evaluation, the newest first"
    count = "n => document.querySelectorAll('section .scroll tbody tr').length === n"
    seen.view("tokens?find=Cat&low=0.75", "section .scroll tbody tr")  # a word that all answers read; each has another reward
    seen.page.wait_for_function(count, arg=3 + 3)
    seen.view("tokens?find=cat&length=10", "h2")
    seen.page.wait_for_function(count, arg=0)


def test_a_click_on_a_bar_of_rewards_shows_all_of_its_answers(tmp_path: Path, look: Look) -> None:
    """-1/3, the lowest, is no number of six digits."""
    with made(tmp_path) as folder, served(folder.path) as address:
        found = sample(7)
        answers = tuple(replace(one, reward=reward) for one, reward in zip(found.answers, (-1 / 3, 0.0, 1 / 3, 1.0), strict=True))
        folder.write_tokens(7, replace(found, answers=answers).save)
        seen = look(address, "tokens?step=7", ".tokens .t")
        assert seen.points("Rewards of the batch", 0)[0] == 1
        seen.page.evaluate("() => charts.get('Rewards of the batch').onClick({dataIndex: 0})")
        seen.page.wait_for_function("() => document.querySelectorAll('.answer').length === 1")
        assert "reward -0.3333" in (seen.page.text_content(".answer header") or "")


def test_a_search_finds_a_character_of_several_tokens(tmp_path: Path) -> None:
    with made(tmp_path) as folder:
        folder.model_path.mkdir()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        tokenizer.save(str(folder.model_path / "tokenizer.json"))
        ids = np.array(tokenizer.encode("so 😀 猫").ids, dtype=np.int32)
        found = sample(7)
        columns = {name: np.resize(values, len(ids)) for name, values in found.columns.items()} | {"token_ids": ids}
        folder.write_tokens(7, TokenSample(6, found.answers[:1], np.array([0, len(ids)]), columns).save)
        run = OpenRun(folder.path)
        assert [len(tokens(run, {"find": words})["found"]) for words in ("😀", "SO 😀 猫", "狗")] == [1, 1, 0]


def test_held_out_answers_have_what_the_engine_says(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address, "tokens?kind=held_out", ".tokens .t")
    assert len(bodies(seen)) == 6
    assert sum(seen.points("Rewards of the evaluation", 0)) == 6 and "Questions of the evaluation" in seen.page.inner_text("main")
    assert seen.page.locator("#choose-colour option").all_inner_texts() == ["surprise of the sampler, −log mu", "weight version"]


def test_a_thousand_trajectories_are_made_as_one_comes_to_them(tmp_path: Path, look: Look) -> None:
    """And no more of them than are near are laid out and painted; one is made in a frame if it takes as long as a frame has: this page's
    clock says so each time that it is asked. So the wheel waits for one trajectory at most."""
    frames = """() => {
      let now = 0;
      performance.now = () => now += 16;
      window.made = [];
      const each = () => {
        made.push([...document.querySelectorAll('.tokens')].filter(b => b.firstChild).length);
        requestAnimationFrame(each);
      };
      each();
    }"""
    with made(tmp_path) as folder, served(folder.path) as address:
        with_tokens(folder, 2, answers=1000)
        seen = look(address)
        seen.page.evaluate(frames)
        seen.view("tokens?step=2", ".tokens .t")
        filled_ones = "[...document.querySelectorAll('.tokens')].filter(b => b.firstChild).length"
        count = f"() => [document.querySelectorAll('.answer').length, {filled_ones}]"
        answers, filled = seen.page.evaluate(count)
        assert answers == 1000 and 0 < filled < 100
        is_drawn = "one => one.checkVisibility({contentVisibilityAuto: true})"
        drawn = f"names => names.map(name => [...document.querySelectorAll(name)].filter({is_drawn}).length)"
        painted, placed = seen.page.evaluate(drawn, [".answer header", ".answer"])
        assert 5 < painted < 45 and painted <= placed <= 100, "of 1,000, about as many as two screens hold, and those of the same pieces"
        seen.page.evaluate("() => scrollTo(0, document.documentElement.scrollHeight)")
        seen.page.wait_for_function("() => [...document.querySelectorAll('.tokens')].at(-1).firstChild")
        assert seen.page.evaluate(count)[1] < 200
        in_frames = seen.page.evaluate("() => made")
        assert max(after - before for before, after in itertools.pairwise(in_frames)) == 1 and in_frames[-1] > 10


def test_a_damaged_file_is_one_sentence_and_an_absent_one_says_what_is_kept(tmp_path: Path, look: Look) -> None:
    with made(tmp_path) as folder, served(folder.path) as address:
        seen = look(address, "tokens", "text=No trajectories are kept token by token yet.")
        with_tokens(folder, 2, 5)
        folder.tokens_path(5).write_bytes(folder.tokens_path(5).read_bytes()[:200])
        seen.view("tokens?step=3", "text=Of step 3 no trajectories are kept.")
        seen.view("tokens?step=5", ".refusal")
        assert "step_000005.npz can't be read: " in seen.page.inner_text(".refusal")
        seen.page.click("#earlier")
        seen.page.wait_for_selector(".tokens .t")
        seen.view("correction?step=5", "#bounds")
        assert "step_000005.npz can't be read: " in seen.page.inner_text(".refusal")


def test_a_resume_that_went_back_hides_what_is_done_again(tmp_path: Path) -> None:
    """Files of withdrawn steps lie there until the steps are done again."""
    with made(tmp_path, steps=5) as folder:
        run = OpenRun(with_tokens(folder, 2, 4, 5).path)
        assert tokens(run, {})["step"] == 5
        folder.rewind(3)
        assert tokens(run, {})["kept"]["step"] == [2] and tokens(run, {})["step"] == 2
        assert np.array_equal(tokens(run, {})["sample"]["offsets"], sample(2).offsets)
