"""Every number by name, those of a batch, and where mismatch comes from."""
