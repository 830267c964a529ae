"""What answers the turns of the model: environments of the user, in processes with limits, and rollouts that are played in them."""
