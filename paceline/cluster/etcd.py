"""The store of a run on several machines: etcd, the real server (3.4 or newer).

A run has the keys below `/paceline/<run>/`:

    fence          the leader's number
    leader         its process, its address, and the name of the store that it opened
    beat           put again at every sign of life: its version is the count of them
    turn           the name of the last write
    state          what the leader has decided
    views/<term>   created once, never changed

Every change is one transaction that compares the fence. An answer can be lost, and a question can lie in a
frozen server and be heard long after it was asked again elsewhere. So each leader and each write has a name of
its own: when the comparison fails, the name that is there says whether an earlier asking did it. And a write
follows the one before it by name, so that one heard too late changes nothing. After StoreUnreachable the same
can be asked again, by the same store. No torch in here.
"""

from __future__ import annotations

import secrets
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.cluster.gateway import Address, Gateway
from paceline.cluster.store import FencedError, Record, Store, StoreGone, TermTaken
from paceline.wires.view import View

Part = dict[str, Any]
"""A piece of a transaction, as etcd's JSON has it."""


class _Leader(msgspec.Struct):
    pid: int
    address: str
    store: str


class _View(msgspec.Struct):
    fence: int
    members: tuple[int, ...]


class _Found(msgspec.Struct):
    """A key as etcd tells it: 64-bit numbers are strings, and what is empty is left out."""

    key: str
    value: str = ""
    version: str = "0"
    mod_revision: str = "0"

    @property
    def bytes(self) -> bytes:
        return b64decode(self.value)


