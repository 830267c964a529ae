"""A run against its own start: what is followed, what is usual, and another correction in the middle of a run. Without torch."""
