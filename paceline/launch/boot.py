"""The first code a worker runs: the user's script, as if by `python script.py`, and its end.

An exception is told to the agent with the frames of the script alone, so that no decorator is needed
in it; the log file has it in full. No torch in here: a script that never trains should start fast.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import os
import runpy
import signal
import sys
import traceback
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from paceline.errors import OWN_GROUP, Departed, PacelineError, PeerLostError, UsageError
from paceline.launch.environment import ticket
from paceline.loop.unwinding import raised_at
from paceline.wires.link import LAST_WORDS_S, LeaderLink
from paceline.wires.messages import Failed, Hello
from paceline.wires.telling import LAST_WORDS, LAST_WORDS_END

_HERE = os.path.dirname(os.path.abspath(__file__))


def run(arguments: list[str]) -> NoReturn:
    """Run `[-m] TARGET ARGS…` as this process's main program, and leave with its exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    as_module = arguments[0] == "-m"
    target, rest = (arguments[1], arguments[2:]) if as_module else (arguments[0], arguments[1:])
    code = 0
    try:
        _run_target(target, rest, as_module)
        code = _finish()
    except SystemExit as error:
        code = _after_exit(error, rest)
    except BaseException as error:  # noqa: BLE001  whatever ends a script ends here, and is told
        code = _report(error)
    _leave(code)


def _run_target(target: str, rest: list[str], as_module: bool) -> None:
    if as_module:
        sys.argv = [target, *rest]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(target)
    sys.argv = [target, *rest]
    sys.path.insert(0, os.path.dirname(path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    # A real __main__ module, not runpy's temporary one: loader processes look it up by name.
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _current_run() -> Any:
    module = sys.modules.get("paceline.run")
    return getattr(module, "current", None)


def _finish() -> int:
    """The script came to its end: so does the run."""
    run = _current_run()
    if run is None:
        handed = ticket()
        if handed is not None and handed.worker == 0:
            raise _NeverCalled(
                "the script ended without paceline.init(), so every worker ran it by itself. Add `run = paceline.init()` "
                "and `run.prepare(model, optimizer, loader)`; see `paceline run --help`"
            )
        return 0
    run.finish()
    return 0


class _NeverCalled(PacelineError):
    exit_code = 2


def _after_exit(error: SystemExit, arguments: list[str]) -> int:
    if isinstance(error, Departed):
        return 0
    code = error.code
    number = code if isinstance(code, int) else 0 if code is None else 1
    if number == 0 and _current_run() is None and {"-h", "--help"} & set(arguments):
        return 0
    if number == 0:
        try:
            return _finish()
        except BaseException as late:  # noqa: BLE001
            return _report(late)
    said = str(code) if not isinstance(code, int) else f"the script called sys.exit({code})"
    sys.stdout.flush()
    _say(said, told=_tell(Failed(said, "", number, follows=False)))
    return number


def _report(error: BaseException) -> int:
    line = _line_calling("init_process_group", error.__traceback__)
    if line:
        error = UsageError(f"{line}: {OWN_GROUP}")
    own = isinstance(error, PacelineError)
    code = error.exit_code if isinstance(error, PacelineError) else 1
    if isinstance(error, KeyboardInterrupt):
        code = 130
    text = f"{error}" if own else "".join(traceback.format_exception_only(error)).strip()
    trace = "" if own and code == 2 else _frames(error, error.__traceback__)
    follows = isinstance(error, (PeerLostError, KeyboardInterrupt))
    step, slot = raised_at(_current_run(), error) or (-1, -1)
    sys.stdout.flush()
    _say(trace or text, told=_tell(Failed(text, trace, code, follows, step, slot)))
    return code


def _say(words: str, told: bool) -> None:
    """Into the log, in one piece: other threads may still write there. What the leader does not know, a terminal has from here."""
    sys.stderr.write(f"{LAST_WORDS}\n{words}\n{LAST_WORDS_END}\n" if told else f"{words}\n")


def tell_usage_errors_shortly() -> None:
    """For plain `python`, where no agent tells them: a mistake in usage is one line and exit code 2."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UsageError):
            previous(kind, error, trace)
            return
        sys.stderr.write(f"paceline: {error}\n")
        sys.stderr.flush()
        if not sys.flags.interactive and not hasattr(sys, "ps1"):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(error.exit_code)  # after an uncaught exception Python itself would leave with 1

    sys.excepthook = hook


def _line_calling(function: str, trace: TracebackType | None) -> str | None:
    """file:line in the script, if the exception came out of a function of this name."""
    line = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == function:
            return line
        if "site-packages" not in code.co_filename and not _is_ours(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return None


def _frames(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback from the user's first own line on."""
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _is_ours(filename: str) -> bool:
    return filename.startswith((_HERE, "<frozen"))


def _tell(failed: Failed) -> bool:
    """Whether the leader knows it now."""
    run = _current_run()
    if run is not None:
        return bool(run._session.fail(failed))
    handed = ticket()
    if handed is None:
        return False
    # A script that fails before init() has no session yet: say it over a link of its own.
    greeting = Hello(handed.worker, os.getpid())
    link = LeaderLink(handed.address, bytes.fromhex(handed.secret), greeting, lambda: handed.fence, LAST_WORDS_S)
    told = link.tell(failed, LAST_WORDS_S)
    link.close()
    return told


def _leave(code: int) -> NoReturn:
    """Leave without destructors: a process group whose peers are gone can abort in its own (measured)."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        _run_exit_handlers()
    run = _current_run()
    if run is not None:
        run._session.row.exits(code)  # for an agent that is not this process's parent
    os._exit(code)


def _run_exit_handlers() -> None:
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":  # what a forked worker does, in a fresh process
    run(sys.argv[1:])