class EtcdStore(Store):
    def __init__(self, address: str, run: str) -> None:
        self.run = run
        self._gateway = Gateway(Address.parse(address))
        self._prefix = f"/paceline/{run}/"
        self._name = secrets.token_hex(8)
        self._turn = b""
        self._state, self._state_revision = b"", 0
        """As last read: it is not sent again while it stays the same."""

    @classmethod
    def create(cls, address: str, run: str) -> EtcdStore:
        """Under a name that no other run has, nor an earlier life of this one."""
        store = cls(address, f"{run}-{secrets.token_hex(8)}")
        nobody = msgspec.json.encode(_Leader(0, "", ""))
        parts = [store._put("leader", nobody), *(store._put(name, b"") for name in ("beat", "turn", "state"))]
        try:
            # Where the fence is there already, an earlier asking was heard.
            store._change([store._is_absent("fence")], [store._put("fence", b"0"), *parts], [])
        except BaseException:
            store.close()
            raise
        return store

    def read(self) -> Record:
        known = self._compare("state", "MOD", mod_revision=str(self._state_revision))
        small = self._get("beat", to="state")  # beat, fence, leader
        _, found = self._change([known], [small], [small, self._get("state")])
        if "fence" not in found:
            self._raise_fenced(0, found)
        if "state" in found:
            self._state, self._state_revision = found["state"].bytes, int(found["state"].mod_revision)
        leader = msgspec.json.decode(found["leader"].bytes, type=_Leader)
        return Record(int(found["fence"].bytes), leader.pid, leader.address, self._state, int(found["beat"].version))

    def lead(self, after: int, pid: int, address: str = "") -> int:
        leader = msgspec.json.encode(_Leader(pid, address, self._name))
        mine = [self._put("fence", b"%d" % (after + 1)), self._put("leader", leader), self._get("turn")]
        there = [self._get(name) for name in ("fence", "leader", "turn")]
        done, found = self._change([self._has_fence(after)], mine, there)
        if not done:
            if _bytes(found, "fence") != b"%d" % (after + 1) or _bytes(found, "leader") != leader:
                self._raise_fenced(after, found)
            # An earlier asking was heard, perhaps a lease ago: only a beat tells that the lead is still there.
            self.beat(after + 1)
        self._turn = found["turn"].bytes
        return after + 1

    def beat(self, fence: int) -> None:
        # Heard twice it counts twice, which says no more than once.
        done, found = self._change([self._has_fence(fence)], [self._put("beat", b"")], [self._get("fence")])
        if not done:
            self._raise_fenced(fence, found)

    def write(self, fence: int, state: bytes, views: Sequence[View] = ()) -> None:
        name = secrets.token_hex(8).encode()
        fresh = {f"views/{view.term:020}": msgspec.json.encode(_View(fence, view.members)) for view in views}
        look = [self._get("fence"), self._get("turn"), *map(self._get, fresh)]
        while True:
            allowed = [self._has_fence(fence), self._compare("turn", "VALUE", value=_text(self._turn))]
            allowed += map(self._is_absent, fresh)
            parts = {"state": state, "beat": b"", "turn": name, **fresh}
            done, found = self._change(allowed, [self._put(key, value) for key, value in parts.items()], look)
            self._turn = name if done else _bytes(found, "turn")
            if self._turn == name:
                return
            if _bytes(found, "fence") != b"%d" % fence:
                self._raise_fenced(fence, found)
            # Else a write whose answer was lost has been heard: this one comes after it, and what both say stands.
            for key in set(fresh) & set(found):
                if found[key].bytes != fresh.pop(key):
                    raise TermTaken(f"of the terms {[view.term for view in views]} one has its view already")

    def views(self) -> list[View]:
        answer = self._gateway.ask("kv/range", self._range("views/", to="views0"))
        found = {int(b64decode(kv.key)[-20:]): kv.bytes for kv in msgspec.convert(answer.get("kvs", []), list[_Found])}
        return [View(term, msgspec.json.decode(raw, type=_View).members) for term, raw in found.items()]

    def close(self) -> None:
        self._gateway.close()

    def remove(self, fence: int) -> None:
        everything = {"request_delete_range": self._range("", to="\x7f")}
        done, found = self._change([self._has_fence(fence)], [everything], [self._get("fence")])
        if not done and "fence" in found:  # if it is not there, an earlier asking was heard
            self._raise_fenced(fence, found)
        self.close()

    def _change(self, when: list[Part], then: list[Part], otherwise: list[Part]) -> tuple[bool, dict[str, _Found]]:
        """One transaction: whether it was as compared, and what was read."""
        answer = self._gateway.ask("kv/txn", {"compare": when, "success": then, "failure": otherwise})
        ranges = [response.get("response_range", {}) for response in answer.get("responses", [])]
        found = msgspec.convert([kv for one in ranges for kv in one.get("kvs", [])], list[_Found])
        return answer.get("succeeded", False), {b64decode(kv.key).decode()[len(self._prefix) :]: kv for kv in found}

    def _raise_fenced(self, fence: int, found: dict[str, _Found]) -> None:
        if "fence" not in found:
            raise StoreGone(f"{self.run} is gone: the run is over")
        raise FencedError(f"fence {int(found['fence'].bytes)} leads the run; {fence} is over")

    # parts of a transaction

    def _key(self, name: str) -> str:
        return _text((self._prefix + name).encode())

    def _range(self, name: str, to: str) -> Part:
        return {"key": self._key(name), "range_end": self._key(to)}

    def _get(self, name: str, to: str = "") -> Part:
        return {"request_range": self._range(name, to) if to else {"key": self._key(name)}}

    def _put(self, name: str, value: bytes) -> Part:
        return {"request_put": {"key": self._key(name), "value": _text(value)}}

    def _compare(self, name: str, target: str, **value: str) -> Part:
        return {"key": self._key(name), "target": target, "result": "EQUAL", **value}

    def _has_fence(self, fence: int) -> Part:
        return self._compare("fence", "VALUE", value=_text(b"%d" % fence))

    def _is_absent(self, name: str) -> Part:
        return self._compare(name, "CREATE", create_revision="0")


def _bytes(found: dict[str, _Found], key: str) -> bytes:
    return found[key].bytes if key in found else b""


def _text(value: bytes) -> str:
    return b64encode(value).decode()
