"""The catalogue refuses what it doesn't list, and its views write what they were given."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evenkeel.actors.config import MetricsConfig
from evenkeel.actors.metrics.catalogue import CATALOGUE, DIAGNOSTIC_PLACES, LOSS_PLACES, Kind
from evenkeel.actors.metrics.step_metrics import MetricError, StepMetrics, is_listed, lookup, markdown, member, members, shown
from evenkeel.actors.record.metric_views import TensorBoardView, open_views, views_from_an_earlier_step
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.step_numbers import diagnostic_metrics, objective_metrics
from evenkeel.actors.record.terminal import _STEP_LINE, step_line
from evenkeel.correction import CorrectionConfig, correct, diagnose, loss_metrics, policy_loss
from evenkeel.correction.diagnostics.quantities import DIAGNOSTICS, LOSS_METRICS, Quantity, Unit, of_family
from evenkeel.correction.settings.parts import CriterionConfig
from evenkeel.dashboard.columns import StepColumns
from evenkeel.dashboard.curves import CURVES
from evenkeel.dashboard.facts import SUMMARY, summary_rows
from tests.actors.record.recorder_cases import result_of
from tests.correction.fixtures import random_batch

ROOT = Path(__file__).parents[3]


FIELD_S_NAMES = (
    *("reward/accuracy", "task/accuracy/", "held_out/accuracy", "held_out/wilson_", "held_out/task_", "held_out/pass_at"),
    *("rho/ess", "correction/rejected_by_"),
)
"""Shares that have other names: an accuracy with its interval, pass@k, effective sample sizes, and a share by its criterion."""


def test_names_of_shares_say_so() -> None:
    """`..._share`, or of a family `..._share/` and `..._share_`; and nothing else is called a share."""
    shares = {name for name, metric in CATALOGUE.items() if metric.unit is Unit.SHARE}
    called = {name for name in CATALOGUE if name.rstrip("/_").endswith("_share")}
    others = {name for name in shares - called if not name.startswith(FIELD_S_NAMES) and "ess" not in name.split("/")[-1].split("_")}
    assert len(called) >= 29 and called <= shares and others == set()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("reward/meen", "reward/mean"),
        ("learner/gradnorm", "learner/grad_norm"),
        ("reward/component/", "reward/component/"),  # a family is no metric
        ("staleness_max", "staleness/max"),
    ],
)
def test_an_unlisted_name_is_an_error_that_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(MetricError) as caught:
        StepMetrics(1, {name: 1.0})
    assert f"{name!r} is not in the catalogue" in str(caught.value) and f"nearest one is {nearest!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("pool/scaled_total/nonsense", "learner_waits|workers_wait|no_longer_needed"),
        ("monitor/alarms_total/no_symptom", "mismatch_k3_kl|k3_kl|ess_token"),
        ("learner/skipped_updates/typo", "not_finite|overflow|no_gradient"),
        ("learner/group_grad_norm/hed", "router|norms|attention|mlp|embedding|lm_head"),
        ("correction/rejected_by_typo", "token|turn|sequence|geometric|maximum"),
        ("correction/staleness_share_x", r"\d+"),
        ("staleness/tokens/x", r"\d+\+?"),
    ],
)
def test_a_family_of_our_own_numbers_has_the_members_that_are_listed(name: str, members: str) -> None:
    """An error names them. The line of a run that has such a number is read without it."""
    with pytest.raises(MetricError) as caught:
        StepMetrics(1, {name: 1.0})
    assert f"{name!r} is not in the catalogue" in str(caught.value) and members in str(caught.value)
    assert dict(StepMetrics.of_record({"step": 1, name: 1.0, "reward/mean": 1.0})) == {"step": 1, "reward/mean": 1.0}


def test_families_whose_members_users_choose_are_open() -> None:
    assert {name for name, metric in CATALOGUE.items() if metric.is_family and not metric.members} == {
        "reward/component/",
        *(f"worker/{quantity}/" for quantity in ("tokens", "groups", "wait_share", "weight_version")),
        *(f"task/{quantity}/" for quantity in ("accuracy", "reward", "groups_share", "prompts_share", "epochs")),
        *(f"held_out/task_{quantity}/" for quantity in ("accuracy", "wilson_low", "wilson_high", "reward")),
    }
    assert CriterionConfig(upper=2.0).label == "ratio_token_rho" and is_listed("correction/rejected_by_binary_kl_max_sequence_q_2")
    assert lookup("reward/component/format").name == "reward/component/" and member("reward/component/format") == "format"
    assert member("reward/mean") == ""
    assert member("correction/rejected_by_k3_token_rho") == "k3_token_rho" and not is_listed("correction/rejected_by_")
    assert is_listed("correction/staleness_share_3") and not is_listed("correction/staleness_share_3/4")


def test_members_of_a_family_are_found_by_its_declaration() -> None:
    numbers = {"worker/tokens/0": 5.0, "worker/tokens/10": 7.0, "worker/tokens/0/late": 1.0, "worker/groups/0": 2.0, "step": 3.0}
    assert members(numbers, "worker/tokens/") == {"0": 5.0, "10": 7.0}
    with pytest.raises(KeyError):
        members(numbers, "worker/token/")
    with pytest.raises(KeyError):
        of_family("rejected_", {"rejected_share": 0.5, "rejected_by_veto": 0.1})


def test_numbers_of_the_correction_are_listed_one_by_one() -> None:
    """Every number that a batch may have finds its entry, and one that its source doesn't list is refused."""
    batch, target = random_batch(1)
    for preset in ("mis-full", "icepop", "bypass"):
        config = CorrectionConfig(preset=preset, kl={"coefficient": 0.1})  # type: ignore[arg-type]
        corrected = correct(batch, config)
        trained = policy_loss(corrected, target, config, target.abs())
        numbers = diagnose(batch, corrected, target, decided=trained.decided, entropy=target.abs(), detailed=True)
        metrics = StepMetrics(1, diagnostic_metrics(numbers))
        told = loss_metrics(trained.partials, config)
        metrics.update(objective_metrics(result_of(1, metrics=told)))
        assert metrics["correction/kept_share"] == numbers["kept_share"]
        assert not told.keys() & numbers.keys(), "each number is told once"
    with pytest.raises(MetricError, match=r"nearest one is 'correction/kept_share'"):
        StepMetrics(1, diagnostic_metrics({"kept_shares": 1.0}))
    assert lookup("correction/k2_kl").unit == "nats" and lookup("correction/staleness_in_flight_mean").unit == "versions"


