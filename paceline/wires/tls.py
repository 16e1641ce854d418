"""TLS for connections between machines, without an authority: the handshake vouches for the certificate.

Nobody checks who signed the server's certificate. Both sides put its hash into their proofs (`handshake`):
one who sits in between must show a certificate of his own, and then the proofs do not agree. The side
that knocks needs no certificate, for it proves itself inside this channel. No torch in here.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError

_VALID = datetime.timedelta(days=3650)


class _Socket(ssl.SSLSocket):
    """Says that it would block as any other socket does. The TLS handshake is part of the first `recv`."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, buffer: object, nbytes: int | None = None, flags: int = 0) -> int:
        try:
            return super().recv_into(buffer, nbytes, flags)  # type: ignore[arg-type]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: object, flags: int = 0) -> int:
        try:
            return super().send(data, flags)  # type: ignore[arg-type]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = _Socket
    return context


def _binding(certificate: bytes) -> bytes:
    """What the proofs say of the channel: RFC 5929's tls-server-end-point."""
    return b"tls-server-end-point:" + hashlib.sha256(certificate).digest()


@dataclass(frozen=True)
class Identity:
    """A server's certificate and key, ready for a `Door`."""

    context: ssl.SSLContext
    binding: bytes

    def wrap(self, sock: socket.socket) -> socket.socket:
        return self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    @staticmethod
    def load(certificate: Path, key: Path) -> Identity:
        """Of the user's own."""
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nothing is resumed
        try:
            context.load_cert_chain(certificate, key, lambda: "")  # a locked key is refused, not asked about
            first = certificate.read_text().split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----"
            return Identity(context, _binding(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :])))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot use the certificate {certificate} with the key {key}: {error}") from None

    @staticmethod
    def make() -> Identity:
        """Of the run: a fresh key that lies in memory only."""
        certificate, key = _self_signed()
        fds = [os.memfd_create("paceline-tls"), os.memfd_create("paceline-tls")]
        try:
            for fd, pem in zip(fds, (certificate, key), strict=True):
                os.write(fd, pem)
            # ssl reads files only
            return Identity.load(*(Path(f"/proc/self/fd/{fd}") for fd in fds))
        finally:
            for fd in fds:
                os.close(fd)


def _self_signed() -> tuple[bytes, bytes]:
    """Certificate and key, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UsageError(
            "connections between machines need a certificate: pip install 'paceline[cluster]', or give one"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a run of Paceline")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def begin(sock: socket.socket) -> ssl.SSLSocket:
    """The side that knocks: the same connection under TLS, once its `do_handshake` is through."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the proofs cover it, whoever signed it
    return context.wrap_socket(sock, do_handshake_on_connect=False)


def binding_of(wrapped: ssl.SSLSocket) -> bytes:
    """What the proofs must say of this connection."""
    certificate = wrapped.getpeercert(binary_form=True)
    if certificate is None:
        raise ssl.SSLError("the other side showed no certificate")
    return _binding(certificate)


def secure(sock: socket.socket) -> tuple[socket.socket, bytes]:
    """Both at once, for one who waits."""
    wrapped = begin(sock)
    try:
        wrapped.do_handshake()
        return wrapped, binding_of(wrapped)
    except BaseException:
        wrapped.close()
        raise
