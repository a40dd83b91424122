"""State dicts and checkpoints: reading, writing and checking."""
