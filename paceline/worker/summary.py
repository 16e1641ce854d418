"""How a run ended: summary.json, and the same as a table."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from paceline.run import Run


class Sent(NamedTuple):
    """Bytes that the workers have sent."""

    wire: int
    """For training."""
    copied: int
    """Copies of replicas' states, to other machines."""


def summarise(
    run: Run, weights_sha256: str, exit: str, waits: dict[int, dict[int, float]], sent: Sent
) -> dict[str, Any]:
    """Write the summary; worker 0 does, once all replicas agreed. `waits`: who has waited for whom, in seconds; `sent`: what the
    workers that are here have sent, since each of them came."""
    session, stepper = run._session, run._stepper
    wall = time.monotonic() - run._started
    split = stepper.split.as_dict() if stepper else {}
    training = sum(split.values())
    samples, before = (stepper.samples, stepper.before) if stepper else (0, 0)
    summary = {
        "run": session.folder.id,
        "exit": exit,
        "weights_sha256": weights_sha256,
        "steps": run.step,
        "epochs": run._epochs_done,
        "samples": samples,
        "wall_s": round(wall, 3),
        "samples_per_s": round((samples - before) / training, 1) if training else 0.0,
        "workers": run.settings.workers,
        "servers": run.settings.servers,
        "slots": run.settings.slots,
        "threads": run.settings.threads,
        "seed": run.settings.seed,
        "strategy": run.settings.strategy,
        "precision": run.settings.precision,
        "device": str(run.device),
        "metrics": run.metrics,
        "time_split": split,
        "terms": session.view.term,
        "resumed": session.ticket is not None and bool(session.ticket.resume),
        "recoveries": session.recoveries,
        "shares_redone": stepper.redone if stepper else 0,
        "median_step_s": round(stepper.gaps.median_s, 6) if stepper else 0.0,
        "longest_gap_s": round(stepper.gaps.longest_s, 6) if stepper else 0.0,
        "wire_bytes": sent.wire,
        "copied_bytes": sent.copied,
        **(run._strategy.report() if stepper else {}),
    }
    if waits:
        summary["waits"] = {str(a): {str(b): round(s, 3) for b, s in sorted(of.items())} for a, of in waits.items()}
    session.folder.write_json(session.folder.summary, summary)
    session.folder.event("finished", exit, steps=run.step, weights_sha256=weights_sha256)
    if not session.launched:
        sys.stderr.write(
            f"paceline: {exit}: {run.step} step{'s' * (run.step != 1)}, {summary['samples_per_s']:,.0f} samples/s, "
            f"weights {weights_sha256[:12]}, in {session.folder.path}\n"
        )
    return summary
