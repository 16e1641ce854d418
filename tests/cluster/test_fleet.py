"""The fleet in numbers, as a layout's event has them."""

from __future__ import annotations

from paceline.cluster.fleet import Fleet


def test_a_layout_says_what_each_server_holds_and_how_many_copies_there_are() -> None:
    fleet = Fleet(wanted=2, replicas=2)
    for server in (0, 1):
        fleet.came(server, f"address {server}")
    fleet.sized([100, 60])
    first = fleet.described()
    assert first["bytes"] == {0: 160, 1: 160} and sorted(first["leads"].values()) == [60, 100]
    assert (first["layout"], first["copies"]) == (1, 2)
    assert fleet.died(1)
    assert fleet.described() == {"layout": 2, "bytes": {0: 160}, "leads": {0: 160}, "copies": 1}
    fleet.came(2, "address 2")
    assert fleet.described()["copies"] == 1, "its copies are not filled yet"
    fleet.filled(0, 2, {fragment: since[2] for fragment, since in enumerate(fleet.since)})
    assert fleet.described()["copies"] == 2 and fleet.described()["bytes"] == {0: 160, 2: 160}
