"""What of a run survives a process: its state, for a newcomer and for a checkpoint, and the way back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.state.checkpoint import Checkpoint, Writer
from paceline.state.snapshot import Snapshot

if TYPE_CHECKING:
    from paceline.run import Run

_BITS = ("slots", "threads", "seed", "strategy", "precision", "split")
"""Settings that are part of a run's bits: a resume with another value is refused."""


class Keeping:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._writer = Writer(run._session.folder.checkpoints, run.settings.keep, self._tell)
        self._last_step = -1

    def capture(self) -> Snapshot:
        """The state between two steps; its tensors are references until it is written."""
        run, stepper = self._run, self._run._stepper
        assert stepper is not None
        return Snapshot(
            {
                "settings": {name: getattr(run.settings, name) for name in _BITS},
                "replica": run._replica.capture(),
                "precision": run._precision.capture(),
                "registered": {name: item.state_dict() for name, item in run._registered.items()},
                "state": run.state,
                "metrics": run.metrics,
                "stopped": run.stopped,
                "step": [stepper.step, stepper.epoch, stepper.samples, run._epochs_done],
                "longest_gap_s": stepper.gaps.longest_s,
                "flat": stepper.flat.capture(),
                "positions": run._feeding.capture(),
            }
        )

    def restore(self, snapshot: Snapshot) -> None:
        run, tree, stepper = self._run, snapshot.tree, self._run._stepper
        assert stepper is not None
        run._replica.restore(tree["replica"])
        run._precision.restore(tree["precision"])
        for name, item in run._registered.items():
            if name not in tree["registered"]:
                raise UsageError(f"{name!r} is registered here, but was not when the state was written")
            item.load_state_dict(tree["registered"][name])
        run.state.update(tree["state"])
        run.metrics.update(tree["metrics"])
        run._stopping.reason = tree["stopped"]
        stepper.step, stepper.epoch, stepper.samples, run._epochs_done = tree["step"]
        stepper.gaps.longest_s = tree["longest_gap_s"]
        stepper.flat.restore(tree["flat"])
        run._feeding.restore(tree["positions"])

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, at any worker count."""
        run = self._run
        snapshot = Snapshot.read(Checkpoint(path, 0).read())
        theirs = snapshot.tree["settings"]
        for name in _BITS:
            mine = getattr(run.settings, name)
            if theirs[name] != mine:
                raise UsageError(
                    f"the checkpoint was written with {name} {theirs[name]}, this run has {mine}: other bits would come out; "
                    f"pass --{name} {theirs[name]}"
                )
        self.restore(snapshot)
        assert run._stepper is not None
        run._stepper.flat.known &= run._stepper.flat.allowed  # run.slots() may have been added since
        run.resumed, run._stopping.reason = True, None
        if run.is_main:
            run._session.notice(f"going on from step {run.step} ({path.name})")
            run._session.folder.event("resumed", str(path), step=run.step, workers=run._session.workers)

    def at_boundary(self) -> None:
        """A step is over, the next has not begun."""
        run, stepper = self._run, self._run._stepper
        assert stepper is not None
        run.terms.boundary(stepper.agreed_term, self)
        every = run.settings.checkpoint_every
        if every and stepper.step % every == 0:
            self._checkpoint()

    def finish(self) -> None:
        """A run that was stopped can go on later."""
        run = self._run
        if run.stopped and run.settings.checkpoint_every and run.step != self._last_step:
            self._checkpoint()
        self._writer.wait()

    def _checkpoint(self) -> None:
        self._last_step = self._run.step
        if self._run.is_main:
            snapshot = self.capture()
            body = bytearray(snapshot.nbytes)
            snapshot.write(memoryview(body))
            self._writer.write(self._run.step, body)

    def _tell(self, text: str) -> None:
        self._run._session.folder.event("warning", text)
        sys.stderr.write(f"paceline: {text}\n")
