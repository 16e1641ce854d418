"""What cannot be chosen is refused with the nearest that can: whoever follows that is not refused again."""

from __future__ import annotations

import re

import pytest

from paceline.errors import UsageError
from paceline.strategies import TABLE, find
from paceline.tensors import codecs

REFUSED = {
    "gossip:4+int8": "gossip:4 local:4+int8",
    "gossip+int8": "gossip local:1+int8",
    "gossip:4+int8+fp8": "gossip:4",
    "gossip:4+int8+rows:2": "gossip:4",
    "gossip:4+damp:0.5": "gossip:4",
    "gossip:4+thinly": "gossip:4",
    "gossip:": "gossip gossip:4",
    "gossip:4,lr=1": "diloco:4,lr=1",
    "federated:rounds=3,clients=8+int8": "federated:rounds=3,clients=8",
    "federated+int8+fp8": "federated",
    "federated+int8+rows:2": "federated",
    "federated+rows:2": "federated",
    "federated+damp:1": "federated",
    "federated:8": "federated:rounds=50,clients=8,sample=4",
    "diloco:50+rows:2": "diloco:50",
    "diloco+rows:2": "diloco",
    "diloco:50+rows:2+int8": "diloco:50",
    "diloco:50+int8+rows:2": "diloco:50+int8",
    "diloco:x": "diloco diloco:50,lr=0.7,momentum=0.9",
    "local": "local:20",
    "local+int8": "local:20",
    "local:20,lr=1": "diloco:20,lr=1",
    "local:20,outer=adam,lr=0.01": "diloco:20,outer=adam,lr=0.01",
    "local:20,overlap=2": "local:20",
    "postlocal:500,20,lr=0.5": "diloco:20,lr=0.5",
    "postlocal:500": "postlocal:500,20",
    "local:20+damp:0.5": "local:20",
    "streaming": "streaming:50,4",
    "streaming:4,5": "streaming:4,4",
    "allreduce:4": "allreduce",
    "allreduce+rows:3": "ps+rows:3",
    "allreduce+int8+topk:0.1": "allreduce+topk:0.1",
    "allreduce+topk": "topk:0.01",
    "allreduce+damp:0.7": "allreduce async+damp:0.7",
    "ps+damp:x": "ps async+damp:0.5",
    "ps:3": "ps",
    "ps+int8+rows:2": "ps+rows:2+int8",
    "ps+int8+backup:1": "ps+int8",
    "ps+backup:1+int8": "ps+backup:1 ps+int8",
    "ps+backup": "ps+backup:1",
    "ps+backup:0": "ps ps+backup:1",
    "ps+rows:2+backup:1": "ps+rows:2",
    "ssp": "ssp:3",
    "ssp+thinly": "ssp:3",
    "ssp:3+thinly": "ssp:3+damp:0.5 ssp:3+dc:0.04 ssp:3+int8",
    "ssp:3+int8+dc:0.04": "ssp:3+dc:0.04+int8",
    "dssp:8,1": "dssp:1,8",
}
"""What is written → what the refusal says to write."""


def suggested(message: str) -> list[str]:
    """The strategies, or the codec, that stand behind "write"; not the words around them."""
    rest = re.split("[;:] write ", message)[-1]
    names = [word.rstrip(",") for word in rest.split()]
    return [name for name in names if re.split("[:+,]", name)[0] in {*TABLE, *codecs.TABLE}]


def refusal(text: str) -> str:
    """What is said of it; nothing, if it is accepted."""
    try:
        codecs.read(text) if codecs.is_codec(text) else find(text)
    except UsageError as refused:
        return str(refused)
    return ""


def accepted(text: str) -> bool:
    return not refusal(text)


@pytest.mark.parametrize("text", REFUSED)
def test_the_nearest_that_can_be_is_named_and_can_be(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        find(text)
    message = str(refused.value)
    assert suggested(message) == REFUSED[text].split(), message
    assert "()" not in message
    assert all(accepted(near) for near in suggested(message)), message


@pytest.mark.parametrize("joined", ["int8", "rows:2", "damp:0.5", "backup:1", "int8+fp8", "int8+rows:2"])
@pytest.mark.parametrize("name", TABLE)
def test_no_refusal_of_something_joined_names_what_is_refused(name: str, joined: str) -> None:
    told = [message for text in (name, f"{name}{TABLE[name].numbers}") if (message := refusal(f"{text}+{joined}"))]
    named = [near for message in told if "; write " in message for near in suggested(message)]
    assert all("; write " not in message or suggested(message) for message in told), told
    assert [near for near in named if not accepted(near)] == [], told