@pytest.mark.parametrize(("anchor", "place"), [("reference", "learner/reference_kl"), ("behavior", "loss/anchor_kl")])
def test_only_the_kl_to_the_start_model_is_told_as_such(anchor: str, place: str) -> None:
    """That of a penalty on the behaviour policy is another number, which may be there at the same step."""
    batch, target = random_batch(1)
    config = CorrectionConfig.model_validate({"preset": "mis-full", "kl": {"coefficient": 0.1, "anchor": anchor}})
    told = loss_metrics(policy_loss(correct(batch, config), target, config, target.abs()).partials, config)
    assert [name for name in objective_metrics(result_of(1, metrics=told)) if name.endswith(("reference_kl", "anchor_kl"))] == [place]


def test_a_number_of_the_correction_is_described_at_its_source_alone() -> None:
    """Its metric has the unit, label and meaning of its quantity, to which a run may add a word and a sentence. No two sources use one
    name: the loss's drift is over all passes of a batch, that of the diagnostics over the first ones."""
    assert not DIAGNOSTICS.keys() & LOSS_METRICS.keys()
    for name in ("drift_k3_kl", "drift_from_behavior_k3_kl"):
        assert "all passes" in LOSS_METRICS[f"batch_{name}"].help and "first pass" in DIAGNOSTICS[name].help
    elsewhere = {"learner/loss": "loss", "learner/entropy": "entropy", "staleness/mean": "staleness_mean", "staleness/max": "staleness_max"}
    compared = 0
    for quantities, places in ((DIAGNOSTICS, DIAGNOSTIC_PLACES), (LOSS_METRICS, LOSS_PLACES | {"penalty_kl": None})):
        by_place = {place: name for name, place in places.items() if place and name in quantities}
        by_place |= {place: name for place, name in elsewhere.items() if name in quantities}
        for place, name in by_place.items():
            metric, source = CATALOGUE[place], quantities[name]
            assert (metric.unit, metric.of) == (source.unit, source.of) and metric.help.startswith(source.help)
            overall = "overall " * place.startswith("mismatch_and_staleness/")  # a run shows mismatch alone next to it
            assert metric.label == overall + source.label
            compared += 1
    assert compared == 14 + 3 + 4
    assert isinstance(CATALOGUE["time/step_s"], Quantity)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("mismatch/max_abs_log_ratio", 4.6, "4.6 nats"),
        ("time/pause_s", 0.004, "0.004 s"),
        ("staleness/mixed_version_share", 0.004, "0.4%"),
        ("mismatch/k3", 3e-13, "3e-13 nats"),
        ("time/step_s", 2.0, "2.00 s"),
        ("wait/learner_share", 0.34, "34%"),
        ("rejection/rejected_share", 0.01, "1.00%"),
        ("throughput/rollout_tokens_per_s", 1234.4, "1,234 tokens/s"),
        ("groups/trained_total", 1234.0, "1,234"),
        ("held_out/accuracy", 0.5, "0.500"),
        ("held_out/pass_at/8", 0.7, "0.700"),
        ("staleness/max", 3.0, "3"),
    ],
)
def test_a_value_is_written_alike_in_a_log_line_and_in_the_report(name: str, value: float, text: str) -> None:
    """Both take it from the catalogue, which has digits for each unit and for single metrics."""
    assert shown({name: value}, name) == text and shown({}, name) == "-"
    metrics = StepMetrics(1, {name: value})
    label = CATALOGUE[name].label if name in CATALOGUE else ""
    assert set(step_line(metrics, 1).split("  ")[1:]) <= {f"{label} {text}", ""}
    for row, shown_there in summary_rows(StepColumns([metrics]), [], {}):
        assert (row, shown_there) == ("steps", "1") or (row.startswith(label) and shown_there == text)


