"""The end of a run: all agree on what came out, and main writes it down."""

from __future__ import annotations

import atexit
import struct
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.data.order import mix
from paceline.errors import PacelineError, UsageError
from paceline.strategies.base import Served
from paceline.worker.summary import Sent, summarise

if TYPE_CHECKING:
    from paceline.run import Run

_SUMMARY_WRITTEN, _WAITS, _SENT = mix(0), mix(211), mix(212)
_BYTES = struct.Struct("<qq")


def end(run: Run) -> None:
    """Once: a worker that has come here trains no more."""
    if run._forgotten is not None:
        run._forgotten.close()
    if not run._failed:  # an exception may have come from anywhere
        run._between_points("the end of the script")
    if run._kv is not None:
        run._kv.close()
    digest = run._replica.weights_sha256()
    different = run._agreement.odd_at_the_end(digest)
    if different and run._strategy.same_bits:
        raise PacelineError(
            f"the final weights of worker {', '.join(map(str, different))} differ from worker 0's: something "
            "outside run.slots() changed them differently (a random draw by worker, say)"
        )
    run._keeping.finish()
    _tell(run, digest)
    if run._stepper is not None:
        run._strategy.close()
    if run._feeding.loop is not None:
        run._feeding.loop.close()
    run.terms.close()
    run._session.leave()


def _tell(run: Run, digest: str) -> None:
    """Main writes the summary, and all wait until it has: if it dies before, another one does."""

    def tell() -> None:
        waits, sent = _who_waited(run), _sent(run)
        if run.is_main:
            if run._feeding.loop is not None:
                run._feeding.loop.collect()
            run._keeping.ledger.close()
            exit = "failed" if run._failed else run.stopped or "finished"
            summarise(run, digest, exit, waits, sent)
        run.terms.meeting.gather(_SUMMARY_WRITTEN, b"")

    run.terms.through(tell)


def _who_waited(run: Run) -> dict[int, dict[int, float]]:
    """Seconds at servers: by the worker that waited, and by the one it waited for."""
    strategy = run._strategy
    if run._stepper is None or not isinstance(strategy, Served):
        return {}
    meeting = run.terms.meeting
    said = meeting.gather(_WAITS, msgspec.msgpack.encode(strategy.waits))
    members = run._session.view.members if meeting.size > 1 else (run._session.worker,)
    waits = zip(members, (msgspec.msgpack.decode(raw, type=dict[int, float]) for raw in said), strict=True)
    return {worker: each for worker, each in waits if each}


def _sent(run: Run) -> Sent:
    """What all who are here have sent."""
    wire = run._strategy.wire_bytes() if run._stepper is not None else 0
    copied = run._feeding.loop.copied_bytes if run._feeding.loop is not None else 0
    said = [_BYTES.unpack(each) for each in run.terms.meeting.gather(_SENT, _BYTES.pack(wire, copied))]
    return Sent(sum(wire for wire, _ in said), sum(copied for _, copied in said))


def at_exit(run: Run) -> None:
    """A run of one has no agent: it ends with its process, and remembers an exception on the way."""
    previous = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        run._failed = True
        if isinstance(error, UsageError):
            run.finished = True
            run._session.folder.event("failed", str(error))
            run._session.folder.write_json(
                run._session.folder.summary,
                {"run": run._session.folder.id, "exit": f"failed: {error}", "steps": run.step},
            )
        previous(kind, error, trace)

    sys.excepthook = note
    atexit.register(run.finish)
