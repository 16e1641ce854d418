"""An agent that does nothing but stand for the lead of a run, and tells what becomes of it, a line each.

python -m tests.cluster.candidate STORE RUN LEASE

leads FENCE ASKED          when it asked for the lead that it has now, on the clock that all machines share here
steps down FENCE ACTED     when it last acted as the leader
is fenced FENCE            another leads, as the store says
"""

from __future__ import annotations

import os
import sys
import time

from paceline.cluster.election import Silence, Tenure, clock
from paceline.cluster.store import FencedError, Store, StoreUnreachable, open_store

_TURN_S = 0.02


def main(address: str, run: str, lease_s: float) -> None:
    store = open_store(address, run)
    while True:
        fence, asked = _stand(store, lease_s)
        _say("leads", fence, asked)
        _say("steps down", fence, _lead(store, fence, Tenure(lease_s, asked)))
        _wait_to_be_fenced(store, fence)
        _say("is fenced", fence)


def _stand(store: Store, lease_s: float) -> tuple[int, float]:
    """Until it leads; its fence, and when it asked for it."""
    silence = Silence(lease_s)
    while True:
        time.sleep(_TURN_S)
        began = clock()
        try:
            record = store.read()
            if silence.saw(began, clock(), record):
                asked = clock()
                return store.lead(record.fence, os.getpid()), asked
        except (StoreUnreachable, FencedError):
            continue


def _lead(store: Store, fence: int, tenure: Tenure) -> float:
    acted = 0.0
    while tenure.holds(clock()):
        acted = clock()
        sent = clock()
        try:
            if tenure.is_due(sent):
                store.beat(fence)
                tenure.renew(sent, clock())
        except StoreUnreachable:
            continue
        except FencedError:
            break
        time.sleep(_TURN_S)
    return acted


def _wait_to_be_fenced(store: Store, fence: int) -> None:
    while True:
        try:
            store.beat(fence)
        except StoreUnreachable:
            continue
        except FencedError:
            return
        time.sleep(_TURN_S)


def _say(what: str, *facts: float) -> None:
    print(what, *facts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
