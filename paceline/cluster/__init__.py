"""Who is in the run: the agent that starts and watches workers, and what they share with it."""
