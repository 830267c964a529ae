"""What a run needs, in bytes and seconds, from its recipe and the model's config.json alone."""
