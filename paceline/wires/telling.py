"""Words for a process's own log, which may be on a full disk: whoever says them goes on all the same."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress

LAST_WORDS = "--- paceline: how this worker ended ---"
LAST_WORDS_END = "--- paceline: end of that ---"
"""In a log, what stands between them is told to the leader too: a terminal shows it once, with the failure that it belongs to."""


def tell(words: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"paceline: {words}\n")


def tell_exception() -> None:
    """The one that is being handled, with its traceback."""
    with suppress(OSError):
        traceback.print_exc()
