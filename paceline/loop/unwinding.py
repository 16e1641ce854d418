"""Where in its training a script was when an exception ended it. No torch in here.

When an exception has come out of a script, the loops it left are closed, just as by a `break`. So a loop notes
which instructions were running when it was closed (`running_now`), and the exception's traceback says whether
it was one of them that raised. What is raised behind the loop is none of the training's.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.run import Run

Running = list[tuple[CodeType, int]]
"""Functions with the instruction each one is at, the innermost first."""
_RAISING_AGAIN = {dis.opmap["RERAISE"], dis.opmap["RAISE_VARARGS"]}


def running_now() -> Running:
    """Above the function that asks."""
    found: Running = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def came_through(trace: TracebackType | None, closed: Running) -> bool:
    """Whether it was this exception that closed a loop, at which `closed` was running."""
    raised: dict[CodeType, set[int]] = {}
    while trace is not None:
        raised.setdefault(trace.tb_frame.f_code, set()).add(trace.tb_lasti)
        trace = trace.tb_next
    # The loop may have stood in a generator (a progress bar): that one was closed too, and is in no traceback.
    innermost = next(((code, at) for code, at in closed if code in raised), None)
    if innermost is None:
        return False
    code, at = innermost
    # Behind a `finally`, or an `except` that raises again, the traceback has where it came in and not where it left.
    return at in raised[code] or code.co_code[at] in _RAISING_AGAIN


def raised_at(run: Run | None, error: BaseException) -> tuple[int, int] | None:
    """The step and slot (-1: none) at which an exception came out of the training loop, if others could go on there.

    None before the first step is done: nothing has shown yet that the script can train at all.
    """
    if run is None or run._stepper is None or not isinstance(error, Exception):
        return None
    if isinstance(error, PacelineError | SyntaxError) or not run._feeding.left_by(error.__traceback__):
        return None
    stepper = run._stepper
    step = stepper.step if stepper.in_hand is None else stepper.in_hand
    return (step, stepper.slot) if step and stepper.flat.recovers else None
