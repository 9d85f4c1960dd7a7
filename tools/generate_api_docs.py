"""Write docs/api from the comments of proto/kvpool/v1, or with --check say whether it is current.

Run it as `make proto`; `make check` runs it with --check. Everything on these pages is said in the protos, and in
kvpool.core.errors: nothing there is written by hand.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)

from kvpool.core.errors import ERRORS_BY_REASON
from kvpool.wire.status import STATUS_BY_ERROR
from tools.proto_descriptors import SYNTAX, Place, comments, compiled

PAGES = Path(__file__).resolve().parent.parent / "docs" / "api"
PACKAGE_PREFIX = ".kvpool.v1."
WRITTEN = "<!-- Written by tools/generate_api_docs.py from {source}: edit the comments there, then `make proto`. -->"
OVERVIEW = """\
# The API

Four gRPC services of three processes, in one package, `kvpool.v1`. Health and reflection are served beside them, so
that `grpcurl` and Kubernetes probes work as they are. [proto/README.md](../../proto/README.md) says how the API may
change and why it is as it is; [docs/python-client.md](../python-client.md) shows the client that engines use.
"""
KINDS = {
    (False, False): "one request, one answer",
    (False, True): "one request, a stream of answers",
    (True, False): "a stream of requests, one answer",
    (True, True): "streams both ways",
}

# Set in code type wherever a comment names one.
NAMES = {code.name for code in grpc.StatusCode} | set(ERRORS_BY_REASON)


class Page:
    """One proto file as a page."""

    def __init__(self, file: FileDescriptorProto, pages: Mapping[str, str]) -> None:
        """pages: the page of each type, by its full name."""
        self._file = file
        self._pages = pages
        self._said = comments(file)
        self.name = page_name(file)

    def lines(self) -> Iterator[str]:
        source = f"proto/{self._file.name}"
        yield from (f"# API: {self.name}", "", WRITTEN.format(source=source), "")
        yield from (*_prose(self._said[SYNTAX]), f"Source: [{source}](../../{source}). [Overview](README.md)", "")
        for number, service in enumerate(self._file.service):
            yield from (f"## {service.name}", "", *_prose(self._said[6, number]))
            yield from self._summary(number)
            for at, method in enumerate(service.method):
                yield from self._call(service.name, method, (6, number, 2, at))
        yield from ("## Messages", "")
        for number, message in enumerate(self._file.message_type):
            yield from self._message(message, (4, number))
        if self._file.enum_type:
            yield from ("## Enumerations", "")
        for number, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (5, number))

    def _summary(self, number: int) -> Iterator[str]:
        service = self._file.service[number]
        yield from ("| call | what it does |", "|---|---|")
        for at, method in enumerate(service.method):
            link = f"[{method.name}](#{_anchor(f'{service.name}.{method.name}')})"
            yield f"| {link} | {_cell(_first_sentence(self._said[6, number, 2, at]))} |"
        yield ""

    def _call(self, service: str, method: MethodDescriptorProto, place: Place) -> Iterator[str]:
        request, answer = self._linked(method.input_type), self._linked(method.output_type)
        if method.client_streaming:
            request = f"stream of {request}"
        if method.server_streaming:
            answer = f"stream of {answer}"
        kind = KINDS[method.client_streaming, method.server_streaming]
        yield from (f"### {service}.{method.name}", "", f"{request} → {answer} ({kind})", "")
        yield from _prose(self._said[place])

    def _message(self, message: DescriptorProto, place: Place) -> Iterator[str]:
        yield from (f"### {message.name}", "", *_prose(self._said[place]))
        for at, choice in enumerate(message.oneof_decl):
            names = [f"`{field.name}`" for field in message.field if _in_choice(field) and field.oneof_index == at]
            yield from (f"`{choice.name}` is at most one of {', '.join(names)}.", "")
        if not message.field:
            yield from ("It has no fields.", "")
            return
        yield from ("| field | type | meaning |", "|---|---|---|")
        for at, field in enumerate(message.field):
            yield f"| `{field.name}` = {field.number} | {self._type(field)} | {_cell(self._said[(*place, 2, at)])} |"
        yield ""

    def _enum(self, enum: EnumDescriptorProto, place: Place) -> Iterator[str]:
        yield from (f"### {enum.name}", "", *_prose(self._said[place]), "| value | meaning |", "|---|---|")
        for at, value in enumerate(enum.value):
            yield f"| `{value.name}` = {value.number} | {_cell(self._said[(*place, 2, at)])} |"
        yield ""

    def _type(self, field: FieldDescriptorProto) -> str:
        scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        name = self._linked(field.type_name) if field.type_name else f"`{scalar}`"
        return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name

    def _linked(self, full_name: str) -> str:
        name = full_name.removeprefix(PACKAGE_PREFIX)
        page = self._pages[full_name]
        return f"[{name}]({'' if page == self.name else f'{page}.md'}#{_anchor(name)})"


def page_name(file: FileDescriptorProto) -> str:
    return Path(file.name).stem


def types_of(files: list[FileDescriptorProto]) -> dict[str, str]:
    """The page of each message and enumeration. raises: ValueError for nested ones, which the pages do not show."""
    nested = [
        message.name for file in files for message in file.message_type if message.nested_type or message.enum_type
    ]
    if nested:
        raise ValueError(f"the pages show no types inside of messages; move those of {nested} out")
    types = [(file, message.name) for file in files for message in file.message_type]
    types += [(file, enum.name) for file in files for enum in file.enum_type]
    return {f"{PACKAGE_PREFIX}{name}": page_name(file) for file, name in types}


def overview(files: list[FileDescriptorProto]) -> Iterator[str]:
    yield from (*OVERVIEW.splitlines(), "", WRITTEN.format(source="the protos"), "")
    yield from ("| service | what it is | calls |", "|---|---|---:|")
    for file in files:
        for number, service in enumerate(file.service):
            link = f"[{service.name}]({page_name(file)}.md#{_anchor(service.name)})"
            what = _cell(_first_sentence(comments(file)[6, number]))
            yield f"| {link} | {what} | {len(service.method)} |"
    yield from ("", "The messages that they share are in [common](common.md), the errors in [errors](errors.md).", "")
    for file in files:
        if not file.service:
            yield from _prose("\n".join(comments(file)[SYNTAX].splitlines()[1:]))


def errors() -> Iterator[str]:
    yield from ("# Errors", "", WRITTEN.format(source="kvpool.core.errors"), "")
    yield "A refused call carries its reason in the trailing metadata `kvpool-reason`; what refuses one item of a batch"
    yield "is an [ItemError](common.md#itemerror) with such a reason. Reasons are stable; messages are for people."
    yield ""
    yield from ("| reason | gRPC status | what it means | what to do |", "|---|---|---|---|")
    for reason, error in sorted(ERRORS_BY_REASON.items()):
        status = next(STATUS_BY_ERROR[base] for base in error.__mro__ if base in STATUS_BY_ERROR)
        meaning = _cell((error.__doc__ or "").split("\n\n")[0])
        advice = error.advice[:1].upper() + error.advice[1:]
        yield f"| `{reason}` | `{status.name}` | {meaning} | {_cell(advice) or 'See the message'}. |"
    yield ""


def pages() -> dict[str, str]:
    """The text of each file of docs/api, by its name."""
    files = compiled()
    types = types_of(files)
    texts = {f"{page_name(file)}.md": Page(file, types).lines() for file in files}
    texts |= {"README.md": overview(files), "errors.md": errors()}
    return {name: "\n".join(lines).strip() + "\n" for name, lines in sorted(texts.items())}


def differences(wanted: Mapping[str, str], folder: Path) -> list[str]:
    """One line for each page that is missing, stale or left over, sorted."""
    present = {path.name: path.read_text() for path in folder.glob("*.md")}
    lines = [f"missing: {name}" for name in wanted.keys() - present.keys()]
    lines += [f"left over: {name}" for name in present.keys() - wanted.keys()]
    lines += [f"stale: {name}" for name in wanted.keys() & present.keys() if wanted[name] != present[name]]
    return sorted(lines)


def _prose(comment: str) -> Iterator[str]:
    if comment.strip():
        yield from (_escaped(comment.strip("\n")), "")


def _cell(comment: str) -> str:
    return _escaped(re.sub(r"\s+", " ", comment).strip()).replace("|", "\\|")


def _escaped(comment: str) -> str:
    text = re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", comment)
    return re.sub(
        r"(?<![`\w])[A-Z]+(?:_[A-Z]+)*(?![`\w])", lambda word: f"`{word[0]}`" if word[0] in NAMES else word[0], text
    )


def _first_sentence(comment: str) -> str:
    return re.split(r"(?<=[.])\s+(?=[A-Z])|\n\n", comment.strip(), maxsplit=1)[0]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _in_choice(field: FieldDescriptorProto) -> bool:
    return field.HasField("oneof_index") and not field.proto3_optional


def main() -> int:
    """Write the pages; with --check only compare, exit code 1 if they are not current."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing")
    wanted = pages()
    if parser.parse_args().check:
        lines = differences(wanted, PAGES)
        for line in lines:
            print(f"docs/api: {line}; run make proto and commit the result", file=sys.stderr)
        return int(bool(lines))
    PAGES.mkdir(exist_ok=True)
    for left_over in PAGES.glob("*.md"):
        left_over.unlink()
    for name, text in wanted.items():
        (PAGES / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
