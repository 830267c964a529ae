"""A seed becomes a run's shape and what befalls it, and both become text that can be read, cut down and played again."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import yaml

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_devices

SAMPLES = 2
"""Answers of a group."""
# An undisturbed run's: faults begin while that would be under way, or an evaluation after it.
_START_S, _STEP_S, _END_S = 10.0, 7.0, 5.0
ENDS_A_RUN = {"crash_driver", "stop_driver", "full_disk", "hung_disk"}
"""After one of these the run may end with an error, and is resumed. After any other it has to go on by itself."""


TAKES_BACK = {
    *("lose_node", "late_call", "late_reply", "lost_reply", "lost_call", "stuck_call", "slow_learner"),
    *("freeze_service", "freeze_learner", "kill_learner", "kill_service", "fail_rank"),
}
"""After one of these a run may go back to its last checkpoint, or replace the service: so often before another one, and it ends."""


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    """Seconds of virtual time since the run began."""
    kind: str
    target: int = 0
    """Which of those who are there, modulo their number."""
    lasts: float = 0.0
    """Seconds; or how many times, for what happens to the next so many answers, updates, replies."""
    what: str = ""
    """Method of a call, or in which a rank fails; for a crash: what it does to the newest checkpoint; for an update: whose; for a
    node: what goes with it, later, or that what was lost with it comes late."""

    def __str__(self) -> str:
        rest = [self.what, f"for {self.lasts:g}" if self.lasts else "", f"of #{self.target}" if self.target else ""]
        return " ".join([f"{self.at:.1f} s {self.kind}", *(part for part in rest if part)])


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """All that decides a simulated run."""

    seed: int
    """Of the delays, and of what isn't given here."""
    workers: int
    groups_per_step: int
    max_staleness: int
    steps: int
    checkpoint_every: int
    evaluate_every: int
    dynamic_sampling: bool
    broadcasts: bool
    forwards: bool
    """The learner scores each batch before it trains on it."""
    unscored: float
    """Share of answers that get no reward."""
    faults: tuple[Fault, ...]
    publish_every: int = 1
    """Steps from one version that the engines get to the next."""
    changes: str = ""
    """Of the run's recipe: PATH=VALUE, as on the command line, with a space between two."""
    references: bool = True
    """Groups go on by reference: their tokens stay with the node of their worker until they are read."""

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> FaultSchedule:
        plain = json.loads(text)
        return cls(**{**plain, "faults": tuple(Fault(**fault) for fault in plain["faults"])})

    def with_faults(self, faults: Sequence[Fault]) -> FaultSchedule:
        return replace(self, faults=tuple(faults))

    @property
    def config(self) -> RunConfig:
        return _config(
            self.workers,
            self.groups_per_step,
            self.max_staleness,
            self.steps,
            self.checkpoint_every,
            self.evaluate_every,
            self.dynamic_sampling,
            self.broadcasts,
            self.forwards,
            self.publish_every,
            self.changes,
        )


@cache
def _config(
    workers: int,
    groups: int,
    staleness: int,
    steps: int,
    checkpoint: int,
    evaluate: int,
    dynamic: bool,
    broadcasts: bool,
    forwards: bool,
    publish: int,
    changes: str,
) -> RunConfig:
    config = RunConfig.model_validate(
        _changed(
            changes,
            {
                "model": "model",
                "steps": steps,
                "groups_per_step": groups,
                "max_staleness": staleness,
                "dynamic_sampling": dynamic,
                "checkpoint": {"every_steps": checkpoint, "keep": 2},
                "evaluation": {"every_steps": evaluate, "problems": 6, "problems_between": 4},
                "weight_sync": {"transport": "broadcast" if broadcasts else "object_store", "every_steps": publish},
                "learner": {"optimizer_steps_per_batch": 2 if forwards else 1},
                "correction": {"proximal": "recompute"},
                "deadlines": {
                    "start_s": 150,
                    "batch_s": 1500,
                    "step_s": 300,
                    "sync_s": 60,
                    "checkpoint_s": 120,
                    "evaluation_s": 1500,
                    "notice_s": 60,
                    "drain_s": 0.5,
                },
                "rollout": {
                    "workers": workers,
                    "task": {"kind": "reasoning_gym", "dataset": "chain_sum"},
                    "reward": {"kind": "exact_match"},
                    "sampling": {"samples_per_group": SAMPLES, "max_tokens": 16},
                    "engine": {
                        "device": "cpu",
                        "max_running_requests": 8,
                        "deadlines": {"heartbeat_s": 30, "generate_s": 60, "update_s": 30, "control_s": 30},
                    },
                },
            },
        )
    )
    return with_devices(config, has_gpu=False)


