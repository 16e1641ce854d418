"""Whether a user's sampler deals every worker the same ids in the same order: asked at the beginning of each epoch."""

from __future__ import annotations

from paceline.data.loader import Feed
from paceline.data.order import mix
from paceline.errors import MismatchError
from paceline.worker.session import Session
from paceline.worker.terms import Terms

_ORDER = mix(213)
_WHAT_TO_DO = (
    "its order may come from the global generators of torch, NumPy and Python, from a generator that it has as an attribute, "
    "and from set_epoch(); nothing else is the same on every worker and after a death"
)


class Orders:
    def __init__(self, session: Session, terms: Terms) -> None:
        self._session, self._terms = session, terms
        self._known: dict[int, tuple[int, int]] = {}
        """By a loader's number: an epoch, and the digest of the order that all have had in it."""

    def check(self, feed: Feed, loader: int, epoch: int) -> None:
        """All begin an epoch of this loader together; who comes later, or goes on from a checkpoint, was told the digest."""
        mine = feed.order_digest(epoch)
        if not mine:
            return
        if self._known.get(loader, (-1, 0))[0] != epoch:
            said = self._terms.gather(_ORDER, lambda: mine.to_bytes(8, "little"))
            digests = [int.from_bytes(digest, "little") for digest in said]
            if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
                who = ", ".join(str(self._session.view.members[rank]) for rank in odd)
                raise MismatchError(
                    f"epoch {epoch}: the sampler of loader {loader} gives worker {who} other samples, or in another order, "
                    f"than worker {self._session.view.members[0]}: {_WHAT_TO_DO}"
                )
            self._known[loader] = epoch, digests[0]
        if self._known[loader][1] != mine:
            raise MismatchError(
                f"epoch {epoch}: the sampler of loader {loader} gives this worker other samples, or in another order, than "
                f"those with which the run has begun the epoch: {_WHAT_TO_DO}"
            )

    def capture(self) -> list[tuple[int, int, int]]:
        return [(loader, *known) for loader, known in self._known.items()]

    def restore(self, orders: list[tuple[int, int, int]]) -> None:
        self._known = {loader: (epoch, digest) for loader, epoch, digest in orders}
