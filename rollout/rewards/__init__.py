"""Scoring in processes that can be killed, with limits on all that a scorer starts."""
