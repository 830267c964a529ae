"""Colours of curves and bars, in reports and in pictures of simulated runs."""

COLOURS = ("#3a7fc1", "#dd7a2b", "#3c9c63", "#a05cb8", "#c94f5c", "#8a8f2f")
"""Of middle lightness: to be seen on a light and on a dark page."""
