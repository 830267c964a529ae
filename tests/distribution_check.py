"""Run by tests/test_distribution.py in environments that have evenkeel-correction: what every preset makes of a batch, as JSON.

The batch comes as lists on stdin, so that no generator of random numbers has to agree.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import evenkeel_correction as correction
import torch

asked = json.load(sys.stdin)
torch.set_default_dtype(torch.float64)  # of tensors that are made of lists of floats
values = {name: torch.tensor(value) for name, value in asked["tensors"].items()}
torch.set_default_dtype(torch.float32)
target = values.pop("target_logprobs").requires_grad_()
listed = values.pop("target_topk_logprobs")
batch = correction.PackedBatch(**values, learner_version=5, advantages_by="own").validate()
found = {}
for preset in correction.PRESETS:
    config = correction.CorrectionConfig(preset=preset)
    corrected = correction.settle(correction.correct(batch, config), target, config)
    trained = correction.policy_loss(corrected, target, config, target_topk_logprobs=listed)
    (gradient,) = torch.autograd.grad(trained.loss, target)
    numbers = correction.diagnose(batch, corrected, target, decided=trained.decided, detailed=True)
    found[preset] = {"gradient": gradient.tolist(), "numbers": numbers}
tops = {module.split(".")[0] for module in sys.modules}
known = {name: getattr(correction, name) is not None for name in correction.__all__}
print(json.dumps({"found": found, "tops": sorted(tops), "names": sorted(known), "versions": [version("torch"), version("pydantic")]}))
