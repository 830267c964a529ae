"""Signals, lost parts, evaluations, alarms and a disk that hangs, at the moments in which they matter; and what must be true of the run at
its end."""

from __future__ import annotations

import pytest

from tests.simulation.scenarios import Scenario, check
from tests.simulation.schedule import Fault

MANY = range(1, 10_000)
SWITCH = "monitor.on_alarm=switch_preset monitor.preset=mis-geometric"


def hangs(at: float, prompt: str = "", *, times: int = 0) -> Fault:
    return Fault(at, "spoilt_prompt", lasts=times, what=f"hangs {prompt}".strip())


SIGNALS = {
    "while the learner waits for its batch saves at once": Scenario(
        (hangs(14.0, times=12), Fault(40.0, "stop_driver", what="SIGTERM")),
        {"steps": 8},
        drivers=2,
        between=((r"interrupted \(SIGTERM\)", "is told to be complete", 0.0, 5.0),),
        told={
            r"interrupted \(SIGTERM\): ending with a checkpoint of the last finished step, .* until that is on disk, ": 1,
            "exit code 143$": 1,
        },
    ),
    "while the last step is diagnosed doesn't wait for that": Scenario(
        (Fault(7.0, "late_reply", lasts=250.0, what="observe"), Fault(13.0, "stop_driver", what="SIGTERM")),
        {"steps": 8, "checkpoint_every": 0},
        drivers=2,
        between=((r"interrupted \(SIGTERM\)", "is told to be complete", 0.0, 20.0),),
    ),
    "from the keyboard is no error": Scenario(
        (Fault(13.0, "stop_driver", what="SIGINT"),), {"steps": 8}, drivers=2, told={"exit code 0$": 2, "was aborted": 0}
    ),
    "while the run goes back for a lost part ends it at once": Scenario(
        (Fault(16.0, "kill_learner"), Fault(17.2, "stop_driver", what="SIGTERM")),
        {"steps": 8},
        drivers=2,
        returns=1,
        told={r"interrupted \(SIGTERM\): ending at once; ": 1},
    ),
    "just before a part is lost starts nothing again": Scenario(
        (Fault(13.0, "stop_driver", what="SIGTERM"), Fault(13.01, "kill_learner")),
        {"steps": 8, "checkpoint_every": 2},
        drivers=2,
        told={r"not saved: .*; a resume goes on from step": 1},
    ),
    "in the last lines leaves a complete run complete": Scenario(
        (Fault(20.0, "late_reply", lasts=20.0, what="scatter"), Fault(35.0, "stop_driver", what="SIGTERM")),
        told={r"interrupted \(SIGTERM\): all is done and saved, and the run is ending \(next time: at once\)": 1, "exit code 0$": 1},
        between=((r"interrupted \(SIGTERM\)", "driver 0 has ended: ", 5.0, 30.0),),
    ),
    "in the last lines, the second one, ends it at once, and it is complete all the same": Scenario(
        (Fault(20.0, "late_reply", lasts=20.0, what="scatter"), *(Fault(35.0 + i, "stop_driver", i, what="SIGINT") for i in range(2))),
        drivers=2,
        told={r"interrupted \(Ctrl-C\): ending at once; all is done and saved": 1, r"driver -> LearnerRankActor 0.step$": 4},
        between=((r"ending at once", "driver 0 has ended: ", 0.0, 3.0),),
    ),
}
"""A signal ..."""

PARTS = {
    "in the evaluation after training, once too often: it is left out": Scenario(
        tuple(Fault(23.0, "fail_rank", i, what="export") for i in range(4)),
        {"steps": 5, "publish_every": 2},
        returns=3,
        told={"the evaluation after training is left out": 1, "exit code 0$": 1},
    ),
    "between rejected batches: those before the return don't count": Scenario(
        (Fault(8.0, "reject_batches", lasts=2), Fault(16.0, "kill_learner"), Fault(16.1, "reject_batches", lasts=2)),
        {"steps": 8, "checkpoint_every": 0},
        returns=1,
        told={"is skipped": range(3, 6), "info: evaluating before training": 1},
    ),
}
"""A part is lost ..."""

