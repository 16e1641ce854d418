"""What a worker starts with: its ticket, the settings the bits need, and its GPU by the place it has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.launch.environment import MARK, Ticket, bit_environment, nursery_environment, own_environment, ticket

TICKET = Ticket(7, "paceline-x", 1, "ab" * 32, "/runs/it", {"slots": 12})


def test_a_ticket_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**nursery_environment({"HOME": "/h"}, 3), **own_environment(TICKET, 1, [])}
    monkeypatch.setenv(MARK, env[MARK])
    assert ticket() == TICKET
    monkeypatch.delenv(MARK)
    assert ticket() is None
    assert env["HOME"] == "/h" and env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_a_launchers_own_names_are_taken_out() -> None:
    base = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "USER": "u"}
    env = nursery_environment(base, 1)
    assert env["USER"] == "u" and not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & set(env)


def test_sets_are_walked_in_one_order() -> None:
    """A script that builds its model from a set of names must build the same one on every worker."""
    names = [f"layer{n}" for n in range(50)]
    orders = {
        subprocess.run(
            [sys.executable, "-c", f"print(list(set({names})))"],
            env={**os.environ, **bit_environment(1)},
            stdout=subprocess.PIPE,
        ).stdout
        for _ in range(3)
    }
    assert len(orders) == 1 and b"layer49" in orders.pop()


@pytest.mark.parametrize(("place", "gpu"), [(0, "GPU-a"), (2, "5"), (4, "3"), (5, "5")])
def test_the_gpu_is_that_of_the_place_and_not_of_the_number(place: int, gpu: str) -> None:
    """Worker 7 replaces another one and gets the GPU that became free; its number is beyond their count."""
    env = own_environment(TICKET, place, ["GPU-a", "3", "5"])
    assert env["CUDA_VISIBLE_DEVICES"] == gpu
