"""gRPC channels, and streamed answers whose errors are kvpool's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from kvpool.client.config import ClientConfig
from kvpool.core.errors import InvalidRequest, KvPoolError, ServiceUnavailable
from kvpool.wire.status import error_from_rpc
from kvpool.wire.tls_errors import is_unix, narrowed

if TYPE_CHECKING:
    from kvpool.wire.tls import TlsCredentials

CallT = TypeVar("CallT", bound=grpc.aio.Call)


def open_channel(endpoint: str, config: ClientConfig) -> grpc.aio.Channel:
    """A channel to "host:port" or "unix:/path"; it connects when first used. Call on the loop that will use it."""
    if not endpoint:
        raise InvalidRequest("an endpoint is empty; give host:port or unix:/path")
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.max_send_message_length", config.message_bytes_max),
        ("grpc.keepalive_time_ms", round(config.keepalive_time_s * 1e3)),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Back soon after a restart: gRPC's own pauses grow to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # What this option really bounds is one attempt, handshakes included: too little for a peer that stands still
        # for a moment, or TLS to another region; too much for a host that is gone and comes back.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # Channels that shared a connection would also share its pauses and its flow control window.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if config.tls is None or is_unix(endpoint):
        return grpc.aio.insecure_channel(endpoint, options=options)
    _, credentials = config.tls.channel_credentials()
    return grpc.aio.secure_channel(endpoint, credentials, options=[*options, *config.tls.channel_options()])


@contextmanager
def streamed(open_call: Callable[[], CallT], tls: TlsCredentials | None) -> Iterator[CallT]:
    """A call that streams answers, for a `with` block that reads them: its errors are kvpool's own, and it is cancelled
    when the block ends. tls: of the call's channel."""
    call: CallT | None = None
    try:
        call = open_call()
        yield call
    except grpc.RpcError as error:
        raise narrowed(error_from_rpc(error), tls) from error
    except grpc.aio.UsageError as error:
        raise closed_channel_error(error) from error
    finally:
        if call is not None:
            call.cancel()


def closed_channel_error(error: Exception) -> KvPoolError:
    """What a call on a closed channel means to the caller."""
    return ServiceUnavailable(f"the channel was closed ({error}); open a new client")
