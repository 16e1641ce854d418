"""Replicas that train apart: their rounds, exchanges, and the copies of their states on other machines."""
