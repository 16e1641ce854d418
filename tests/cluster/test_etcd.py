"""etcd as the store: lost answers, late questions, servers that go and come, passwords and TLS."""

from __future__ import annotations

import datetime
import ipaddress
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.etcd import EtcdStore
from paceline.cluster.gateway import TOTAL_S, Address, Gateway
from paceline.cluster.store import FencedError, StoreGone, StoreUnreachable, TermTaken, open_store
from paceline.errors import ResourceError, UsageError
from paceline.wires.view import View
from tests.cluster.lossy import Fate, Lossy
from tests.etcd import Etcd, binary

_QUICK = ("--heartbeat-interval", "50", "--election-timeout", "500")
_DEADLINE_S = 30.0


@pytest.fixture
def lossy(etcd: Etcd, patient: None) -> Iterator[Lossy]:
    with Lossy(etcd.servers[0].endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(lossy: Lossy) -> Iterator[EtcdStore]:
    """Behind a proxy, on a connection that was used before."""
    with closing(EtcdStore.create(f"etcd://{lossy.endpoint}", "r")) as store:
        yield store


_LOST: list[Fate] = ["lose the question", "lose the answer"]


@pytest.mark.parametrize("fate", _LOST)
def test_a_lost_answer_changes_nothing(lossy: Lossy, store: EtcdStore, fate: Fate) -> None:
    lossy.fates.append(fate)
    assert store.lead(0, pid=7, address="a:1") == 1
    for term in (1, 2):
        lossy.fates.append(fate)
        store.write(1, b"state %d" % term, [View(term, (0, term))])
    lossy.fates.append(fate)
    store.beat(1)
    lossy.fates.append(fate)
    record = store.read()
    assert (record.fence, record.pid, record.address, record.state) == (1, 7, "a:1", b"state 2")
    assert store.views() == [View(1, (0, 1)), View(2, (0, 2))]
    lossy.fates.append(fate)
    store.remove(1)
    with pytest.raises(StoreGone):
        store.read()
    assert not lossy.fates


@pytest.mark.parametrize("fate", _LOST)
def test_what_nobody_answered_can_be_asked_again(lossy: Lossy, store: EtcdStore, fate: Fate) -> None:
    def twice(what: Callable[[], object]) -> None:
        lossy.fates.extend([fate, fate])
        with pytest.raises(StoreUnreachable):
            what()
        what()

    twice(lambda: store.lead(0, pid=7))
    twice(lambda: store.write(1, b"one", [View(1, (0,)), View(2, (1,))]))
    twice(lambda: store.beat(1))
    assert store.read().state == b"one" and [view.term for view in store.views()] == [1, 2]
    lossy.fates.extend([fate, fate])
    with pytest.raises(StoreUnreachable):
        store.write(1, b"two", [View(3, (0,))])
    if fate == "lose the answer":
        with pytest.raises(TermTaken):
            store.write(1, b"other", [View(3, (1,))])
        assert store.read().state == b"two"
    store.write(1, b"three", [View(4, (1,))])
    assert store.read().state == b"three"


def test_one_who_asks_again_after_another_has_taken_over_is_fenced(lossy: Lossy, store: EtcdStore, etcd: Etcd) -> None:
    with closing(open_store(etcd.address, store.run)) as other:
        lossy.fates.extend(["lose the answer"] * 2)
        with pytest.raises(StoreUnreachable):
            store.lead(0, pid=7)
        assert other.lead(1, pid=7) == 2
        with pytest.raises(FencedError):
            store.lead(0, pid=7)
        assert other.read().fence == 2


def test_asking_again_for_the_lead_is_a_sign_of_life(lossy: Lossy, store: EtcdStore) -> None:
    """Else a candidate, which saw the first asking a lease ago, takes over under a leader that has just begun."""
    lossy.fates.extend(["lose the answer"] * 2)
    with pytest.raises(StoreUnreachable):
        store.lead(0, pid=7)
    before = store.read()
    assert store.lead(0, pid=7) == before.fence == 1
    assert store.read().beat > before.beat


def test_a_write_that_is_heard_late_changes_nothing(lossy: Lossy, store: EtcdStore) -> None:
    """A server may be frozen with a write in its hands, which was then written, and written over, elsewhere."""
    store.lead(0, pid=7)
    lossy.fates.append("hold")
    store.write(1, b"one")
    store.write(1, b"two")
    (late,) = lossy.release()
    assert b'"succeeded":true' not in late and store.read().state == b"two"


def test_a_write_that_nobody_answered_and_that_is_heard_late_changes_nothing(lossy: Lossy, store: EtcdStore) -> None:
    store.lead(0, pid=7)
    lossy.fates.extend(["hold", "hold"])
    with pytest.raises(StoreUnreachable):
        store.write(1, b"one", [View(1, (0,))])
    store.write(1, b"two", [View(1, (0,))])
    late = lossy.release()
    assert len(late) == 2 and not any(b'"succeeded":true' in answer for answer in late)
    assert store.read().state == b"two"


def test_no_server_at_all_is_said_at_once() -> None:
    with pytest.raises(StoreUnreachable, match=r"127.0.0.1:1: .*refused; 127.0.0.1:2: .*refused"):
        EtcdStore.create("etcd://127.0.0.1:1,127.0.0.1:2", "r")
    with pytest.raises(StoreUnreachable, match="no-such-host"):
        EtcdStore.create("etcd://no-such-host.invalid", "r")


def test_a_server_killed_and_started_again(patient: None) -> None:
    with Etcd() as etcd, closing(EtcdStore.create(etcd.address, "r")) as store:
        store.lead(0, pid=7)
        store.write(1, b"one", [View(1, (0,))])
        etcd.servers[0].stop()
        for what in (store.read, lambda: store.beat(1), lambda: store.write(1, b"two")):
            with pytest.raises(StoreUnreachable):
                what()
        etcd.start(etcd.servers[0])
        assert store.read().state == b"one"
        store.write(1, b"three")
        etcd.servers[0].stop()
        etcd.start(etcd.servers[0])
        store.write(1, b"four", [View(2, (0,))])  # on a connection that has died meanwhile
        assert store.read().state == b"four" and [view.term for view in store.views()] == [1, 2]


def _until_answered(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        began = time.monotonic()
        try:
            return what()
        except StoreUnreachable:
            assert time.monotonic() - began < TOTAL_S + 1 and time.monotonic() < deadline


def test_three_servers_of_which_one_is_frozen() -> None:
    """Any one, their leader too. Two frozen ones leave nobody who may answer, not even with what is old."""
    with Etcd(3, flags=_QUICK) as etcd, closing(EtcdStore.create(etcd.address, "r")) as store:
        store.lead(0, pid=7)
        first = etcd.leader()
        for term, server in enumerate([first, *(other for other in etcd.servers if other is not first)], 1):
            server.freeze()
            _until_answered(lambda term=term: store.write(1, b"state %d" % term, [View(term, (0, term))]))
            assert _until_answered(store.read).state == b"state %d" % term
            server.thaw()
        assert _until_answered(store.views) == [View(term, (0, term)) for term in (1, 2, 3)]
        for server in etcd.servers[:2]:
            server.freeze()
        for what in (store.read, store.views, lambda: store.beat(1), lambda: store.write(1, b"late")):
            with pytest.raises(StoreUnreachable):
                what()
        for server in etcd.servers[:2]:
            server.thaw()
        _until_answered(lambda: store.write(1, b"last"))
        assert _until_answered(store.read).state == b"last"


def test_a_state_too_large_is_refused_in_words(store: EtcdStore) -> None:
    store.lead(0, pid=7)
    store.write(1, bytes(1_000_000))
    for size in (1_600_000, 2_500_000, 9_000_000):
        with pytest.raises(ResourceError, match="the run's state"):
            store.write(1, bytes(size))
    assert store.read().state == bytes(1_000_000)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Address.parse("etcd://a:1,b,[::1]:3/") == Address((("a", 1), ("b", 2379), ("::1", 3)))
    monkeypatch.setenv("PACELINE_ETCD_PASSWORD", "p:w")
    assert Address.parse("etcds://u%40x@a:1") == Address((("a", 1),), True, "u@x", "p:w")
    assert "p:w" not in repr(Address.parse("etcds://u@a:1"))
    monkeypatch.delenv("PACELINE_ETCD_PASSWORD")
    for wrong in ("etcd://", "etcd://a:b", "etcd://a:99999", "etcd://a,,b", "http://a:1", "a:1", "etcd://a:1/x"):
        with pytest.raises(UsageError, match="write etcd://HOST:2379"):
            Address.parse(wrong)
    with pytest.raises(UsageError) as refused:
        Address.parse("etcd://user:secret@host:b")
    assert "secret" not in str(refused.value)


def test_something_else_that_listens_is_no_etcd(etcd: Etcd, patient: None) -> None:
    with (
        closing(Gateway(Address.parse(etcd.address))) as gateway,
        pytest.raises(UsageError, match=r"no etcd of version 3\.4"),
    ):
        gateway.ask("no/such", {})


def test_without_etcd_the_tests_fail_and_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.etcd._CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="apt-get install etcd-server"):
        binary()


def test_a_password(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Etcd() as etcd:
        with closing(Gateway(Address.parse(etcd.address))) as root:
            root.ask("auth/user/add", {"name": "root", "password": "p:w"})
            root.ask("auth/role/add", {"name": "root"})
            root.ask("auth/user/grant", {"user": "root", "role": "root"})
            root.ask("auth/user/add", {"name": "guest", "password": "x"})
            root.ask("auth/enable", {})
        endpoint = etcd.servers[0].endpoint
        for user, password in (("", ""), ("root@", "wrong"), ("guest@", "x")):
            monkeypatch.setenv("PACELINE_ETCD_PASSWORD", password)
            with pytest.raises(UsageError, match="refuses"):
                EtcdStore.create(f"etcd://{user}{endpoint}", "r")
        with pytest.raises(UsageError, match="PACELINE_ETCD_PASSWORD"):
            EtcdStore.create(f"etcd://root:p%3Aw@{endpoint}", "r")
        monkeypatch.setenv("PACELINE_ETCD_PASSWORD", "p:w")
        with closing(EtcdStore.create(f"etcd://root@{endpoint}", "r")) as store:
            store.lead(0, pid=7)
            store._gateway._token = "one.that.has.run.out"
            store.write(1, b"x")
            assert store.read().state == b"x"


def test_tls(patient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = _certificate(tmp_path)
    with Etcd(flags=["--cert-file", str(certificate), "--key-file", str(key)]) as etcd:
        assert etcd.address.startswith("etcds://")
        with pytest.raises(StoreUnreachable, match=r"self-signed certificate.*PACELINE_ETCD_CA"):
            EtcdStore.create(etcd.address, "r")
        monkeypatch.setenv("PACELINE_ETCD_CA", str(certificate))
        with closing(EtcdStore.create(etcd.address, "r")) as store:
            assert store.lead(0, pid=7) == 1
        with pytest.raises(StoreUnreachable, match="localhost"):
            EtcdStore.create(etcd.address.replace("127.0.0.1", "localhost"), "r")
        monkeypatch.setenv("PACELINE_ETCD_CA", str(tmp_path / "none.pem"))
        with pytest.raises(UsageError, match=r"PACELINE_ETCD_CA.*none\.pem"):
            EtcdStore.create(etcd.address, "r")


def _certificate(folder: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself; and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "etcd")])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(here, critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "etcd.pem", folder / "etcd.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return files
