"""Compares a run with its own start, and makes the correction that replaces the present one after an alarm. Without torch."""
