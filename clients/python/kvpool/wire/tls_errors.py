"""What gRPC says of a connection that TLS has failed, in words that say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool.core.errors import KvPoolError

if TYPE_CHECKING:
    from kvpool.wire.tls import TlsCredentials

UNIX_SCHEMES: Final = ("unix:", "unix-abstract:")

_PLAIN_SERVER: Final = (
    "the server answered in the clear: it has no TLS, or this is another service's port; "
    "give it tls_cert_file, tls_key_file and tls_ca_file, or take tls_ca_file from this client"
)
EXPECTS_TLS: Final = "it expects TLS and this client has none (set tls_ca_file)"
DEMANDS_CERTIFICATE: Final = (
    "it demands a client certificate and this client has none (set tls_cert_file and tls_key_file)"
)
REFUSES_CERTIFICATE: Final = (
    "it refuses this client's certificate (it has expired, or comes from an authority that is not in the server's "
    "tls_ca_file; the server's log has the line 'Handshake failed' with the cause)"
)
# A server gives a refused client no reason; the client's own state leaves one possible cause.
ANY_CAUSE: Final = f"either {EXPECTS_TLS}, or {DEMANDS_CERTIFICATE}, or {REFUSES_CERTIFICATE}"
_CLOSED: Final = f"the server closed the connection before a word of gRPC: {ANY_CAUSE}, or it was just stopping"

# In the words of BoringSSL and gRPC; the first that occurs counts.
_EXPLANATIONS: Final = (
    ("certificate has expired", "the server's certificate has expired: renew it, the server takes it up by itself"),
    ("certificate is not yet valid", "the server's certificate is not valid yet: look at the clocks of both hosts"),
    (
        "Hostname Verification Check failed",
        (
            "the server's certificate is not issued to the name that was connected to: issue it with that DNS name or "
            "IP address as subject alternative name, or set tls_server_name to a name that it has"
        ),
    ),
    ("unsupported certificate purpose", "the server's certificate is not for servers: issue it for serverAuth"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        (
            "the server's certificate does not come from an authority in this client's tls_ca_file: give both sides "
            "certificates of one CA, or this client the CA bundle of the server's"
        ),
    ),
    ("WRONG_VERSION_NUMBER", _PLAIN_SERVER),
    # Not the words alone: a handshake also fails when the server ends in the middle of it.
    ("TSI_PROTOCOL_FAILURE", "the TLS handshake failed"),
)
_NOT_CONNECTED: Final = "failed to connect to all addresses"
_CLOSED_EARLY: Final = ("Socket closed", "Connection reset by peer", "recvmsg:Connection reset")


def explain_tls(details: str) -> str:
    """Cause and cure, followed by gRPC's own words; empty if `details` of an UNAVAILABLE do not speak of TLS."""
    for words, explanation in _EXPLANATIONS:
        if words.lower() in details.lower():
            return f"{explanation} ({details})"
    return ""


def explain_closed(details: str) -> str:
    """The same for a connection that was closed before a word of gRPC, which need not be because of TLS; never of a
    unix socket, which has none.

    See `narrowed` for telling less of what it may have been.
    """
    if _NOT_CONNECTED in details and "unix:" not in details and any(words in details for words in _CLOSED_EARLY):
        return f"{_CLOSED} ({details})"
    return ""


def is_unix(endpoint: str) -> bool:
    """Whether an endpoint is a unix socket: that is guarded by the kernel's permissions and never by TLS."""
    return endpoint.startswith(UNIX_SCHEMES)


def narrowed(error: KvPoolError, tls: TlsCredentials | None) -> KvPoolError:
    """The error of a call, with the one cause of a closed connection that is left to who knows the client's side."""
    if ANY_CAUSE not in error.message:
        return error
    if tls is None:
        cause = EXPECTS_TLS
    else:
        cause = DEMANDS_CERTIFICATE if tls.files.cert_file is None else f"{REFUSES_CERTIFICATE}: {tls.files.cert_file}"
    return type(error)(error.message.replace(ANY_CAUSE, cause))
