"""How a run's end is told: its exit code, and the summary of one that came to no good end. No torch in here."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

from paceline.cluster.job import Job
from paceline.cluster.journal import Failure, Journal
from paceline.folder import RunFolder
from paceline.state.checkpoint import sweep
from paceline.wires.board import Board, Phase


def conclude(job: Job, folder: RunFolder, journal: Journal, board: Board) -> int:
    """The exit code, once no worker is left."""
    code = _exit_code(job, folder, journal, board)
    more: dict[str, Any] = {}
    if journal.rolled.times:
        more |= {"rollbacks": journal.rolled.times, "steps_redone": journal.rolled.redone}
    more |= {"servers_lost": journal.servers_lost} if journal.servers_lost else {}
    more |= {"coordinators_lost": journal.leaders_lost} if journal.leaders_lost else {}
    loads = {str(journal.role(number)[1]): board.load(number) for number in journal.servers}
    if any(load.calls for load in loads.values()):
        more["by_server"] = {server: asdict(load) for server, load in loads.items() if load.calls}
    if journal.membership.wanted != job.workers:  # it was scaled
        more["workers"] = len(journal.membership.settled.members)
    if more:
        folder.write_json(folder.summary, folder.read_json(folder.summary) | more)
    sweep(folder.checkpoints)
    words = folder.read_json(folder.summary).get("exit", "")
    folder.event("ended", words, exit_code=code, pid=os.getpid(), machine=journal.led_from)
    return code


def _exit_code(job: Job, folder: RunFolder, journal: Journal, board: Board) -> int:
    if journal.failure is not None:
        _tell_failure(folder, journal, journal.failure)
        _write_summary(job, folder, journal, board, f"failed: {journal.failure.who} {journal.failure.text}")
        return journal.failure.exit_code
    if job.dry_run:
        return 0
    finished = all(board.see(number).phase == Phase.FINISHED for number in journal.membership.settled.members)
    if journal.killed or not (folder.read_json(folder.summary) or finished):
        why = journal.killed or "no worker trained anything"
        _write_summary(job, folder, journal, board, why)
        if not {"-h", "--help"} & set(job.arguments):
            folder.event("over", why, notice=why)
        return journal.stop.exit_code or 130 * bool(journal.killed)
    return journal.stop.exit_code


def _tell_failure(folder: RunFolder, journal: Journal, failure: Failure) -> None:
    of_worker = failure.worker >= 0 and failure.exit_code != 2
    role, index = journal.role(failure.worker)
    folder.event(
        "failed",
        f"{failure.who} {failure.text}",
        **{role: index},
        exit_code=failure.exit_code,
        who=failure.who,
        text=failure.text,
        trace=failure.trace,
        log=str(folder.log_of(role, index)) if of_worker else "",
    )


def _write_summary(job: Job, folder: RunFolder, journal: Journal, board: Board, why: str) -> None:
    """As much as is known of a run that did not write its own."""
    rows = [board.see(number) for number in journal.places]
    known = {
        "run": folder.id,
        "exit": why.splitlines()[0],
        "steps": max((row.step for row in rows), default=0),
        "samples": max((row.samples for row in rows), default=0),
        "workers": job.workers,
        "servers": job.servers,
        "strategy": job.settings.strategy,
        "wall_s": round(time.time() - journal.started, 3),
    }
    folder.write_json(folder.summary, known)
