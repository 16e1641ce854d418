"""What can be seen of a run: its folder, events, metrics, logs and the terminal. Never waited for."""
