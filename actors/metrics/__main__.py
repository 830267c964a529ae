"""Prints the page of all metrics: python -m actors.metrics > docs/metrics.md"""

from evenkeel.actors.metrics.step_metrics import markdown

print(markdown(), end="")
