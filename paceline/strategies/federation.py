"""What is written behind `federated:`, and who takes part in which round. Pure, and without torch: agents read it too.

federated:rounds=50,clients=20,sample=10,alpha=0.3,outer=adam,lr=0.01
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from paceline.data.order import mix
from paceline.errors import UsageError
from paceline.servers.outer import OUTERS, SGD, AnyOuter, make

_SAMPLED, _DROPPED = 301, 302
_WHOLE = 1 << 63
_PLAIN = SGD()


class Roster(NamedTuple):
    """The clients of one round, by their numbers."""

    present: tuple[int, ...]
    """Who is to train. The place here is the client's leaf in the tree of additions."""
    dropped: tuple[int, ...]
    """Who was drawn too, and has dropped out on purpose."""


@dataclass(frozen=True)
class Federation:
    """
    >>> parse("federated:rounds=3,clients=8,sample=4,outer=adam,lr=0.1")  # doctest: +NORMALIZE_WHITESPACE
    Federation(rounds=3, clients=8, sample=4, epochs=1, steps=0, alpha=0.0, prox=0.0, drop=0.0, quorum=0, grace=0.0,
        outer=Adam(lr=0.1, beta1=0.9, beta2=0.99, eps=0.001))
    """

    rounds: int = 0
    """0: as often as the script's run.epochs(n) says."""
    clients: int = 0
    """Of a split made here; 0: as many as the data has."""
    sample: int = 0
    """Clients drawn for a round; 0: all."""
    epochs: int = 1
    """That a client goes through its data in a round."""
    steps: int = 0
    """Or its batches in a round, whatever it has."""
    alpha: float = 0.0
    """Of Dirichlet's distribution, by which a split made here deals each label to the clients; 0: all alike."""
    prox: float = 0.0
    """FedProx: μ of the term μ/2 ‖w − θ‖² at the client."""
    drop: float = 0.0
    """The part of the drawn clients that drops out, for trying."""
    quorum: int = 0
    """A round counts once so many have come; 0: all that can."""
    grace: float = 0.0
    """Seconds that the others have from then on."""
    outer: AnyOuter = _PLAIN

    def drawn(self, clients: int) -> int:
        """How many of so many clients are drawn for a round."""
        drawn = self.sample or clients
        if drawn > clients:
            raise UsageError(f"--strategy federated: sample={drawn} of {clients} clients; draw at most {clients}")
        if self.quorum > drawn:
            raise UsageError(
                f"--strategy federated: quorum={self.quorum} of {drawn} clients a round can never come; lower it"
            )
        return drawn

    def roster(self, seed: int, number: int, clients: int) -> Roster:
        """Who takes part in round `number`, of so many clients.

        >>> Federation(sample=3, drop=0.5).roster(seed=1, number=0, clients=8)
        Roster(present=(4,), dropped=(5, 7))
        """
        by_lot = sorted(range(clients), key=lambda client: mix(seed, _SAMPLED, number, client))
        drawn = sorted(by_lot[: self.drawn(clients)])
        dropped = [client for client in drawn if mix(seed, _DROPPED, number, client) / _WHOLE < self.drop]
        return Roster(tuple(client for client in drawn if client not in dropped), tuple(dropped))


_OWN = {field.name: field for field in fields(Federation) if field.name != "outer"}
_EXAMPLE = "federated:rounds=50,clients=8,sample=4"


def parse(text: str) -> Federation:
    """What a user wrote for --strategy; UsageError says what is wrong with it."""
    given: dict[str, str] = {}
    _, _, rest = text.partition(":")
    for option in rest.split(",") if rest else []:
        name, _, value = option.partition("=")
        if not value or name in given:
            raise UsageError(f"--strategy {text}: {option!r} is no setting of its own; write for example {_EXAMPLE}")
        given[name] = value
    kind = given.pop("outer", "sgd")
    own = {name: _number(text, name, given.pop(name)) for name in list(given) if name in _OWN}
    _check_names(text, kind, given)
    outer = make(kind, **{name: _number(text, name, value) for name, value in given.items()})
    made = Federation(**own, outer=outer)
    if made.clients or made.sample:
        made.drawn(made.clients or made.sample)
    if made.grace and not made.quorum:
        quorum = min(4, made.drawn(made.clients or made.sample) if made.clients or made.sample else 4)
        raise UsageError(f"--strategy {text}: the grace window begins when a quorum has come; say quorum={quorum} too")
    return made


def quorum_of(text: str) -> int:
    """Of any strategy, as it is written for --strategy; 0: it has none.

    >>> quorum_of("federated:sample=8,quorum=6,grace=2"), quorum_of("federated"), quorum_of("ssp:3")
    (6, 0, 0)
    """
    return parse(text).quorum if text.partition(":")[0] == "federated" else 0


def _check_names(text: str, kind: str, given: dict[str, str]) -> None:
    known = {*_OWN, "outer", *(name for outer in OUTERS.values() for name in outer.__struct_fields__)}
    if unknown := [name for name in given if name not in known]:
        raise UsageError(f"--strategy {text}: there is no {unknown[0]!r}; there are {', '.join([*_OWN, 'outer'])}, and the "
                         f"values of the outer optimizer {kind}")  # fmt: skip


def _number(text: str, name: str, value: str) -> Any:
    whole = name in _OWN and isinstance(_OWN[name].default, int)
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        raise UsageError(f"--strategy {text}: {name} is a {'whole ' * whole}number, unlike {value!r}") from None
    most = 1.0 if name == "drop" else float("inf")
    if (name in _OWN and not (0 <= number < most)) or (name == "epochs" and number < 1):
        raise UsageError(f"--strategy {text}: {name}={value} cannot be; write for example {_EXAMPLE}")
    return number
