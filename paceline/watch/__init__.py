"""What can be seen of a run: its events, metrics and logs, in a terminal. Never waited for."""
