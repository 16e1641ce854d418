"""What is written behind `federated:`, and who takes part in which round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.servers.outer import SGD, Yogi
from paceline.strategies import find
from paceline.strategies.federation import Federation, parse


@given(
    seed=st.integers(0, 1 << 40),
    number=st.integers(0, 1000),
    clients=st.integers(1, 40),
    drop=st.floats(0, 0.99),
    data=st.data(),
)
def test_a_roster_is_a_function_of_seed_and_round(
    seed: int, number: int, clients: int, drop: float, data: st.DataObject
) -> None:
    plan = Federation(sample=data.draw(st.integers(0, clients)), drop=drop)
    present, dropped = plan.roster(seed, number, clients)
    assert plan.roster(seed, number, clients) == (present, dropped)
    assert len({*present, *dropped}) == len(present) + len(dropped) == (plan.sample or clients)
    assert all(0 <= client < clients for client in (*present, *dropped))
    assert sorted(present) == list(present) and sorted(dropped) == list(dropped)
    everybody = Federation(sample=plan.sample).roster(seed, number, clients).present
    assert sorted([*present, *dropped]) == list(everybody), "who drops out was drawn all the same"


def test_over_the_rounds_all_are_drawn_alike_and_as_many_drop_out_as_was_said() -> None:
    plan, drawn, dropped = Federation(sample=5, drop=0.5), [0] * 20, 0
    for number in range(400):
        roster = plan.roster(1, number, 20)
        dropped += len(roster.dropped)
        for client in (*roster.present, *roster.dropped):
            drawn[client] += 1
    assert 60 < min(drawn) < max(drawn) < 140, "100 in the mean"
    assert 900 < dropped < 1100, "1000 in the mean"


def test_what_is_written() -> None:
    assert parse("federated") == Federation()
    written = parse("federated:rounds=9,clients=8,alpha=0.3,steps=5,outer=yogi,lr=0.1,beta1=0.5")
    assert written == Federation(rounds=9, clients=8, alpha=0.3, steps=5, outer=Yogi(lr=0.1, beta1=0.5))
    assert parse("federated:lr=0.5").outer == SGD(lr=0.5)
    assert find("federated:rounds=3,clients=2").servers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("federated:8", "'8' is no setting of its own; write for example federated:rounds=50,clients=8,sample=4"),
        ("federated:clients=8,clients=9", "'clients=9' is no setting of its own"),
        ("federated:client=8", "there is no 'client'; there are rounds, clients, sample"),
        ("federated:clients=1.5", "clients is a whole number, unlike '1.5'"),
        ("federated:alpha=x", "alpha is a number, unlike 'x'"),
        ("federated:drop=1", "drop=1 cannot be"),
        ("federated:prox=nan", "prox=nan cannot be"),
        ("federated:epochs=0", "epochs=0 cannot be"),
        ("federated:rounds=-1", "rounds=-1 cannot be"),
        ("federated:sample=4,quorum=5", "quorum=5 of 4 clients a round can never come"),
        ("federated:clients=4,quorum=5", "quorum=5 of 4 clients a round can never come"),
        ("federated:clients=4,sample=5", "sample=5 of 4 clients; draw at most 4"),
        ("federated:grace=2", "say quorum=4 too"),
        ("federated:clients=2,grace=5", "say quorum=2 too"),
        ("federated:outer=sgd,beta1=0.5", "the outer optimizer sgd has no beta1"),
        ("federated:outer=lion", "there is no outer optimizer 'lion'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(text)
