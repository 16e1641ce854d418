"""Parameter servers: what they compute with, hold and say."""
