"""Whether a run with faults came out as if there had been none. Pure: what two runs left behind in, a verdict out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.faults.plan import Fault

_SAME = ("weights_sha256", "samples", "steps", "exit")
"""What the summary must have as the reference has it."""


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    code: int
    summary: Mapping[str, Any]
    seconds: float = 0.0
    """From its start to its end, everything in it."""
    told: Sequence[str] = ()
    """The `why` of its fault events."""
    step_times: Sequence[float] = ()
    """When steps were logged."""
    late: bool = False
    """It was ended by us, after all those seconds."""
    left: Sequence[str] = ()
    """Processes that were still there after the end."""
    last_words: str = ""
    """The last line on its terminal."""
    unlike: str = ""
    """What `paceline verify` found."""


@dataclass(frozen=True)
class Verdict:
    seed: int
    faults: tuple[Fault, ...]
    violations: tuple[str, ...]
    weights: str
    samples: int | None
    stall_s: float | None
    shares_redone: int | None
    carried_out: int
    passed_over: int
    seconds: float

    @property
    def why(self) -> str:
        return "; ".join(self.violations) or "as the reference"


def judge(reference: Mapping[str, Any], outcome: Outcome, seed: int, faults: Sequence[Fault]) -> Verdict:
    told = Counter(outcome.told)
    summary = outcome.summary
    return Verdict(
        seed,
        tuple(faults),
        tuple(_violations(reference, outcome)),
        str(summary.get("weights_sha256", "")),
        summary.get("samples"),
        stall(summary, outcome.step_times),
        summary.get("shares_redone"),
        sum((Counter(map(str, faults)) & told).values()),
        sum(count for why, count in told.items() if ": passed over" in why),
        outcome.seconds,
    )


def _violations(reference: Mapping[str, Any], outcome: Outcome) -> list[str]:
    if outcome.late:
        return [f"it hung: ended after {outcome.seconds:.0f} s"]
    found = []
    # Whoever started the run may be the leader that a fault killed. Then the summary alone tells how it went.
    if outcome.code:
        found.append(f"exit code {outcome.code}" + (f" ({outcome.last_words})" if outcome.last_words else ""))
    if not outcome.summary:
        found.append("no summary")
    for name in _SAME if outcome.summary else ():
        got, want = outcome.summary.get(name), reference.get(name)
        if got != want:
            found.append(f"{name} {_short(got)}, not {_short(want)}")
    if outcome.left:
        found.append(f"left behind: {', '.join(outcome.left)}")
    if outcome.unlike:
        found.append(f"verify: {outcome.unlike}")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def stall(summary: Mapping[str, Any], step_times: Sequence[float]) -> float | None:
    """The longest gap between two steps, less the median: what the worst fault cost.

    A run that knows its gaps tells them; else they are those between the steps that the script logged.
    """
    if "longest_gap_s" in summary and "median_step_s" in summary:
        return float(summary["longest_gap_s"]) - float(summary["median_step_s"])
    gaps = [later - earlier for earlier, later in zip(step_times, step_times[1:], strict=False)]
    return max(gaps) - statistics.median(gaps) if gaps else None


HEAD = ("seed", "hash", "samples", "stall", "redone", "faults", "why")


def row(verdict: Verdict) -> tuple[str, ...]:
    """One line of the table, in the order of HEAD."""
    faults = f"{verdict.carried_out}/{len(verdict.faults)}"
    return (
        str(verdict.seed),
        verdict.weights[:12] or "-",
        "-" if verdict.samples is None else f"{verdict.samples:,}",
        "-" if verdict.stall_s is None else f"{verdict.stall_s:.2f} s",
        "-" if verdict.shares_redone is None else str(verdict.shares_redone),
        faults + (f" ({verdict.passed_over} passed over)" if verdict.passed_over else ""),
        ("VIOLATION: " if verdict.violations else "") + verdict.why,
    )


def total(verdicts: Sequence[Verdict]) -> str:
    """The last line."""
    wrong = sum(bool(verdict.violations) for verdict in verdicts)
    asked, done = (sum(counts) for counts in ([len(v.faults) for v in verdicts], [v.carried_out for v in verdicts]))
    words = f"{len(verdicts)} plans, {wrong or 'no'} violation{'s' * (wrong > 1)}, {done} of {asked} faults carried out"
    stalls = [verdict.stall_s for verdict in verdicts if verdict.stall_s is not None]
    if stalls:
        words += f"; stall median {statistics.median(stalls):.2f} s, worst {max(stalls):.2f} s"
    return words
