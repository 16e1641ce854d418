"""What a run's receipts prove: every sample of its epochs once, and the same samples as another run. Pure.

A receipt is held against the order of its epoch, which needs no data set. Where the order is the script's own
(a sampler, a batch sampler) or there is none (a stream), less can be said, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.data.dealing import Dealing
from paceline.data.receipts import (
    BATCH,
    DIGEST,
    EPOCH,
    IDS,
    LOADER,
    OWN_DRAWS,
    SAMPLES,
    STEP,
    Table,
    digest_of_all,
    signed,
)

Advance = Callable[[int], object]
_SHOWN = 10
"""Findings of one kind that are told; the rest is counted."""
_MOST_SHARES = 1 << 24
"""No step is cut into more: a receipt that says so is damaged."""


@dataclass(frozen=True)
class Checked:
    """A stretch of a run that holds what it should, and what that means."""

    what: str
    epochs: tuple[int, int]
    steps: int
    samples: int
    proven: str


@dataclass
class Proof:
    checked: list[Checked] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def add(self, checked: Checked) -> None:
        """Epochs that came out alike are told together."""
        if self.checked:
            last = self.checked[-1]
            same = (last.what, last.proven, last.epochs[1] + 1) == (checked.what, checked.proven, checked.epochs[0])
            if same:
                steps, samples = last.steps + checked.steps, last.samples + checked.samples
                epochs = (last.epochs[0], checked.epochs[1])
                self.checked[-1] = replace(last, epochs=epochs, steps=steps, samples=samples)
                return
        self.checked.append(checked)


def prove(table: Table, dealings: Sequence[Dealing], steps: int | None, advance: Advance = lambda ids: None) -> Proof:
    """Hold each receipt against what its step should have got.

    `steps`: how many the run says it trained, if it has ended. `advance` hears how many ids were looked at.
    """
    proof = Proof()
    proof.violations += _gaps(table, steps)
    whole = not proof.violations
    for loader in np.unique(table[:, LOADER]).tolist():
        rows = table[table[:, LOADER] == loader]
        if loader == OWN_DRAWS:
            _prove_draws(rows, proof)
        elif 0 <= loader < len(dealings):
            name = f"loader {loader}" if len(dealings) > 1 else "the loader"
            _Loader(name, dealings[loader], proof, whole, advance).prove(rows, int(table[:, EPOCH].max()))
        else:
            proof.violations.append(f"step {rows[0, STEP]}: loader {loader} is none of the run's {len(dealings)}")
    return proof


def _gaps(table: Table, steps: int | None) -> list[str]:
    """Steps without a receipt, and receipts out of their place."""
    found, due = [], 0
    known = table[:, STEP]
    for index in np.flatnonzero(np.diff(known, prepend=-1) != 1).tolist():
        step, due = int(known[index]), int(known[index - 1]) + 1 if index else 0
        if step < due:
            found.append(f"step {step}: its receipt stands where that of step {due} should")
        else:
            found.append(f"{_span(due, step - 1)} no receipt")
    last = int(known[-1]) + 1 if len(known) else 0
    if steps is not None and last < steps:
        found.append(f"{_span(last, steps - 1)} no receipt: the run trained {steps} steps")
    if steps is not None and last > steps:
        found.append(f"step {steps}: there is a receipt, but the run trained {steps} steps only")
    return _first(found)


def _span(first: int, last: int) -> str:
    return f"step {first} has" if first == last else f"steps {first}-{last} have"


def _first(found: list[str]) -> list[str]:
    rest = len(found) - _SHOWN
    return found if rest <= 0 else [*found[:_SHOWN], f"… and {rest} more like the last"]


def _prove_draws(rows: Table, proof: Proof) -> None:
    """Own draws: each share's number once. What was drawn is the script's."""
    due = {count: digest_of_all(count) for count in np.unique(rows[:, BATCH]).tolist() if 0 < count <= _MOST_SHARES}
    wrong = [row for row in rows.tolist() if row[IDS] != row[BATCH] or row[DIGEST] != due.get(row[BATCH])]
    if wrong:
        proof.violations += _first([f"step {row[STEP]}: not every draw of the step was taken once" for row in wrong])
        return
    proven = "every draw of each step once; what was drawn is the script's"
    proof.add(Checked("own draws", _epochs(rows), len(rows), int(rows[:, SAMPLES].sum()), proven))


def _epochs(rows: Table) -> tuple[int, int]:
    return int(rows[0, EPOCH]), int(rows[-1, EPOCH])


@dataclass
class _Loader:
    """One loader's receipts."""

    name: str
    dealing: Dealing
    proof: Proof
    whole: bool
    """No step is missing: then batches must follow each other."""
    advance: Advance
    _all: int | None = None

    def prove(self, rows: Table, last_epoch: int) -> None:
        change = np.diff(rows[:, EPOCH])
        if (change < 0).any():
            back = int(rows[1:][change < 0][0, STEP])
            self.proof.violations.append(f"step {back}: {self.name} went back to an epoch that was over")
            return
        for of_epoch in np.split(rows, np.flatnonzero(change) + 1):
            epoch = int(of_epoch[0, EPOCH])
            found = self._sequence(of_epoch, epoch) or self._deliveries(of_epoch, epoch)
            if not found and self.whole:
                found = self._ending(of_epoch, epoch, epoch == last_epoch)
            self.proof.violations += _first(found)

    def _sequence(self, rows: Table, epoch: int) -> list[str]:
        """Batches 0, 1, 2, … each once."""
        batches, steps = rows[:, BATCH], self.dealing.steps
        outside = (batches < 0) | (batches >= steps) if steps is not None else batches < 0
        if outside.any():
            row = rows[outside][0]
            return [f"step {row[STEP]}: epoch {epoch} of {self.name} has no batch {row[BATCH]}"]
        wrong = np.diff(batches, prepend=-1) != 1
        if not (wrong.any() and self.whole):
            return []
        at = int(np.flatnonzero(wrong)[0])
        return [f"step {rows[at, STEP]}: batch {batches[at]} of epoch {epoch} came where batch {at} was due"]

    def _deliveries(self, rows: Table, epoch: int) -> list[str]:
        """Each batch has the ids that the order deals to it."""
        if not self.dealing.ordered:
            return self._counts(rows, epoch)
        if not self.whole and self.dealing.kind == "stream":
            return []  # how long the epoch was is not known
        found, seen = [], rows[:, BATCH]
        start, last = 0, int(seen.max()) + 1
        for part in self.dealing.expected(epoch, last, self._length(rows)):
            mine = rows[(seen >= start) & (seen < start + len(part))]
            due = part[mine[:, BATCH] - start]
            wrong = (mine[:, [IDS, DIGEST]] != due).any(axis=1)
            found += [
                _wrong(row, count, self._ids) for row, (count, _) in zip(mine[wrong], due[wrong].tolist(), strict=True)
            ]
            start += len(part)
            self.advance(int(due[:, 0].sum()))
        return found

    def _counts(self, rows: Table, epoch: int) -> list[str]:
        """A sampler's ids are its own, but not how many a batch has."""
        if self.dealing.kind in ("given", "clients"):
            return []
        size = self.dealing.slots if self.dealing.kind == "items" else self.dealing.batch
        due = np.minimum(size, self.dealing.length - size * rows[:, BATCH])
        wrong = rows[:, IDS] != due
        return [_wrong(row, count, self._ids) for row, count in zip(rows[wrong], due[wrong].tolist(), strict=True)]

    def _length(self, rows: Table) -> int | None:
        return int(rows[:, IDS].sum()) if self.dealing.kind == "stream" else None

    @property
    def _ids(self) -> str:
        return "items" if self.dealing.kind in ("items", "stream") else "samples"

    def _ending(self, rows: Table, epoch: int, last: bool) -> list[str]:
        """The epoch as a whole."""
        steps, count = self.dealing.steps, int(rows[:, IDS].sum())
        if steps is not None and len(rows) < steps:
            if not last:
                return [
                    f"epoch {epoch} of {self.name}: {len(rows)} of {steps} batches were trained before the next epoch "
                    f"began, so {self._due(steps) - count} {self._ids} were not (did the script leave its loop?)"
                ]
            proven = f"the run ended after batch {len(rows)} of {steps}: " + self._beginning(count)
        elif self._once(rows, count):
            proven = f"every one of {self.dealing.samples:,} {self._ids} exactly once"
            proven += ", each in its step" if self.dealing.ordered else "; in which step is the sampler's choice"
        elif self.dealing.ordered and count == self.dealing.samples:
            return [f"epoch {epoch} of {self.name}: its ids do not add up to every sample once"]
        else:
            proven = self._beginning(count)
        samples = int(rows[:, SAMPLES].sum())
        self.proof.add(Checked(self.name, (epoch, epoch), len(rows), samples, proven))
        return []

    def _due(self, steps: int) -> int:
        return min(self.dealing.length, steps * (self.dealing.batch or self.dealing.slots))

    def _beginning(self, count: int) -> str:
        """What holds of ids that are not all of them."""
        if self.dealing.kind == "stream":
            return "the stream's items in turn, each once; what they hold is the stream's"
        if self.dealing.kind == "clients":
            return (
                "a receipt for each round, of the samples that its clients trained (summary.json says which took part)"
            )
        if not self.dealing.ordered:
            return "steps and counts; which samples is the sampler's choice"
        which = "that the blocks of rows come to first" if self.dealing.kind == "rows" else "first in the order"
        return f"the {count:,} of {self.dealing.samples:,} {self._ids} {which}, each exactly once"

    def _once(self, rows: Table, count: int) -> bool:
        """Whether these ids are all there are, by their sum alone: no order is asked."""
        if not self.dealing.samples or count != self.dealing.samples:
            return False
        if self._all is None:
            self._all = digest_of_all(self.dealing.samples, self.advance)
        return signed(int(rows[:, DIGEST].sum())) == self._all


