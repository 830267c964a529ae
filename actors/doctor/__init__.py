"""What would fail or go slowly, said before anything starts: rules are pure functions of what is there and what the recipe asks."""
