"""Replicas that train apart: exchanges, who comes to them, and copies of their states on other machines."""
