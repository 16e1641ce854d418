"""The board: what one process writes, another sees, through a descriptor alone."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.wires.board import Abort, Board, Phase, Stop


@pytest.fixture
def boards() -> Iterator[tuple[Board, Board]]:
    """The agent's mapping and a worker's, of the same descriptor."""
    agent = Board.create(3)
    worker = Board(os.dup(agent.fd), 3)
    yield agent, worker
    worker.close()
    agent.close()


def test_the_header_is_seen_through_the_other_mapping(boards: tuple[Board, Board]) -> None:
    agent, worker = boards
    assert (worker.abort, worker.main_ready, worker.stop) == (Abort.NONE, False, Stop.NONE)
    assert not worker.abort, "the waiting loops ask for its truth"
    agent.abort = Abort.WORKER_LOST
    agent.stop = Stop.CTRL_C
    worker.main_ready = True
    assert worker.abort is Abort.WORKER_LOST and worker.stop and agent.main_ready
    agent.abort, agent.stop, worker.main_ready = Abort.NONE, Stop.NONE, False
    assert (worker.abort, worker.main_ready, worker.stop) == (Abort.NONE, False, Stop.NONE)


def test_the_dead_are_said_to_be_gone_and_nothing_else_changes(boards: tuple[Board, Board]) -> None:
    agent, worker = boards
    row = worker.row(1)
    row.describe(pid=77)
    row.enter(Phase.REDUCE)
    assert not any(worker.gone(number) for number in range(3))
    agent.bury(1)
    assert [worker.gone(number) for number in range(3)] == [False, True, False]
    row.enter(Phase.COMPUTE)
    row.progress(9, 9, 9)
    row.waits_for(2)
    assert worker.gone(1), "what a row says of itself does not raise the dead"
    row.release()
    assert (agent.see(1).pid, agent.see(1).phase, agent.abort, agent.next_term) == (77, Phase.COMPUTE, Abort.NONE, 0)


def test_the_next_term_is_announced_and_withdrawn(boards: tuple[Board, Board]) -> None:
    agent, worker = boards
    assert worker.next_term == 0
    agent.next_term = 1 << 40
    assert worker.next_term == 1 << 40
    assert (worker.abort, worker.main_ready, worker.stop) == (Abort.NONE, False, Stop.NONE)
    agent.next_term = 0
    assert worker.next_term == 0


def test_a_fresh_row_is_a_worker_that_starts(boards: tuple[Board, Board]) -> None:
    seen = boards[0].see(2)
    assert (seen.worker, seen.pid, seen.phase, seen.since_s) == (2, 0, Phase.STARTING, 0.0)
    assert (seen.step, seen.epoch, seen.samples, seen.metric, seen.place, seen.waits_for) == (0, 0, 0, 0.0, "", None)


def test_a_row_is_seen_through_the_other_mapping_and_no_other_row_changes(boards: tuple[Board, Board]) -> None:
    agent, worker = boards
    before = [agent.see(0), agent.see(2)]
    row = worker.row(1)
    row.describe(pid=4321, total_steps=900)
    row.enter(Phase.COMPUTE)
    row.progress(step=17, epoch=2, samples=1 << 40)
    row.metric(-0.125)
    row.place("train.py:12 – größer")
    seen = agent.see(1)
    row.release()
    assert (seen.pid, seen.total_steps, seen.phase) == (4321, 900, Phase.COMPUTE)
    assert (seen.step, seen.epoch, seen.samples, seen.metric) == (17, 2, 1 << 40, -0.125)
    assert seen.place == "train.py:12 – größer"
    assert 0 <= seen.since_s < 60
    assert [agent.see(0), agent.see(2)] == before
    assert (agent.abort, agent.main_ready, agent.stop) == (Abort.NONE, False, Stop.NONE)


def test_describing_one_thing_leaves_the_other(boards: tuple[Board, Board]) -> None:
    row = boards[1].row(0)
    row.describe(pid=7, total_steps=8)
    row.describe(pid=9)
    row.describe(total_steps=0)
    seen = boards[0].see(0)
    row.release()
    assert (seen.pid, seen.total_steps) == (9, 0)


def test_whom_a_worker_waits_for_ends_with_its_phase(boards: tuple[Board, Board]) -> None:
    row = boards[1].row(2)
    row.enter(Phase.REDUCE)
    row.waits_for(0)
    assert boards[0].see(2).waits_for == 0
    row.enter(Phase.COMPUTE)
    assert boards[0].see(2).waits_for is None
    row.release()


def test_time_in_a_phase_is_counted_from_its_start(boards: tuple[Board, Board]) -> None:
    row = boards[1].row(0)
    row.enter(Phase.DATA)
    first = boards[0].see(0).since_s
    time.sleep(0.002)
    later = boards[0].see(0).since_s
    assert later >= first + 0.002
    row.enter(Phase.DATA)
    assert boards[0].see(0).since_s < later
    row.release()


def test_metrics_may_be_no_numbers(boards: tuple[Board, Board]) -> None:
    row = boards[1].row(0)
    row.metric(math.nan)
    assert math.isnan(boards[0].see(0).metric)
    row.metric(math.inf)
    assert boards[0].see(0).metric == math.inf
    row.release()


def test_a_place_that_is_too_long_is_cut_and_a_shorter_one_replaces_it(boards: tuple[Board, Board]) -> None:
    agent, worker = boards
    rows = [worker.row(0), worker.row(1)]
    rows[1].enter(Phase.SCRIPT)
    rows[0].place("é" * 400)
    place = agent.see(0).place
    assert place.startswith("é" * 100) and len(place) < 400
    assert agent.see(1).phase is Phase.SCRIPT and agent.see(1).pid == 0, "the next row is not written over"
    rows[0].place("short")
    assert agent.see(0).place == "short"
    for row in rows:
        row.release()


def test_every_phase_fits_behind_a_name() -> None:
    assert all(phase.words and not phase.words.startswith("is ") for phase in Phase)


def test_another_process_writes_the_board(boards: tuple[Board, Board]) -> None:
    agent, _ = boards
    code = (
        "import sys; from paceline.wires.board import Board, Phase\n"
        "board = Board(int(sys.argv[1]), 3); row = board.row(1)\n"
        "assert board.stop\n"
        "row.enter(Phase.EVALUATE); row.progress(5, 1, 99); board.main_ready = True\n"
        "assert 'torch' not in sys.modules"
    )
    agent.stop = Stop.CTRL_C
    subprocess.run([sys.executable, "-c", code, str(agent.fd)], pass_fds=[agent.fd], check=True, timeout=60)
    seen = agent.see(1)
    assert (seen.phase, seen.step, seen.samples, agent.main_ready) == (Phase.EVALUATE, 5, 99, True)


def test_closing_lets_go_of_the_descriptor() -> None:
    board = Board.create(1)
    fd = board.fd
    assert "/memfd:paceline-board" in os.readlink(f"/proc/self/fd/{fd}")
    board.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