def test_numbers_that_are_shown_together_have_labels_of_their_own() -> None:
    """In a step's line, in the report's summary and in each of its pictures."""
    for names in (_STEP_LINE, [name for name, _ in SUMMARY], *(curves.names for curves in CURVES)):
        labels = [CATALOGUE[name].label for name in names]
        assert len(set(labels)) == len(labels), labels


def test_absent_is_absent() -> None:
    metrics = StepMetrics(3, {"reward/mean": None, "learner/loss": 0.0})
    assert dict(metrics) == {"step": 3, "learner/loss": 0.0}


def test_a_metric_has_one_source() -> None:
    metrics = StepMetrics(3, {"reward/mean": 0.5})
    metrics.set("reward/mean", 0.5)
    with pytest.raises(MetricError, match=r"recorded twice in step 3: 0\.5 and 0\.6"):
        metrics.set("reward/mean", 0.6)


def test_a_line_is_strict_json_and_comes_back_as_it_was() -> None:
    metrics = StepMetrics(3, {"reward/mean": 0.1, "groups/trained_total": 96, "learner/grad_norm": math.inf, "learner/loss": math.nan})
    line = json.dumps(metrics.record())
    record = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert record == {
        "step": 3,
        "reward/mean": 0.1,
        "groups/trained_total": 96,
        "non_finite": {"learner/grad_norm": "inf", "learner/loss": "nan"},
    }
    back = StepMetrics.of_record(json.loads(line))
    assert back["learner/grad_norm"] == math.inf and math.isnan(back["learner/loss"])
    assert {k: back[k] for k in back.finite()} == {"step": 3, "reward/mean": 0.1, "groups/trained_total": 96}


def test_a_line_of_another_catalogue_is_read_without_what_is_unknown() -> None:
    assert dict(StepMetrics.of_record({"step": 1, "reward/mean": 1, "gone/metric": 2})) == {"step": 1, "reward/mean": 1}


def test_names_say_what_they_are() -> None:
    for metric in CATALOGUE.values():
        assert metric.name.rstrip("/").endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.help.endswith(".") and metric.label, metric.name


def test_the_page_of_metrics_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), "run: python -m evenkeel.actors.metrics > docs/metrics.md"


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(name)]


def test_tensorboard_gets_scalars_by_step_and_forgets_what_a_resume_took_back(tmp_path: Path) -> None:
    first = TensorBoardView(tmp_path)
    for step in (1, 2, 3):
        first.write(StepMetrics(step, {"reward/mean": step / 10, "staleness/tokens/0": 5.0, "learner/loss": math.nan}))
    first.close()
    resumed = TensorBoardView(tmp_path, resumed_from=1)
    resumed.write(StepMetrics(2, {"reward/mean": 0.9}))
    resumed.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.1), (2, 0.9)]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.SummaryMetadata("reward/mean").summary_description == CATALOGUE["reward/mean"].help, "TensorBoard's info button shows it"


def test_a_clock_that_has_gone_back_hides_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, and in one that goes back to a checkpoint twice: each step is drawn once, with its newest value."""
    before = time.time() - 7200
    with RunFolder.create(tmp_path / "run", "x") as folder:
        first = TensorBoardView(folder.tensorboard_path)
        for step in (1, 2, 3):
            first.write(StepMetrics(step, {"reward/mean": 0.1}))
        monkeypatch.setattr(time, "time", lambda: before)
        views = [TensorBoardView(folder.tensorboard_path, resumed_from=2)]
        for value in (0.2, 0.3, 0.4):
            views[0].write(StepMetrics(3, {"reward/mean": value}))
            views = views_from_an_earlier_step(views, folder, 2)  # type: ignore[assignment]
        assert scalars(folder.tensorboard_path, "reward/mean") == [(1, 0.1), (2, 0.1), (3, 0.4)]


def test_steps_that_are_done_again_from_the_beginning_are_drawn_once(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        views = open_views(folder, MetricsConfig(), print)
        views[0].write(StepMetrics(1, {"reward/mean": 0.1}))
        (view,) = views_from_an_earlier_step(views, folder, 0)
        view.write(StepMetrics(1, {"reward/mean": 0.2}))
        assert scalars(folder.tensorboard_path, "reward/mean") == [(1, 0.2)]


def test_the_views_of_a_run_take_up_where_the_folder_stands(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "x")
    folder.append_metrics(StepMetrics(1, {"reward/mean": 0.1}))
    (view,) = open_views(folder, MetricsConfig(), print)
    view.write(StepMetrics(2, {"reward/mean": 0.2}))
    view.write(StepMetrics(2, {"held_out/accuracy": 0.75}))
    view.close()
    folder.close()
    assert scalars(folder.tensorboard_path, "held_out/accuracy") == [(2, 0.75)]
