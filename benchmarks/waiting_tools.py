"""Sessions whose tools sleep against sessions whose tools answer at once: how busy each keeps one engine.

    python benchmarks/waiting_tools.py [--sessions 200] [--requests 64] [--sleep 0.5] [--turns 3] [--check 0.9]

Both sides have as many sessions of several turns under way at once, in environments, as a rollout worker plays them, with a nano model
whose turns end by chance after 32 tokens on average. A step of the one side's environment sleeps. There are more sessions than the engine
takes at a time, so those that wait should cost it nothing. The ratio is of the tokens that the engine samples in a second, in turns of one
run, over the same number of tokens; on a machine with other work it says little. How often the engine had as many requests as it takes, or
more, says whether it was busy on such a machine, too. `--check` fails below a ratio.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import AutoTokenizer

from benchmarks.sides import NANO_RECIPE, TimeRatio, evenkeel, in_turns, options
from evenkeel.rollout.config import EnvironmentConfig, EnvironmentReward, SamplingConfig
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.rewards.rewards import RewardPool
from evenkeel.rollout.sampler import Player, Sampler
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.trajectory import Prompt
from lab.background_loop import BackgroundLoop

GROUP = 8
TURN_TOKENS = 32
ENVIRONMENT = """
import asyncio


class Waits:
    async def reset(self, task):
        self.sleep_s = task["metadata"]["sleep_s"]
        return [3] * 16

    async def step(self, turn):
        await asyncio.sleep(self.sleep_s)
        return [4] * 8, 0.0, False
"""


@dataclass(frozen=True)
class Kept:
    """How busy a side kept the engine."""

    tokens_per_s: float
    full: float
    """Share of many looks at which the engine had as many requests as it works on at a time, or more."""


async def kept(sampler: Sampler, sleep_s: float, sessions: int, requests: int, tokens: int) -> Kept:
    """Play sessions until so many tokens were sampled, of which the first fifth doesn't count."""
    engine, begun = sampler.engine, sampler.engine.sampled_tokens
    prompts = [Prompt(f"train/0/{i}", "", (3,), "", {"sleep_s": sleep_s}) for i in range(sessions // GROUP)]
    playing = [asyncio.ensure_future(sampler.group(prompt, group_id=i, admitted_version=0)) for i, prompt in enumerate(prompts)]
    looks, started, at_start = list[bool](), 0.0, 0
    while (sampled := engine.sampled_tokens - begun) < tokens:
        if sampled < tokens / 5:
            started, at_start = time.monotonic(), sampled
        else:
            looks.append(engine.requests_in_flight >= requests)
        await asyncio.sleep(0.05)
    spent_s = time.monotonic() - started
    await sampler.hand_back()
    await asyncio.gather(*playing)
    engine.is_leaving = False
    return Kept((sampled - at_start) / spent_s, statistics.mean(looks))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sessions", type=int, default=200, help="under way at once")
    parser.add_argument("--requests", type=int, default=64, help="that the engine works on at a time")
    parser.add_argument("--sleep", type=float, default=0.5, help="of a tool, seconds")
    parser.add_argument("--tokens", type=int, default=40_000, help="sampled in a turn of a side")
    parser.add_argument("--turns", type=int, default=3, help="of each side")
    parser.add_argument("--check", type=float, default=None, help="least ratio")
    arguments = parser.parse_args()
    loop = BackgroundLoop()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        evenkeel(
            "init-model", NANO_RECIPE, f"model={folder / 'model'}", "init.warmup.steps=1", "init.architecture.max_position_embeddings=2048"
        )
        (folder / "waits.py").write_text(ENVIRONMENT)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        ends = list(range(8, 8 + max(1, len(tokenizer) // TURN_TOKENS)))
        encoder = ChatEncoder(tokenizer, configured={"generation_config.json": ends})
        config = EngineConfig(
            device="cpu", context_length=1024, max_running_requests=arguments.requests, max_total_tokens=1024 * arguments.sessions
        )
        played = EnvironmentConfig(path="waits:Waits", folder=folder, max_turns=1000)
        engine = loop.run(RolloutEngine.start(folder / "model", config), 600.0)
        settings = SamplingConfig(samples_per_group=GROUP, max_tokens=1000)
        player = Player(encoder, RewardPool(EnvironmentReward()), settings, EnvironmentPool(played))
        sampler = Sampler(engine, {"": player}, places=arguments.sessions)

        def side(sleep_s: float) -> Kept:
            return loop.run(kept(sampler, sleep_s, arguments.sessions, arguments.requests, arguments.tokens), 1800.0)

        try:
            found = in_turns({"at once": lambda _: side(0.0), "sleep": lambda _: side(arguments.sleep)}, arguments.turns, warm_up=1)
        finally:
            loop.run(sampler.close())
            loop.stop()
    print("tools    tokens/s of each turn             share of looks with a full engine")
    for name, each in found.items():
        speeds = "  ".join(f"{one.tokens_per_s:7.0f}" for one in each)
        print(f"{name:<8} {speeds:<33} {'  '.join(f'{one.full:4.2f}' for one in each)}")
    ratio = TimeRatio.of(*([one.tokens_per_s for one in found[name]] for name in ("sleep", "at once")))
    print(f"sleeping tools / tools that answer at once, tokens a second: {ratio}")
    if arguments.check is not None and ratio.median < arguments.check:
        sys.exit(f"the ratio is {ratio.median:.2f}, less than {arguments.check}")


if __name__ == "__main__":
    main()
