"""A leader's hold on its office: what it decides goes to the store under its fence, while its tenure lasts.

On one machine the store is a file, and the fence alone decides. Where the store is elsewhere, the leader
beats in it, and steps down before anybody else may lead. No torch in here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.cluster.election import NOBODY, Tenure, clock
from paceline.cluster.store import Store, StoreUnreachable
from paceline.wires.view import View

_AGAIN_S = 0.05


class Office:
    """`tenure`: none, where nobody needs to be told that the leader lives.

    `copy` gets what was written: for this machine's next agent, or for this one when it does not lead any more.
    """

    def __init__(
        self,
        store: Store,
        fence: int,
        tenure: Tenure | None = None,
        copy: Callable[[bytes], None] = lambda state: None,
    ) -> None:
        self.store, self.fence, self._tenure, self._copy = store, fence, tenure, copy

    @property
    def may_pass_on(self) -> bool:
        """Whether an agent of another machine may lead after this one."""
        return self._tenure is not None

    def write(self, state: bytes, views: Sequence[View]) -> None:
        """FencedError: another one leads. StoreUnreachable: another one will."""
        self._while_it_lasts(lambda: self.store.write(self.fence, state, views))
        self._copy(state)

    def hold(self) -> None:
        """At every turn: beat if it is time, and step down (StoreUnreachable) if the tenure is over."""
        if self._tenure is None:
            return
        if self._tenure.is_due(clock()):
            self._while_it_lasts(lambda: self.store.beat(self.fence))
        elif not self._tenure.holds(clock()):
            raise StoreUnreachable("the store was not reached for too long")

    def hand_on(self) -> None:
        """To nobody: whoever is there may lead at once. The last thing that is done in this office."""
        self._while_it_lasts(lambda: self.store.lead(self.fence, NOBODY))

    def close_for_good(self) -> None:
        """The run is over; a machine's own store is its node's to remove."""
        if self._tenure is not None:
            self._while_it_lasts(lambda: self.store.remove(self.fence))

    def _while_it_lasts(self, attempt: Callable[[], object]) -> None:
        """Again and again: what was heard twice is done once."""
        if self._tenure is None:
            attempt()
            return
        while True:
            sent = clock()
            if not self._tenure.holds(sent):
                raise StoreUnreachable("the store was not reached for too long")
            try:
                attempt()
            except StoreUnreachable:
                time.sleep(_AGAIN_S)
                continue
            self._tenure.renew(sent, clock())
            return