EVALUATIONS = {
    "that takes too long fails alone, and so does the last one": Scenario(
        (hangs(0.0, "held_out/0/1"),),
        {"evaluate_every": 2, "changes": "deadlines.evaluation_s=100"},
        told={
            r"an evaluation during training failed: evaluation during step 3, weights v2 <- rollout workers: not done in 100 s": 1,
            r"left out: evaluation before training, weights v0 <- rollout workers: not done in 100 s": 1,
            r"left out: evaluation after training, weights v4 <- rollout workers: not done in 100 s": 1,
            r"info: waiting \d+ s for evaluation during step 3, weights v2 <- rollout workers": MANY,
        },
        between=(("an evaluation during training failed", "info: evaluating after training", 0.0, 1.0),),
    ),
    "that is due while one is under way is left out": Scenario(
        (hangs(0.0, "held_out/0/1"),),
        {"evaluate_every": 1, "changes": "deadlines.evaluation_s=100", "steps": 6},
        told={r"evaluation of step [2-5] left out: the one before is still running": range(2, 5)},
    ),
}
"""An evaluation ..."""

DISKS = {
    "from the start on ends the run": Scenario(
        (Fault(0.0, "hung_disk", lasts=100_000.0),),
        drivers=MANY,
        ends="config and tokenizer of the model -> the run folder's disk: not done in 360 s",
    ),
    "after the last evaluation ends the run, which doesn't tell of one left out": Scenario(
        (Fault(27.0, "hung_disk", lasts=100_000.0),),
        ends="DeadlineExceeded: lines of the last steps: not done",
        told={"left out": 0},
    ),
    "as the run goes back ends it, after the loss is told": Scenario(
        (Fault(15.9, "hung_disk", lasts=100_000.0), Fault(16.0, "kill_learner")),
        {"steps": 8},
        ends=r"the run folder's disk: not done in .* a resume goes on from the last checkpoint",
        between=(("LearnerRankActor 0 is dead", "lost: learner rank 0 .*; going back to the last checkpoint", 0.0, 40.0),),
    ),
}
"""A disk that hangs ..."""

ALARMS = {
    "that is to replace the correction does so once, and a service that comes later has it": Scenario(
        (Fault(9.0, "alarm"), Fault(14.0, "alarm", 1), Fault(18.0, "kill_service")),
        {"steps": 8, "changes": SWITCH},
        services=1,
        told={
            "info: at the first alarm of the early warning: the correction becomes preset mis-geometric": 1,
            "warning: what monitor.on_alarm = switch_preset puts in place would not hold at an alarm": 1,
            r"warning: alarm of k3_kl at step \d: the correction becomes preset mis-geometric, from the next batch that is begun": 1,
            "driver -> CorrectionService 0.switch$": 1,
        },
    ),
    "whose answer a resume goes on with": Scenario(
        (Fault(9.0, "alarm"), Fault(60.0, "crash_driver")),
        {"steps": 30, "changes": SWITCH},
        drivers=2,
        told={"the correction is the one that an earlier alarm has put in place": 1, r"alarm of k3_kl at step \d: ": 1},
    ),
    "that is to end the run does so with a checkpoint": Scenario(
        (Fault(9.0, "alarm"),),
        {"steps": 8, "checkpoint_every": 0, "changes": "monitor.on_alarm=stop"},
        ends=r"done after [23] steps",
        told={
            r"alarm of k3_kl at step \d: the run ends with a checkpoint, as monitor.on_alarm = stop asks for": 1,
            "is told to be complete": 1,
            "exit code 3$": 1,
        },
    ),
    "from which the run goes back is answered when it comes again": Scenario(
        (Fault(9.0, "alarm"), Fault(16.0, "kill_learner"), Fault(26.0, "alarm", 1)),
        {"steps": 8, "checkpoint_every": 0, "changes": SWITCH},
        returns=1,
        told={r"warning: alarm of k3_kl at step \d: the correction becomes": 2},
    ),
    "of the last step ends nothing": Scenario(
        (Fault(21.0, "alarm"),), {"changes": "monitor.on_alarm=stop"}, told={"evaluating after training": 1, "warning: alarm of k3_kl": 0}
    ),
    "whose answer a silent service would hold up doesn't hold up SIGTERM": Scenario(
        (Fault(9.0, "alarm"), Fault(9.0, "late_reply", lasts=200.0, what="switch"), Fault(25.0, "stop_driver", what="SIGTERM")),
        {"steps": 8, "changes": SWITCH},
        drivers=2,
        between=((r"interrupted \(SIGTERM\)", "is told to be complete", 0.0, 20.0),),
    ),
}
"""An alarm ..."""


@pytest.mark.parametrize("name", SIGNALS)
def test_signals(name: str) -> None:
    check(SIGNALS[name])


@pytest.mark.parametrize("name", PARTS)
def test_lost_parts(name: str) -> None:
    check(PARTS[name])


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations(name: str) -> None:
    check(EVALUATIONS[name])


@pytest.mark.parametrize("name", DISKS)
def test_disks(name: str) -> None:
    check(DISKS[name])


@pytest.mark.parametrize("name", ALARMS)
def test_alarms(name: str) -> None:
    check(ALARMS[name])
