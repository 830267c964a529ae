"""Processes for code of the user's: they can be killed, and have limits on all that they start."""
