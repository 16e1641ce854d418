"""What is told of a run's servers: how many, what each held, and how long each failover took."""

from __future__ import annotations

from typing import Any

from paceline.watch.servers import servers_of


def event(at: float, name: str, why: str = "", **fields: Any) -> dict[str, Any]:
    return {"time": 100.0 + at, "event": name, "why": why, **fields}


def layout(at: float, copies: int, **held: tuple[int, int]) -> dict[str, Any]:
    """`s1=(300, 100)`: server 1 holds 300 bytes, and leads 100 of them."""
    nbytes, leads = ({name[1:]: both[which] for name, both in held.items()} for which in (0, 1))
    return event(at, "layout", copies=copies, bytes=nbytes, leads=leads)


BEGINS = [
    event(0.0, "launched"),
    event(1.0, "server started", server=0),
    event(1.1, "server started", server=1),
    layout(1.2, 2, s0=(3072, 1024), s1=(3072, 2048)),
]
DIES = [
    event(5.0, "server ended", "was killed by SIGKILL", server=1, lost=True),
    layout(5.01, 1, s0=(3072, 3072)),
    event(5.01, "starting a server", server=2, replaces=1),
]


def test_a_run_without_servers_has_nothing_to_tell() -> None:
    assert servers_of([event(0.0, "launched"), event(1.0, "worker started", worker=0)]) == []


def test_servers_that_all_live() -> None:
    head, servers = servers_of([*BEGINS, event(9.0, "server ended", "the run is over", server=0, lost=False)])
    assert head == [("2 servers",)]
    assert servers[1:] == [
        ("0", "1.0 s", "9.0 s", "3 KiB", "1 KiB", "the run is over"),
        ("1", "1.1 s", "", "3 KiB", "2 KiB", ""),
    ]


def test_what_each_has_done_stands_beside_it() -> None:
    loads = {"1": {"calls": 1200, "received": 2048, "sent": 5 << 20, "cpu_s": 1.26}}
    _, servers = servers_of(BEGINS, loads)
    assert servers[0] == ("server", "from", "to", "holds", "answers for", "received", "sent", "calls", "CPU", "end")
    assert servers[1] == ("0", "1.0 s", "", "3 KiB", "1 KiB", "", "", "", "", "")
    assert servers[2] == ("1", "1.1 s", "", "3 KiB", "2 KiB", "2 KiB", "5 MiB", "1,200", "1.3 s", "")


def test_a_failover_lasts_until_there_are_as_many_copies_as_before() -> None:
    head, servers, failovers = servers_of(
        [
            *(*BEGINS, *DIES, event(5.1, "server started", server=2)),
            layout(5.2, 1, s0=(3072, 3072), s2=(3072, 0)),
            layout(5.5, 2, s0=(3072, 3072), s2=(3072, 0)),
            layout(5.6, 2, s0=(3072, 1024), s2=(3072, 2048)),
        ]
    )
    assert head == [("3 servers, 1 of them lost",)]
    assert servers[2] == ("1", "1.1 s", "5.0 s", "3 KiB", "2 KiB", "was killed by SIGKILL")
    assert servers[3] == ("2", "5.1 s", "", "3 KiB", "2 KiB", "")
    assert failovers[1:] == [("server 1", "5.0 s", "+0.01 s", "server 2 +0.10 s", "+0.50 s")]


def test_a_failover_that_came_to_nothing() -> None:
    (_, _, begun), (_, _, failed) = servers_of([*BEGINS, *DIES]), servers_of([*BEGINS, DIES[0]])
    assert begun[1:] == [("server 1", "5.0 s", "+0.01 s", "server 2 -", "-")]
    assert failed[1:] == [("server 1", "5.0 s", "-", "-", "-")]


def test_a_failover_ends_where_the_run_goes_back() -> None:
    head, _, failovers = servers_of(
        [
            *(*BEGINS, *DIES, event(5.1, "server ended", "was killed by SIGKILL", server=0, lost=True)),
            event(5.1, "rolling back"),
            event(6.0, "server started", server=3),
            layout(6.1, 2, s3=(3072, 3072)),
        ]
    )
    assert head == [("3 servers, 2 of them lost; back to a checkpoint 1 time",)]
    assert failovers[1:] == [
        ("server 1", "5.0 s", "+0.01 s", "server 2 -", "-"),
        ("server 0", "5.1 s", "-", "-", "-"),
    ]


def test_a_resumed_run_has_servers_of_its_own() -> None:
    head, servers = servers_of([*BEGINS, *DIES, event(20.0, "launched"), event(21.0, "server started", server=0)])
    assert head == [("1 server",)] and servers[1][:3] == ("0", "21.0 s", "")


def test_servers_that_were_asked_for_replace_nobody() -> None:
    head, servers, failovers = servers_of(
        [
            *(*BEGINS, *DIES, event(5.1, "server started", server=2)),
            event(6.0, "scaling", servers=1),
            layout(6.1, 1, s0=(3072, 3072)),
            event(6.2, "server ended", "others hold all that it held", server=2, lost=False),
            event(7.0, "scaling", servers=2),
            event(7.0, "starting a server", server=3),
            event(7.1, "server started", server=3),
        ]
    )
    assert head == [("4 servers, 1 of them lost; scaled to 2",)]
    assert [row[5] for row in servers[1:]] == ["", "was killed by SIGKILL", "others hold all that it held", ""]
    assert failovers[1:] == [("server 1", "5.0 s", "+0.01 s", "server 2 +0.10 s", "+1.10 s")]
