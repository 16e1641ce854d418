"""How `ps+rows:s` is written, with what it can be joined, and what stands in the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.strategies import TABLE, create, find
from paceline.strategies.ps import ParameterServers


@given(st.sampled_from(["ps", "central"]), st.integers(0, 99), st.sampled_from(["", "+int8", "+topk:0.01"]))
def test_a_bound_is_read_as_it_is_written_with_a_codec_too(first: str, most: int, codec: str) -> None:
    strategy = create(f"{first}+rows:{most}{codec}")
    assert isinstance(strategy, ParameterServers)
    assert strategy._behind == most and strategy.mode == f"{first}+rows:{most}"
    entry = find(f"{first}+rows:{most}{codec}")
    assert entry.rows and entry.behind and entry.one == (first == "central")
    assert (entry.name == "CodedServers") == bool(codec)


@pytest.mark.parametrize("text", ["ps", "central", "ps+int8"])
def test_without_one_nothing_is_behind_and_nothing_is_counted(text: str) -> None:
    strategy = create(text)
    assert isinstance(strategy, ParameterServers) and strategy._behind is None and strategy.mode == "ps"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("allreduce+rows:3", r"only ps and central train the rows .* write ps\+rows:3$"),
        ("ssp:2+rows:x", r"only ps and central train the rows .* write ps\+rows:2$"),
        ("local:20+rows:1", r"lie at their servers; write local:20$"),
        ("diloco:50+rows:2", r"write diloco:50$"),
        ("ps+backup:1+rows:2", r"only ps and central train the rows .* write ps\+rows:2$"),
        ("ps+rows:2+backup:1", r"nothing but a codec can be joined to ps\+rows; write ps\+rows:2$"),
        ("ps+rows:2+dc:0.04", r"nothing but a codec can be joined to ps\+rows; write ps\+rows:2$"),
        ("central+rows:2+rows:3", r"nothing but a codec can be joined to central\+rows; write central\+rows:3$"),
        ("ps+rows", r"write ps\+rows:2, for rows that are read at most 2 updates behind$"),
        ("ps+rows:²", r"write ps\+rows:2, for"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason_and_the_nearest_that_can(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(text)


@pytest.mark.parametrize("name", [name for name in TABLE if f"{name}+rows" not in TABLE])
def test_whatever_is_named_as_the_nearest_can_be(name: str) -> None:
    """Who trains apart is not told to train at servers."""
    entry = TABLE[name]
    text = f"{name}{entry.numbers}"
    with pytest.raises(UsageError) as refused:
        find(f"{text}+rows:3")
    near = str(refused.value).rpartition("write ")[2]
    assert near == text if entry.apart or name == "federated" else find(near).rows
