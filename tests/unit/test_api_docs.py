"""The pages of docs/api are what the protos say, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tools import generate_api_docs
from tools.generate_api_docs import differences, types_of
from tools.proto_descriptors import compiled


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return generate_api_docs.pages()


def test_the_committed_pages_are_current(pages: dict[str, str]) -> None:
    assert differences(pages, generate_api_docs.PAGES) == [], "run make proto"


def test_every_part_of_the_api_is_on_a_page(pages: dict[str, str]) -> None:
    for file in compiled():
        page = pages[f"{Path(file.name).stem}.md"]
        for service in file.service:
            assert all(f"\n### {service.name}.{method.name}\n" in page for method in service.method)
        for message in file.message_type:
            part = page.split(f"\n### {message.name}\n")[1].split("\n### ")[0]
            assert all(f"\n| `{field.name}` = {field.number} | " in part for field in message.field)
        for enum in file.enum_type:
            part = page.split(f"\n### {enum.name}\n")[1].split("\n### ")[0]
            assert all(f"\n| `{value.name}` = {value.number} | " in part for value in enum.value)


def test_links_lead_somewhere(pages: dict[str, str]) -> None:
    headings = {name: re.findall(r"^#+ (.+)$", text, re.MULTILINE) for name, text in pages.items()}
    anchors = {name: {heading.lower().replace(".", "") for heading in found} for name, found in headings.items()}
    for name, text in pages.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            page, _, anchor = target.partition("#")
            if anchor:
                assert anchor in anchors[page or name], f"{name}: {target}"
            else:
                assert (generate_api_docs.PAGES / page).exists(), f"{name}: {target}"


def test_missing_stale_and_left_over_pages_are_named(tmp_path: Path) -> None:
    (tmp_path / "old.md").write_text("")
    (tmp_path / "index.md").write_text("before\n")
    assert differences({"index.md": "after\n", "errors.md": ""}, tmp_path) == [
        "left over: old.md",
        "missing: errors.md",
        "stale: index.md",
    ]


def test_types_that_no_page_would_show_are_refused() -> None:
    file = FileDescriptorProto(name="kvpool/v1/nested.proto")
    file.message_type.add(name="Outer").nested_type.add(name="Inner")
    with pytest.raises(ValueError, match="Outer"):
        types_of([file])
