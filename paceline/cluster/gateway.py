"""Questions to etcd, in the JSON of its v3 gateway: several endpoints, one connection that is kept.

Whoever gets no answer cannot know whether the question was heard. So a question is asked again, at the next
endpoint, and must be one that may be asked twice (`etcd.py` sees to that). No torch in here.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from paceline.cluster.store import StoreUnreachable
from paceline.errors import ResourceError, UsageError

TRY_S = 0.5
"""How long one endpoint may take."""
TOTAL_S = 1.5
"""How long they may take together."""

_PORT = 2379
_MOST = 4 << 20
"""Bytes of one question. etcd takes 1.5 MiB unless it is told otherwise; far more cannot be read within TRY_S."""
_CA = "PACELINE_ETCD_CA"
_TOO_LARGE = ("request is too large", "larger than max")
_TOKEN_IS_OLD = ("invalid auth token", "revision of auth store is old")
_FORM = "write etcd://HOST:2379, or etcd://HOST:2379,HOST:2379,HOST:2379 (etcds:// for TLS; etcd://USER@HOST, and the password in PACELINE_ETCD_PASSWORD)"


class _NoAnswer(Exception):
    """An endpoint that answers, but not the question: it has no leader, no quorum, no space."""


class _OldToken(Exception):
    """The proof of the password has run out."""


@dataclass(frozen=True)
class Address:
    """Where etcd is, as the user writes it."""

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)

    @staticmethod
    def parse(text: str) -> Address:
        scheme, _, rest = text.partition("://")
        login, _, hosts = rest.rstrip("/").rpartition("@")
        user, _, password = login.partition(":")
        if password:  # the address is written into the run's files, and a command line can be read by everyone
            raise UsageError(f"a password does not belong into the store's address: {_FORM}")
        try:
            endpoints = tuple(map(_endpoint, hosts.split(",")))
        except ValueError as error:
            raise UsageError(f"the store's address {scheme}://…{hosts} cannot be read ({error}): {_FORM}") from None
        if scheme not in ("etcd", "etcds"):
            raise UsageError(f"{scheme!r} is no store: {_FORM}")
        return Address(endpoints, scheme == "etcds", unquote(user), os.environ.get("PACELINE_ETCD_PASSWORD", ""))


def _endpoint(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return parts.hostname, parts.port or _PORT


@dataclass(frozen=True)
class _Endpoint:
    host: str
    place: tuple[Any, ...]
    """As the kernel wants it. Names are looked up once: a look-up knows no deadline, least of all on a machine
    that is cut off."""

    def connect(self, timeout_s: float, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.place[1])
        connection.auto_open = 0
        sock = socket.create_connection(self.place[:2], timeout_s)
        connection.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            try:
                connection.sock = tls.wrap_socket(sock, server_hostname=self.host)
            except BaseException:
                sock.close()
                raise
        return connection

    def __str__(self) -> str:
        return f"{self.host}:{self.place[1]}"


class Gateway:
    """Questions and answers, one at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._tls = _authorities() if address.tls else None
        self._endpoints = deque(_look_up(address))
        """The one that answered last comes first."""
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""

    def ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """`what` is a path behind /v3/. StoreUnreachable: nobody answered, and what was asked may be done or not."""
        deadline, said = time.monotonic() + TOTAL_S, []
        raw = msgspec.json.encode(body)
        if len(raw) > _MOST:
            raise ResourceError(f"the run's state has grown too large for etcd: {len(raw)} bytes, of at most {_MOST}")
        for _ in range(len(self._endpoints)):
            try:
                return self._ask_first(what, raw, deadline)
            except (OSError, http.client.HTTPException, msgspec.DecodeError, _NoAnswer) as error:
                said.append(f"{self._endpoints[0]}: {_words(error)}")
                self._drop()
                self._endpoints.rotate(-1)
            if time.monotonic() >= deadline:
                break
        raise StoreUnreachable(f"etcd does not answer ({'; '.join(said)})")

    def close(self) -> None:
        self._drop()

    def _ask_first(self, what: str, raw: bytes, deadline: float) -> dict[str, Any]:
        """Ask the first endpoint: once more if its server was started anew, or forgot that we know the password."""
        kept = self._connection is not None
        try:
            return self._post(what, raw, deadline)
        except ConnectionError:
            if not kept:
                raise
            self._drop()
        except _OldToken:
            self._token = ""
        try:
            return self._post(what, raw, deadline)
        except _OldToken as error:
            raise UsageError(f"etcd at {self._endpoints[0]} refuses the user {self._address.user!r}: {error}") from None

    def _post(self, what: str, raw: bytes, deadline: float) -> dict[str, Any]:
        if self._address.user and not self._token:
            login = {"name": self._address.user, "password": self._address.password}
            self._token = self._exchange("auth/authenticate", msgspec.json.encode(login), deadline)["token"]
        return self._exchange(what, raw, deadline)

    def _exchange(self, what: str, raw: bytes, deadline: float) -> dict[str, Any]:
        timeout_s = max(0.001, min(TRY_S, deadline - time.monotonic()))
        if self._connection is None:
            self._connection = self._endpoints[0].connect(timeout_s, self._tls)
        self._connection.sock.settimeout(timeout_s)
        headers = {"Authorization": self._token} if self._token else {}
        self._connection.request("POST", f"/v3/{what}", raw, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            self._refuse(response.status, answer, len(raw))
        return msgspec.json.decode(answer, type=dict[str, Any])

    def _refuse(self, status: int, answer: bytes, size: int) -> None:
        """Say what an answer means that is none: another endpoint may know better, or the user must."""
        try:
            words = str(msgspec.json.decode(answer, type=dict[str, Any])["error"])
        except (msgspec.DecodeError, KeyError):
            words = f"HTTP {status}"
        if any(part in words for part in _TOO_LARGE):
            raise ResourceError(
                f"etcd does not take the run's state, {size} bytes with its envelope ({words}): "
                "start the etcd servers with a higher --max-request-bytes"
            )
        if any(part in words for part in _TOKEN_IS_OLD):
            raise _OldToken(words)
        if status in (400, 401, 403, 412):
            raise UsageError(f"etcd at {self._endpoints[0]} refuses: {words}")
        if status in (404, 501):
            raise UsageError(f"{self._endpoints[0]} is no etcd of version 3.4 or newer ({words})")
        raise _NoAnswer(words)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _authorities() -> ssl.SSLContext:
    """Whose signature on a server's certificate counts: the system's choice, or the user's."""
    try:
        return ssl.create_default_context(cafile=os.environ.get(_CA))
    except OSError as error:
        raise UsageError(f"{_CA} is {os.environ.get(_CA)}, which is no file of certificates: {error}") from None


def _look_up(address: Address) -> list[_Endpoint]:
    found, said = [], []
    for host, port in address.endpoints:
        try:
            for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found.append(_Endpoint(host, place))
        except OSError as error:
            said.append(f"{host}: {error.strerror}")
    if not found:
        raise StoreUnreachable(f"no etcd server's name is known ({'; '.join(said)})")
    return found


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message} ({_CA} names the file of the authority that signed its certificate)"
    return str(error) or type(error).__name__
