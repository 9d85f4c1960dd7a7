"""The comments of the protos are the contract: nothing is without one, and every call lists its errors."""

import re
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from kvpool.core.errors import ERRORS_BY_REASON
from tools.proto_descriptors import Place, comments, compiled

CODES = {code.name for code in grpc.StatusCode} - {"OK"}


@pytest.fixture(scope="module")
def files() -> list[FileDescriptorProto]:
    return compiled()


def message_parts(message: DescriptorProto, name: str, place: Place) -> Iterator[tuple[str, Place]]:
    yield name, place
    for number, field in enumerate(message.field):
        yield f"{name}.{field.name}", (*place, 2, number)
    for number, nested in enumerate(message.nested_type):
        yield from message_parts(nested, f"{name}.{nested.name}", (*place, 3, number))


def parts(file: FileDescriptorProto) -> Iterator[tuple[str, Place]]:
    """Everything that a comment has to explain."""
    for number, message in enumerate(file.message_type):
        yield from message_parts(message, message.name, (4, number))
    for number, enum in enumerate(file.enum_type):
        yield enum.name, (5, number)
        for value_number, value in enumerate(enum.value):
            yield value.name, (5, number, 2, value_number)
    for number, service in enumerate(file.service):
        yield service.name, (6, number)
        for method_number, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (6, number, 2, method_number)


@pytest.mark.slow
def test_every_part_has_a_comment(files: list[FileDescriptorProto]) -> None:
    silent = [name for file in files for name, place in parts(file) if not comments(file).get(place)]
    assert not silent


def test_every_call_lists_its_errors(files: list[FileDescriptorProto]) -> None:
    """One a line at its comment's end, by status code; or in the words that there are none but those of the service."""
    for file in files:
        said = comments(file)
        for number, service in enumerate(file.service):
            assert "every call may return besides its own" in said[6, number], service.name
            for method_number, method in enumerate(service.method):
                name = f"{service.name}.{method.name}"
                last = said[6, number, 2, method_number].split("\n\n")[-1]
                if last == "No errors of its own.":
                    continue
                head, *items = re.split(r"\n- ", last)
                assert head == "Errors:", name
                assert items, name
                for item in items:
                    assert item.split()[0].strip(",:") in CODES, f"{name}: {item}"


def test_every_reason_named_is_one(files: list[FileDescriptorProto]) -> None:
    for file in files:
        said = comments(file)
        for number, service in enumerate(file.service):
            for place in ((6, number), *((6, number, 2, one) for one in range(len(service.method)))):
                in_brackets = " ".join(re.findall(r"\(([^)]*)\)", said[place]))
                reasons = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", in_brackets)) - CODES
                assert reasons <= set(ERRORS_BY_REASON), f"{service.name}: {reasons - set(ERRORS_BY_REASON)}"
