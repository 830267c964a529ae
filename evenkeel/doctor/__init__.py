"""Finds before a run starts what would fail or be slow: rules are pure functions of what is there and what the recipe asks."""
