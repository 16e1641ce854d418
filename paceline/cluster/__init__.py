"""Who is in the run: the agents, the one that leads them, and what it decides."""