def _changed(changes: str, recipe: dict[str, Any]) -> dict[str, Any]:
    for change in changes.split():
        path, _, value = change.partition("=")
        *sections, name = path.split(".")
        place = recipe
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = yaml.safe_load(value)
    return recipe


_FAULTS = {  # by kind: how often, how long
    "kill_worker": (5, None),
    "lose_node": (4, (0.1, 20.0)),
    "drain_node": (2, (1.0, 100.0)),
    "end_worker": (3, (1.0, 100.0)),
    "resize_pool": (3, (1, 5)),
    "freeze_worker": (3, (1.0, 600.0)),
    "slow_worker": (2, (5.0, 60.0)),
    "lose_scheduler": (3, None),
    "hang_engine": (2, (1.0, 300.0)),
    "garbage": (2, (1, 3)),
    "break_update": (4, (1, 3)),
    "damage_update": (1, (1, 2)),
    "late_call": (3, (1.0, 40.0)),
    "late_reply": (3, (1.0, 40.0)),
    "lost_reply": (3, None),
    "lost_call": (3, None),
    "repeated_call": (3, None),
    "stuck_call": (2, None),
    "no_node": (1, (5.0, 100.0)),
    "slow_learner": (1, (5.0, 60.0)),
    "freeze_service": (2, (1.0, 300.0)),
    "freeze_learner": (1, (1.0, 300.0)),
    "freeze_driver": (1, (1.0, 25.0)),
    "full_disk": (2, (1.0, 60.0)),
    "slow_disk": (2, (5.0, 100.0)),
    "crash_driver": (4, None),
    "stop_driver": (1, None),
    "kill_learner": (1, None),
    "kill_service": (2, None),
    "reject_batches": (1, (1, 2)),
}
# In one run of so many all rewards fail for a while.
_DEAD_JUDGES = 16
# In one run of so many, from seed _FIRST_UNHEARD on, no worker hears that the run goes back, and nothing else befalls it.
_RETURNS_UNHEARD = 16
_FIRST_UNHEARD = 10
# In one run of so many, from seed _FIRST_FAILED on, the learner's rank raises what torch says of a failed device or collective, too, if
# there are other faults.
_FAILED_RANKS = 16
_FIRST_FAILED = 14
# In one run of so many, from seed _FIRST_PLAYED on, the groups of every other prompt have turns.
_PLAYED_RUNS = 8
_FIRST_PLAYED = 5
TWO_TASKS = (
    'rollout.task=null rollout.reward=null rollout.tasks=[{"name":"asked","task":{"kind":"reasoning_gym","dataset":"a"},'
    '"reward":{"kind":"exact_match"}},{"name":"played","task":{"kind":"reasoning_gym","dataset":"a"},"reward":{"kind":"environment"},'
    '"environment":{"path":"a:B"}}]'
)
_LATE = (
    "generate_group",
    "update_weights",
    "pull",
    "correct",
    "step",
    "export",
    "start",
)
_LOST = (
    *("generate_group", "update_weights", "receive_weights") * 3,
    *("pull", "pack", "correct", "step", "export") * 2,
    *("proximal", "begin_save", "is_saved", "checkpoint_bytes", "restore"),
    *("load", "answer", "start", "abort", "heartbeat", "follow"),
)
_REPEATED = ("generate_group", "pull", "pack", "correct")
_STUCK = ("step", "step", "proximal", "begin_save", "export")
_FAILED = ("step", "step", "proximal", "begin_save", "is_saved", "export", "restore")
_BROKEN = ("", "", "everybody")
_WITH_A_NODE = ("", "", "service", "hangs", "late", "late")
_AFTER_A_CRASH = ("", "truncated", "missing file", "no manifest", "flipped bit", "flipped bit")


