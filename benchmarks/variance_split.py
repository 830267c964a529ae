"""How much of the log ratio's variance is mismatch of the two engines, and how much staleness, with true on-policy off and on.

    OMP_NUM_THREADS=1 python benchmarks/variance_split.py [--steps 20] [--model FOLDER]

Three runs with max_staleness 1 on the small recipe lab/kept_engines.yaml, real SGLang and real Megatron: both in
bfloat16, both in float32, and both in float32 and batch-invariant. Each run's batches are then scored again by the learner, at the
weights that sampled them and at those that trained on them; tokens of staleness 1 count. In the mode the mismatch is 0, and so is the
covariance: the ratio is pure staleness. The program fails if it isn't.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import options
from evenkeel.actors.settings.resolve import with_equal_operators
from evenkeel.correction.diagnostics.variance_split import VarianceSplit, split_variance
from evenkeel.learner.hf.folder import read_json
from lab.kept_engines import KeptEngines, recipe

BFLOAT16 = ("rollout.engine.dtype=bfloat16", "learner.dtype=bfloat16")
KINDS: dict[str, tuple[str, ...]] = {"off, bfloat16": BFLOAT16, "off": (), "on": ("true_on_policy=true",)}
SETTINGS = {"seed": 1, "optimizer_steps_per_batch": 1}


def measure(model: Path, steps: int, overrides: tuple[str, ...]) -> VarianceSplit:
    config = recipe(model, "learner.optimizer_steps_per_batch=1", *overrides)
    config = with_equal_operators(config, read_json(config.model / "config.json"))
    with KeptEngines.start(config) as kept:
        record = kept.run("tis-token", steps=steps, max_staleness=1, **SETTINGS)
        return split_variance(*kept.rescore(record, **SETTINGS))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--model", type=Path, help="folder of the recipe's model, made if it is not there; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder) / "model"
        for kind, overrides in KINDS.items():
            split = measure(model, arguments.steps, overrides)
            print(f"true on-policy {kind}: {split}", flush=True)
    if split.mismatch != 0 or split.covariance != 0 or split.total != split.staleness:
        sys.exit("true on-policy is on, and the two engines still differ")


if __name__ == "__main__":
    main()
