"""torchft's replicas and their lighthouse: python -m benchmarks.replicas COUNT HEARTBEAT_MS SCRIPT ARGUMENTS...

What a cluster's scheduler would do for torchft: every replica is one process, and one that was killed is started
again at once. The lighthouse has the values of torchft's own example, but for the time after which a silent replica
is given up. Ends with 1 if a replica fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from torchft.coordination import LighthouseServer

_JOIN_MS, _TICK_MS = 10_000, 100
_POLL_S = 0.02
_GRACE_S = 10.0


class Replicas:
    def __init__(self, count: int, lighthouse: str, command: list[str]) -> None:
        self._count, self._lighthouse, self._command = count, lighthouse, command
        self._processes = [self._start(number) for number in range(count)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        own = {"TORCHFT_LIGHTHOUSE": self._lighthouse, "REPLICA": str(number), "REPLICAS": str(self._count)}
        return subprocess.Popen([sys.executable, *self._command], env={**os.environ, **own})

    def see_to_the_end(self) -> int:
        """All have ended, or one has and the others have had their time: a late one would train alone."""
        deadline = float("inf")
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            codes = [process.poll() for process in self._processes]
            if 0 in codes:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            for number, code in enumerate(codes):
                if code is not None and code > 0:
                    return 1
                if code is not None and code < 0 and 0 not in codes:
                    self._processes[number] = self._start(number)
            time.sleep(_POLL_S)
        return 0

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def main() -> None:
    count, heartbeat_ms = int(sys.argv[1]), int(sys.argv[2])
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=_JOIN_MS,
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    replicas = Replicas(count, lighthouse.address(), sys.argv[3:])
    try:
        code = replicas.see_to_the_end()
    finally:
        replicas.end()
        lighthouse.shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main()
