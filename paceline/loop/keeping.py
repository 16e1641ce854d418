"""What of a run survives a process: its state, for a newcomer and for a checkpoint, and the way back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.order import mix
from paceline.data.receipts import OWN_DRAWS, Loose, Receipt, Tally
from paceline.errors import PacelineError, UsageError
from paceline.launch.environment import NEWEST
from paceline.loop.due import Due
from paceline.loop.refuge import Refuge
from paceline.loop.rounds import Rounds
from paceline.loop.turns import Turns
from paceline.settings import BITS
from paceline.state.buddies import NONE, lost_for_good
from paceline.state.checkpoint import Checkpoint, newest_good, step_of, sweep
from paceline.state.ledger import Head, Ledger
from paceline.state.places import place
from paceline.state.recorder import Recorder
from paceline.state.writer import Writer
from paceline.strategies.base import Lasting, Stepwise
from paceline.tensors.snapshot import Snapshot

if TYPE_CHECKING:
    from paceline.loop.steps import Batch
    from paceline.run import Run

_LINEAGE, _KEYS, _TAKEN, _COLLECTED, _MAINS = mix(203), mix(206), mix(207), mix(215), mix(216)


class Keeping:
    def __init__(self, run: Run) -> None:
        self._run = run
        folder = run._session.folder
        self.ledger = Ledger(folder.receipts, self._tell)
        self._address = folder.checkpoints_at(run.settings.checkpoints)
        writer = Writer(self._address, run.settings.keep, self._may_publish, self._tell, self.ledger.sync)
        self._recorder = Recorder(writer)
        self._refuge = Refuge(run._session)
        self._seen = False
        """Whether the state has been looked through once for what cannot be kept."""
        self._due = Due()
        """As all workers have it; a newcomer gets it with the state."""
        self._owed = False
        """A checkpoint was due and could not be had: the next step at which it can gives one."""
        self._all_owe = False
        self._last = False
        """Whether the script's last loop ends at this boundary."""
        self._stopped_at = -1
        """The step whose checkpoint the run goes on from that stops."""

    def capture(self, mains: Mapping[str, Any] | None = None, states: Sequence[bytes] = ()) -> Snapshot:
        """The state between two steps; its tensors are references until it is written. With what is `mains`, of which a newcomer
        finds the keys of `run.kv` where they are; and with the states of all replicas, where they train apart."""
        run, stepper = self._run, self._run._stepper
        assert stepper is not None
        if run.is_main:
            self.ledger.write()
        return Snapshot(
            {
                "settings": {name: getattr(run.settings, name) for name in BITS},
                "registered": self._registered(),
                "replica": run._replica.capture() | self._gradients(),
                "strategy": run._strategy.capture(),
                "precision": run._precision.capture(),
                "keys": {},
                "state": run.state,
                "metrics": run.metrics,
                "stopped": run.stopped,
                "step": [stepper.step, stepper.epoch, stepper.samples, run._epochs_done],
                "due": list(self._due),
                "longest_gap_s": stepper.gaps.longest_s,
                "flat": stepper.flat.capture(),
                "positions": run._feeding.capture(),
                "lineage": [self.ledger.lineage, self.ledger.head.first],
                "receipts": [list(receipt) for receipt in self.ledger.recent],
                "states": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states],
                **(mains or {}),
            }
        )

    def _registered(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self._run._registered.items()}

    def restore_registered(self, states: dict[str, Any]) -> None:
        for name, item in self._run._registered.items():
            if name not in states:
                raise UsageError(f"{name!r} is registered here, but was not when the state was written")
            item.load_state_dict(states[name])

    def _gradients(self) -> dict[str, Any]:
        """Those that the script still adds to. In the middle of a step they are its own business."""
        stepper = self._run._stepper
        assert stepper is not None
        return {} if stepper.active else self._run._replica.gradients(stepper.stepped)

    def restore(self, snapshot: Snapshot) -> None:
        run, tree, stepper = self._run, snapshot.tree, self._run._stepper
        assert stepper is not None
        run._replica.restore(tree["replica"])
        self.restore_registered(tree["registered"])
        run._strategy.restore(tree["strategy"])
        run._precision.restore(tree["precision"])
        run.state.update(tree["state"])
        run.metrics.update(tree["metrics"])
        run._stopping.reason = tree["stopped"]
        stepper.step, stepper.epoch, stepper.samples, run._epochs_done = tree["step"]
        stepper.before, stepper.gaps.longest_s = stepper.samples, tree["longest_gap_s"]
        stepper.flat.restore(tree["flat"])
        run._feeding.restore(tree["positions"])
        self._begin_lineage(*tree["lineage"])
        self._due = Due(*tree["due"])
        if tree["stopped"]:  # who came in where the run stops has no part in what is kept of that
            self._stopped_at = stepper.step
        self.ledger.remember(Receipt(*receipt) for receipt in tree["receipts"])

    def common(self, samples: int, whole: bool = False) -> Snapshot:
        """What replicas that train apart have in common behind an exchange; the run had so many samples then. With this
        one's own, if somebody is to go on from it."""
        run, receipts = self._run, [list(receipt) for receipt in self.ledger.recent]
        state = {"strategy": run._strategy.capture(), "samples": samples, "stopped": run.stopped, "receipts": receipts}
        whole_state = {"replica": run._replica.capture(), "registered": self._registered()} if whole else {}
        return Snapshot(state | whole_state)

    def catch_up(self, common: Snapshot) -> None:
        """This worker has missed that exchange."""
        run, stepper = self._run, self._run._stepper
        assert stepper is not None
        stepper.samples, run._stopping.reason = common.tree["samples"], common.tree["stopped"]
        self.ledger.remember(Receipt(*receipt) for receipt in common.tree["receipts"])

    def resume(self, name: str) -> None:
        """Go on from the run's checkpoint of this name, at any worker count; or from the newest one, if there is any."""
        if name != NEWEST:
            self._resume(name)
            return
        name, state = self._refuge.newest(self._run.terms, self._newest)
        if state:
            self._go_on_from(Snapshot.read(state), "the copy in memory")
        elif name:
            self._resume(name)
        self._run._session.rolled_back(self._run.step)

    def _newest(self, above: int) -> str:
        """Of those above this step. Main looks for it: while a checkpoint is written over or passed over, others might find
        another one."""
        if not self._run.is_main:
            return ""
        try:
            found = newest_good(self._address, self._tell, above=above)
        except (OSError, PacelineError) as error:
            if above == NONE:
                raise
            self._tell(f"{error}; going back to step {above}, which is in memory")
            return ""
        return found.name if found is not None else ""

    def _resume(self, name: str) -> None:
        self._go_on_from(self._read(name), name)

    def _read(self, name: str) -> Snapshot:
        try:
            return Snapshot.read(Checkpoint(place(self._address), step_of(name)).read())
        except ValueError as error:
            raise UsageError(str(error)) from None

    def begun_from(self, name: str, theirs: Snapshot) -> Snapshot:
        """What this replica went on from that checkpoint with: its own state there, in the lineage that another one is in since."""
        assert isinstance(self._run._feeding.loop, Rounds)
        whole = self._read(name)
        own = Snapshot.read(memoryview(whole.tree["states"][self._run._feeding.loop.slot].numpy()))
        had, rounds = own.tree["strategy"]["rounds"], theirs.tree["strategy"]["rounds"]
        if rounds > had + 1:
            raise lost_for_good(self._run._feeding.loop.slot, f"that of {name}, behind exchange {had}", rounds)
        step = own.tree["step"][0]
        own.tree.update(lineage=theirs.tree["lineage"], receipts=[], due=list(Due(step)), stopped=None)
        return own

    def _go_on_from(self, snapshot: Snapshot, name: str) -> None:
        run = self._run
        theirs = snapshot.tree["settings"]
        for setting in BITS:
            mine = getattr(run.settings, setting)
            if theirs[setting] != mine:
                raise UsageError(
                    f"the checkpoint was written with {setting} {theirs[setting]}, this run has {mine}: other bits would come "
                    f"out; pass --{setting} {theirs[setting]}"
                )
        keys, states = snapshot.tree["keys"], snapshot.tree["states"]
        if states:
            assert isinstance(run._feeding.loop, Rounds)
            snapshot = Snapshot.read(memoryview(states[run._feeding.loop.slot].numpy()))
        self.restore(snapshot)
        assert run._stepper is not None
        self._due = Due(run.step)
        run._stepper.flat.known &= run._stepper.flat.allowed  # run.slots() may have been added since
        self._bring_back(keys)
        if run.is_main:
            self.ledger.close()  # of a state in memory not all receipts need to be written yet
        self.ledger.lineage = -1  # the checkpoint's has ended
        run.resumed, run._stopping.reason, self._stopped_at = True, None, -1
        if run.is_main:
            run._session.notice(f"going on from step {run.step} ({name})")
            run._session.folder.event("resumed", name, step=run.step, workers=run._session.workers)

    def _bring_back(self, keys: dict[str, Any]) -> None:
        """Main does, and nobody goes on before."""

        def bring() -> bytes:
            if self._run.is_main:
                self._run.kv.load_state_dict(keys)
            return b""

        if keys:
            self._run.terms.gather(_KEYS, bring)

    # receipts

    def begin(self) -> None:
        """Training begins here, in a lineage of its own, unless this worker came into one."""
        if self.ledger.lineage < 0:
            known = self._run.terms.gather(_LINEAGE, lambda: self.ledger.next_lineage().to_bytes(8, "little"))
            self._begin_lineage(int.from_bytes(known[0], "little"), self._run.step)

    def _begin_lineage(self, lineage: int, first: int) -> None:
        dealings = tuple(feed.dealing for feed in self._run._feeding.feeds)
        self.ledger.begin(lineage, Head(first, self._run.settings.seed, dealings))

    def delivered(self, batch: Batch | None, tally: Tally | Loose) -> None:
        """A step is trained: its receipt is kept by all and written by main."""
        stepper = self._run._stepper
        assert stepper is not None
        loader, number = (OWN_DRAWS, stepper.leaves) if batch is None else (batch.loader, batch.number)
        due = self.ledger.add(Receipt(stepper.step, stepper.epoch, loader, number, *tally))
        if due and self._run.is_main:
            self.ledger.write()

    # checkpoints

    def at_boundary(self, ends: bool = False, leave: Callable[[], None] = lambda: None, last: bool = False) -> None:
        """A step is over, the next has not begun. `ends`: the loop over the loader does with it; `last`: so does a loop that
        counts steps. `leave` leaves the state for one who is not here."""
        run, stepper = self._run, self._run._stepper
        assert stepper is not None
        self._decide(ends, last)
        leave()
        if not self._recorder.settle():
            self._owed = True
        every = run.settings.checkpoint_every
        if not self._seen and (every or run.workers > 1):
            self._seen = True
            self.capture()  # refuses what cannot be kept, or handed to a newcomer: now, not hours later
        agreed = run._session.view.term if self._lets_nobody_in else stepper.agreed_term
        if (every and (self._due.now or run.stopped)) or agreed > run._session.view.term:
            self._collect()  # now: one who begins to follow at this boundary is told what comes of every meeting behind it
        # Where all meet about a checkpoint that is taken, they do so before somebody is let in who knows nothing of it.
        if every and self._meets:
            self._write_if_due()
        run.terms.boundary(agreed, self, gives_state=not self._lets_nobody_in)
        if every and not self._meets:
            self._write_if_due()

    @property
    def _lets_nobody_in(self) -> bool:
        """Where a loop over a loader ends that is entered again: who came here would have nothing left of it, and not the names that
        only its body sets. The next step's lanes have the same term; behind the last loop there is none, and the run ends without it."""
        ends = self._due.ends or self._last
        return ends and not self._run.stopped and not isinstance(self._run._feeding.loop, Rounds)

    def _decide(self, ends: bool, last: bool = False) -> None:
        """Before anybody gets the state of this boundary: who comes here has to know what the others do next. The end of the
        last epoch is not entered again."""
        run = self._run
        last_epoch = ends and run.epoch + 1 >= run._epochs_asked
        self._last = last or last_epoch
        self._due = self._due.behind(run.step, run.settings.checkpoint_every, ends and not last_epoch)

    def checkpoint_if_due(self) -> None:
        """Where workers come together without a boundary."""
        self._decide(ends=False)
        self._write_if_due()

    def _write_if_due(self) -> None:
        run = self._run
        if run.stopped:
            self.at_stop()
        elif self._due.now or (self._is_owed and not self._due.ends):
            self._checkpoint()
        self._due = self._due._replace(step=run.step)  # which a checkpoint may have told, where workers meet nobody

    def at_stop(self) -> None:
        """The run stops here, so that it can go on later; what the script still does is not part of it, nor what replicas that
        train apart exchange for that."""
        if self._run.settings.checkpoint_every and self._stopped_at != self._run.step:
            self._stopped_at = self._run.step
            self.settle()
            self._collect()
            self._checkpoint()
            self.settle()

    def finish(self) -> None:
        self.settle()
        if self._run.settings.checkpoint_every and self._may_publish():
            sweep(self._address)

    def settle(self) -> None:
        """Wait until what was taken is written, or is known not to be."""
        self._recorder.finish()

    # Whether an object has all that a protocol asks for takes 20 µs to see (measured), and is asked for at every boundary.

    @cached_property
    def _stepwise(self) -> Stepwise | None:
        strategy = self._run._strategy
        return strategy if isinstance(strategy, Stepwise) else None

    @cached_property
    def _lasting(self) -> Lasting | None:
        strategy = self._run._strategy
        return strategy if isinstance(strategy, Lasting) else None

    @property
    def _may_lag(self) -> bool:
        return self._stepwise is not None and self._stepwise.may_lag

    @property
    def _meets(self) -> bool:
        """Whether all meet about a checkpoint where a step ends."""
        return self._may_lag or self._scattered is not None

    @property
    def _takes_all(self) -> bool:
        """Whether all workers have a part in a checkpoint: then it is taken where all know it to be due."""
        return self._meets or isinstance(self._run._feeding.loop, Rounds)

    @property
    def _scattered(self) -> Lasting | None:
        return self._lasting if self._lasting is not None and self._lasting.scattered else None

    @property
    def owes(self) -> bool:
        """Whether main has yet to give a checkpoint that was due: replicas that train apart hear it before they meet again."""
        return self._owed and self._run.is_main and not self._recorder.busy

    def owed(self, by_main: bool) -> None:
        """They have."""
        self._all_owe = by_main

    @property
    def _is_owed(self) -> bool:
        """As all know who have a part in it."""
        if isinstance(self._run._feeding.loop, Rounds):
            return self._all_owe
        return self._owed and not self._takes_all

    def _collect(self) -> None:
        if self._scattered is not None:
            self._scattered.collect(lambda payload: self._run.terms.gather(_COLLECTED, payload))

    def _checkpoint(self) -> None:
        loop = self._run._feeding.loop
        states = loop.states() if isinstance(loop, Rounds) else []
        if states is None:
            self._owed = True
        elif self._run.is_main:
            self._take(states)
        if self._scattered is not None:
            self._leave_on_machines()
        if self._may_lag:  # nobody goes on before main has it: servers have one state, that of the foremost
            self._run.terms.gather(_TAKEN, bytes)

    def _leave_on_machines(self) -> None:
        """What main alone knows it tells all, and nobody goes on before it has: main's next step may push to `run.kv`."""
        run = self._run
        told = run.terms.gather(_MAINS, lambda: Snapshot(self._mains()).to_bytes() if run.is_main else b"")
        if self._refuge.claim():
            mains = Snapshot.read(memoryview(next(filter(None, told)))).tree
            with run._strategy.whole():
                self._refuge.leave(run.step, self.capture(mains))

    def _mains(self) -> dict[str, Any]:
        """What of a checkpoint is not the same for all workers, or is at the servers: whoever was main before may have used keys."""
        run = self._run
        return {"keys": run.kv.state_dict() if self._has_keys else {}, "state": run.state, "metrics": run.metrics}

    @property
    def _has_keys(self) -> bool:
        return bool(self._run.settings.servers) or self._run._kv is not None

    def _take(self, states: Sequence[bytes]) -> None:
        """Training does not wait for a disk, but at its end: there is no later step that could give one."""
        run = self._run
        if self._last:
            self.settle()
        if not self._recorder.has_time(run.step):
            self._owed = True
            return
        if self._has_keys:
            _ = run.kv  # it dials before all is held, the first time
        with run._strategy.whole() as register:
            if register is not None:
                assert isinstance(run._feeding.loop, Turns)
                run._feeding.loop.settle(register)
                if run._feeding.loop.ends(register) and not run.stopped:
                    self._owed = True
                    return
            ends = run._feeding.at_loops_end(run.epoch)
            self._recorder.take(run.step, run._replica.optimizers, self.capture(self._mains(), states), ends)
            self._owed = False

    def _may_publish(self) -> bool:
        """A worker that the others have gone on without must not overwrite what they write."""
        session = self._run._session
        return session.is_main and not session.board.gone(session.worker)

    def _tell(self, text: str) -> None:
        self._run._session.folder.event("warning", text)
        sys.stderr.write(f"paceline: {text}\n")
