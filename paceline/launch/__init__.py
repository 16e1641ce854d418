"""How processes start: their environment, and the first code each runs."""
