"""What a learner's rank imports, at the first use of its optimizer and of a model's config too, for the server that ranks are forked from.

Without it each rank imports transformers, and looks through all of these objects when it collects its garbage, as it does when it leaves.
"""
# ruff: noqa: F401

from evenkeel.engines.machine import gc_paused

with gc_paused():
    import torch._dynamo
    import transformers.models.auto.configuration_auto

    import evenkeel.learner.learner_rank
    import tests.learner.learner_cases
