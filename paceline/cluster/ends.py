"""How a process has ended, in words. No torch in here."""

from __future__ import annotations

import signal
from pathlib import Path

KILLS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""Signals that come from outside: the process was well. A crash (SIGSEGV, …) would only repeat itself."""


def exit_words(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def crash_trace(path: Path) -> str:
    """What faulthandler wrote before a crash, if it did."""
    try:
        text = path.read_text(errors="replace")[-20000:]
    except OSError:
        return ""
    at = text.rfind("Fatal Python error")
    return text[at:].rstrip() if at >= 0 else ""
