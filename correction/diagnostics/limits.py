"""The limits that diagnostics go by: where they are computed, and in what is said of them (quantities.py)."""

from __future__ import annotations

BUCKET_EDGES = (0.1, 0.25, 0.5, 0.75)
"""Edges of the proximal probability in `bucket_`; the paper prints its own only in a figure."""
PERCENTS = (1, 10, 50, 90, 99)
"""Percentiles of log rho, in `log_ratio_quantile_`."""
BAD_UPDATE = 0.5
"""mu - pi of a token with negative advantage from which an update is called bad: Trust Region (arXiv 2602.04879), sec. 5.3."""
SPURIOUS_BELOW = 0.1
"""Proximal probability under which a token counts in `spurious_objective`: objective-level hacking, Eq. 23."""
LEAST_MEAN_ERROR = 0.002
MOST_MEAN_TOKENS = 2500
"""The error of mean rho that a deviation is held against is at least this, and at least that of so many tokens: five of them are 1 %, and a
tenth of rho's own spread. Less can come from which answers were kept: stale tokens of right answers have a larger rho."""
LEAST_EFFECTIVE_TOKENS = 50
"""With fewer, mean rho hangs on a few tokens, and its standard error, which comes from the same ones, says too little."""
