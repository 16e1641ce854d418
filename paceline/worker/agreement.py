"""Whether all workers hold the same weights, and what is done if not."""

from __future__ import annotations

import torch

from paceline.data.order import mix
from paceline.state.replica import Replica
from paceline.tensors.snapshot import Snapshot
from paceline.worker.session import Session
from paceline.worker.terms import Terms

_FIRST, _WEIGHTS, _LAST = mix(401), mix(402), mix(403)


class Agreement:
    def __init__(self, session: Session, terms: Terms, replica: Replica) -> None:
        self._session, self._terms, self._replica = session, terms, replica

    def share_weights(self) -> None:
        """Everyone starts from worker 0's weights; say so if they differed."""
        if self._session.joining:
            return  # it gets the run's state before its first batch
        odd = self._odd_workers(_FIRST, self._replica.weights_sha256())
        if not odd:
            return
        state = self._replica.state_dict()
        main = self._terms.gather(_WEIGHTS, lambda: Snapshot(state).to_bytes() if self._session.is_main else b"")[0]
        with torch.no_grad():
            for name, weights in Snapshot.read(memoryview(main)).tree.items():
                state[name].copy_(weights)
        if self._session.is_main:
            who = ", ".join(map(str, odd))
            self._session.notice(f"the first weights of worker {who} differed: all now start from worker 0's")

    def odd_at_the_end(self, digest: str) -> list[int]:
        """The workers whose final weights differ from worker 0's, by the weights' hashes."""
        return self._odd_workers(_LAST, digest)

    def _odd_workers(self, key: int, digest: str) -> list[int]:
        hashes = self._terms.gather(key, digest.encode)
        members = self._session.view.members
        return [members[rank] for rank, value in enumerate(hashes) if value != hashes[0]]
