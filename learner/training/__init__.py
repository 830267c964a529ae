"""A training step: passes over micro-batches, the loss, a guarded update."""
