"""Whether all workers hold the same weights, and what is done if not."""

from __future__ import annotations

import torch

from paceline.data.order import mix
from paceline.errors import UsageError
from paceline.state.hash import weights_sha256
from paceline.state.replica import Replica
from paceline.tensors.snapshot import Snapshot
from paceline.worker.session import Session
from paceline.worker.terms import Terms

_FIRST, _WEIGHTS, _LAST, _NAMED, _MAINS = mix(401), mix(402), mix(403), mix(404), mix(405)


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
        self._take_mains(_WEIGHTS, self._replica.state_dict())
        if self._session.is_main:
            who = ", ".join(map(str, odd))
            self._session.notice(f"the first weights of worker {who} differed: all now start from worker 0's")

    def share_registered(self, strategy: str) -> None:
        """The same for what is registered, where it is averaged: by how far each has moved it from there."""
        if self._session.joining:
            return
        state = {str(number): tensor for number, tensor in enumerate(self._replica.registered)}
        words = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in state.values()])
        said = self._terms.gather(_NAMED, (words + weights_sha256(state)).encode)
        if len({each[:-64] for each in said}) > 1:
            raise UsageError(
                f"the workers have registered different modules, and with --strategy {strategy} their mean counts: call "
                "run.register() on every worker alike, not under `if run.is_main:`"
            )
        if len(set(said)) > 1:
            self._take_mains(_MAINS, state)

    def _take_mains(self, key: int, state: dict[str, torch.Tensor]) -> None:
        main = self._terms.gather(key, lambda: Snapshot(state).to_bytes() if self._session.is_main else b"")[0]
        with torch.no_grad():
            for name, values in Snapshot.read(memoryview(main)).tree.items():
                state[name].copy_(values)

    def odd_at_the_end(self, digest: str) -> list[int]:
        """The workers whose final weights differ from worker 0's, by the weights' hashes."""
        return self._odd_workers(_LAST, digest)

    def _odd_workers(self, key: int, digest: str) -> list[int]:
        hashes = self._terms.gather(key, digest.encode)
        members = self._session.view.members
        return [members[rank] for rank, value in enumerate(hashes) if value != hashes[0]]
