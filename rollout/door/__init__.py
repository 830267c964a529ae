"""The agent's door: rollouts by programs that talk to a URL."""
