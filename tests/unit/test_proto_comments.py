"""The comments of the protos are the contract: nothing is without one, and every call lists its errors."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from kvpool.core.errors import ERRORS_BY_REASON

PROTO_ROOT = Path(__file__).parents[2] / "proto"
CODES = {code.name for code in grpc.StatusCode} - {"OK"}
Place = tuple[int, ...]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    output = tmp_path_factory.mktemp("proto") / "descriptors"
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("kvpool/v1/*.proto"))
    options = [f"-I{PROTO_ROOT}", "--include_source_info", f"--descriptor_set_out={output}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *protos], check=True, timeout=60)
    return list(FileDescriptorSet.FromString(output.read_bytes()).file)


def comments(file: FileDescriptorProto) -> dict[Place, str]:
    """Leading comment by the place's path, see descriptor.proto."""
    return {tuple(at.path): at.leading_comments.strip() for at in file.source_code_info.location}


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


def test_every_part_has_a_comment(files: list[FileDescriptorProto]) -> None:
    silent = [name for file in files for name, place in parts(file) if not comments(file).get(place)]
    assert not silent


def test_every_call_lists_its_errors(files: list[FileDescriptorProto]) -> None:
    """By status code, or in the words that there are none but those of the service."""
    for file in files:
        said = comments(file)
        for number, service in enumerate(file.service):
            assert "every call may return besides its own" in said[6, number], service.name
            for method_number, method in enumerate(service.method):
                comment = said[6, number, 2, method_number]
                named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", comment)) & CODES
                assert bool(named) != ("No errors of its own" in comment), f"{service.name}.{method.name}"


def test_every_reason_named_is_one(files: list[FileDescriptorProto]) -> None:
    for file in files:
        said = comments(file)
        for number, service in enumerate(file.service):
            for place in ((6, number), *((6, number, 2, one) for one in range(len(service.method)))):
                in_brackets = " ".join(re.findall(r"\(([^)]*)\)", said[place]))
                reasons = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", in_brackets)) - CODES
                assert reasons <= set(ERRORS_BY_REASON), f"{service.name}: {reasons - set(ERRORS_BY_REASON)}"