def schedule_of(seed: int) -> FaultSchedule:
    chance = random.Random(seed)
    groups, steps = chance.choice((1, 2, 2, 3, 4)), chance.choice((3, 4, 5, 6))
    until_s = _START_S + steps * _STEP_S + _END_S
    faults = sorted((_fault(chance, until_s) for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 6)))), key=lambda fault: fault.at)
    schedule = FaultSchedule(
        seed=seed,
        workers=chance.choice((1, 1, 2, 2, 3, 4)),
        groups_per_step=groups,
        max_staleness=chance.choice((0, 1, 1, 2, 3)),
        steps=steps,
        checkpoint_every=chance.choice((0, 1, 1, 2, 3)),
        evaluate_every=chance.choice((0, 0, 0, 2)),
        dynamic_sampling=chance.random() < 0.3,
        broadcasts=chance.random() < 0.25,
        forwards=groups % 2 == 0 and chance.random() < 0.4,
        unscored=chance.choice((0.0, 0.0, 0.1, 0.4)),
        faults=tuple(faults),
    )
    if seed % _DEAD_JUDGES == _DEAD_JUDGES // 2:
        schedule = schedule.with_faults(sorted([*faults, _dead_judge(seed, until_s)], key=lambda fault: fault.at))
    if seed % _FAILED_RANKS == _FIRST_FAILED and faults:
        schedule = schedule.with_faults(sorted([*faults, _failed_rank(seed, until_s)], key=lambda fault: fault.at))
    schedule = replace(schedule, publish_every=chance.choice((1, 1, schedule.max_staleness + 1)), references=chance.random() < 0.7)
    if seed % _PLAYED_RUNS == _FIRST_PLAYED:
        schedule = replace(schedule, changes=TWO_TASKS)
    return _of_an_unheard_return(schedule) if seed % _RETURNS_UNHEARD == _FIRST_UNHEARD else schedule


def _dead_judge(seed: int, until_s: float) -> Fault:
    """Drawn apart: the other faults of this seed, and all other seeds, stay what they are."""
    chance = random.Random(f"judge of {seed}")
    return Fault(round(chance.uniform(0.0, until_s), 1), "dead_judge", lasts=round(10.0 * 90.0 ** chance.random(), 1))


def _failed_rank(seed: int, until_s: float) -> Fault:
    """Drawn apart, too."""
    chance = random.Random(f"failed rank of {seed}")
    return Fault(round(chance.uniform(0.0, until_s), 1), "fail_rank", chance.randrange(4), what=chance.choice(_FAILED))


def _of_an_unheard_return(schedule: FaultSchedule) -> FaultSchedule:
    """Drawn apart, too: a rank dies some steps after a checkpoint, while slow workers have groups under way that come again."""
    at = round(random.Random(f"return of {schedule.seed}").uniform(12.0, 18.0), 1)
    slow = [Fault(round(at - 1.5, 1), "slow_worker", i, 6.0) for i in range(schedule.workers)]
    unheard = [Fault(at, "lost_call", i, what="follow") for i in range(schedule.workers)]
    faults = (*slow, *unheard, Fault(at, "kill_learner"))
    return replace(schedule, steps=14, groups_per_step=4, max_staleness=3, checkpoint_every=4, publish_every=1, faults=faults)


def _fault(chance: random.Random, until_s: float) -> Fault:
    kinds: dict[str, Any] = _FAULTS
    kind = chance.choices(list(kinds), [often for often, _ in kinds.values()])[0]
    lasts: float = 0.0
    if (limits := kinds[kind][1]) is not None:
        is_count = isinstance(limits[0], int)
        lasts = chance.randint(*limits) if is_count else round(limits[0] * (limits[1] / limits[0]) ** chance.random(), 1)
    # A sync that is given up may still arrive; of the others, what comes later than this ends a run by its deadline.
    methods: dict[str, Any] = {"late_call": _LATE, "late_reply": _LATE, "lost_reply": _LOST, "lost_call": _LOST, "repeated_call": _REPEATED}
    methods |= {"stuck_call": _STUCK, "break_update": _BROKEN, "crash_driver": _AFTER_A_CRASH, "lose_node": _WITH_A_NODE}
    what = chance.choice(methods[kind]) if kind in methods else ""
    if kind == "late_call" and what == "update_weights":
        lasts = round(2.5 * lasts, 1)
    if what == "late":
        lasts = round(10.0 + 2.0 * lasts, 1)
    return Fault(round(chance.uniform(0.0, until_s), 1), kind, chance.randrange(4), lasts, what)
