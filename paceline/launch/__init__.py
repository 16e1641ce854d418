"""How processes start: the nursery that forks them, their environment, and the first code each runs."""
