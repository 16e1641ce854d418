"""What a run's events tell to those who disturb it."""

from __future__ import annotations

from paceline.folder import RunFolder


def living(run: RunFolder) -> dict[int, int]:
    """The workers whose processes live, newcomers on their way included, and their pids."""
    events = list(run.read_lines(run.events))
    ended = {event["worker"] for event in events if event["event"] == "worker ended"}
    return {e["worker"]: e["pid"] for e in events if e["event"] == "worker started" and e["worker"] not in ended}
