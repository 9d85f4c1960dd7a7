"""Every domain error has a status, and comes back as itself on the other side."""

from typing import Any

import grpc
import grpc.aio
import pytest

from kvpool.core import errors
from kvpool.core.errors import ERRORS_BY_REASON, KvPoolError
from kvpool.wire.status import STATUS_BY_ERROR, error_from_reason, error_from_rpc, error_from_status, error_to_status
from tests.fixtures.patience import PATIENCE_S


def over_the_wire(error: KvPoolError) -> KvPoolError:
    """What a client makes of an error that a server raised, without a network in between."""
    code, message, metadata = error_to_status(error)
    return error_from_rpc(aio_error(code, message, metadata))


def aio_error(
    code: grpc.StatusCode, message: str = "", metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), message)


def test_table_is_complete() -> None:
    assert set(STATUS_BY_ERROR) == {KvPoolError, *ERRORS_BY_REASON.values()}
    assert grpc.StatusCode.OK not in STATUS_BY_ERROR.values()


@pytest.mark.parametrize("error_type", ERRORS_BY_REASON.values(), ids=lambda kind: kind.__name__)
def test_round_trip_keeps_type_and_message(error_type: type[KvPoolError]) -> None:
    sent = error_type("page 7 of 9 is not there")
    received = over_the_wire(sent)
    assert type(received) is error_type
    assert received.message == sent.message


def test_item_index_and_field_survive() -> None:
    received = over_the_wire(errors.InvalidRequest("hash of 15 bytes", item_index=3))
    assert isinstance(received, errors.InvalidRequest)
    assert received.item_index == 3
    assert received.message == "hash of 15 bytes"

    mismatch = over_the_wire(errors.KeyspaceMismatch("layers differ", field="layers"))
    assert isinstance(mismatch, errors.KeyspaceMismatch)
    assert mismatch.field == "layers"


def test_subclass_has_the_code_of_its_base() -> None:
    class DiskFault(errors.StoreFault):
        pass

    assert error_to_status(DiskFault("pread failed")).code is grpc.StatusCode.UNAVAILABLE


def test_unknown_reason_of_a_newer_server_stays_readable() -> None:
    newer = aio_error(grpc.StatusCode.ABORTED, "cannot do that", (("kvpool-reason", "FROM_THE_FUTURE"),))
    received = error_from_rpc(newer)
    assert type(received) is KvPoolError
    assert "FROM_THE_FUTURE" in received.message and "cannot do that" in received.message


def test_internal_error_keeps_its_incident_id() -> None:
    assert error_from_reason("INTERNAL", "internal error 0123").message == "internal error 0123"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.ServiceUnavailable),
        (grpc.StatusCode.CANCELLED, errors.ServiceUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.NotServed),
        (grpc.StatusCode.DATA_LOSS, KvPoolError),
    ],
)
def test_status_without_a_reason(code: grpc.StatusCode, expected: type[KvPoolError]) -> None:
    assert type(error_from_rpc(aio_error(code, "connection refused"))) is expected


def test_error_that_is_no_call() -> None:
    assert isinstance(error_from_rpc(grpc.RpcError("channel closed")), errors.ServiceUnavailable)


def test_malformed_item_index_is_ignored() -> None:
    metadata = (("kvpool-reason", "INVALID_REQUEST"), ("kvpool-item-index", "minus one"))
    received = error_from_rpc(aio_error(grpc.StatusCode.INVALID_ARGUMENT, "bad", metadata))
    assert isinstance(received, errors.InvalidRequest)
    assert received.item_index is None


def test_long_message_is_cut_to_fit_the_headers() -> None:
    assert len(error_to_status(errors.InvalidRequest("x" * 100_000)).message) <= 1024


async def test_real_connection_refusal_of_both_libraries() -> None:
    channel: Any  # the stubs cannot tell the messages of a method without a serializer
    with grpc.insecure_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as sync_failure:
        channel.unary_unary("/t.T/M")(b"", timeout=PATIENCE_S)
    assert isinstance(error_from_rpc(sync_failure.value), errors.ServiceUnavailable)
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as aio_failure:
            await channel.unary_unary("/t.T/M")(b"", timeout=PATIENCE_S)
    assert isinstance(error_from_rpc(aio_failure.value), errors.ServiceUnavailable)


@pytest.mark.parametrize(("address", "explained"), [("ipv4:10.0.0.1:7100", True), ("unix:/run/kvpool/x.sock", False)])
def test_a_connection_that_was_closed_at_once_may_be_for_tls_but_not_on_a_unix_socket(
    address: str, explained: bool
) -> None:
    said = f"failed to connect to all addresses; last error: UNAVAILABLE: {address}: Socket closed"
    error = error_from_status(grpc.StatusCode.UNAVAILABLE, said, ())
    assert isinstance(error, errors.ServiceUnavailable) and said in error.message
    assert ("tls_ca_file" in error.message) is explained