def _wrong(row: Table, due: int, word: str) -> str:
    where = f"step {row[STEP]} (epoch {row[EPOCH]}, batch {row[BATCH]})"
    if row[IDS] != due:
        return f"{where}: {row[IDS]} {word} were delivered instead of {due}"
    return f"{where}: {due} {word} were delivered, but not those of this batch"


def compare(one: Table, other: Table, names: tuple[str, str], same_seed: bool) -> list[str]:
    """Where two runs did not train the same samples in the same steps."""
    found = []
    both = min(len(one), len(other))
    different = (one[:both] != other[:both]).any(axis=1)
    for index in np.flatnonzero(different).tolist():
        found.append(_difference(one[index].tolist(), other[index].tolist(), names))
    if len(one) != len(other):
        longer, shorter = (names[0], names[1]) if len(one) > len(other) else (names[1], names[0])
        found.append(f"{longer} has {max(len(one), len(other))} steps, {shorter} only {both}")
    if not same_seed and both and (one[:both, LOADER] == OWN_DRAWS).any():
        found.append("the seeds differ, so the scripts' own draws do too")
    return _first(found)


def _difference(one: list[int], other: list[int], names: tuple[str, str]) -> str:
    if one[STEP] != other[STEP]:
        return f"step {min(one[STEP], other[STEP])} is not in both runs"
    for column, word in ((EPOCH, "epoch"), (LOADER, "loader"), (BATCH, "batch")):
        if one[column] != other[column]:
            return f"step {one[STEP]}: {word} {one[column]} in {names[0]}, {word} {other[column]} in {names[1]}"
    if one[SAMPLES] != other[SAMPLES] or one[IDS] != other[IDS]:
        return f"step {one[STEP]}: {one[SAMPLES]} samples in {names[0]}, {other[SAMPLES]} in {names[1]}"
    return f"step {one[STEP]}: {names[0]} and {names[1]} trained different samples"
