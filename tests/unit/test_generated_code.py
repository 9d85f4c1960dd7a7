"""The committed protobuf code is what proto/ says, and imports under the oldest runtimes that we promise."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.generate_proto import PACKAGE, REPOSITORY, differences, run

COMMITTED = REPOSITORY / "clients/python"

PROTO = """
syntax = "proto3";
package kvpool.v1;
message Note { int64 count = 1; }
service PingService { rpc Ping(Note) returns (Note); }
"""


@pytest.fixture
def scratch(tmp_path: Path) -> tuple[Path, Path]:
    """A proto root with one proto, and an output root that is current for it."""
    protos, output = tmp_path / "proto", tmp_path / "out"
    (protos / PACKAGE).mkdir(parents=True)
    (protos / PACKAGE / "ping.proto").write_text(PROTO)
    assert run(protos, output, check=False) == 0
    return protos, output


def test_the_committed_code_is_current() -> None:
    assert run(REPOSITORY / "proto", COMMITTED, check=True) == 0


def test_a_changed_proto_makes_the_code_stale(scratch: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    protos, output = scratch
    assert run(protos, output, check=True) == 0
    (protos / PACKAGE / "ping.proto").write_text(PROTO.replace("count = 1", "count = 2"))
    assert run(protos, output, check=True) == 1
    assert "stale: ping_pb2.py\n" in capsys.readouterr().err
    assert run(protos, output, check=False) == 0
    assert run(protos, output, check=True) == 0


def test_missing_and_left_over_files_are_named(scratch: tuple[Path, Path], tmp_path: Path) -> None:
    _, output = scratch
    other = tmp_path / "other"
    shutil.copytree(output / PACKAGE, other)
    (other / "ping_pb2.py").rename(other / "gone_pb2.py")
    assert differences(output / PACKAGE, other) == ["left over: gone_pb2.py", "missing: ping_pb2.py"]
    assert differences(output / PACKAGE, tmp_path / "nowhere") == sorted(
        f"missing: {path.name}" for path in (output / PACKAGE).iterdir()
    )


def test_it_imports_with_warnings_as_errors() -> None:
    names = sorted(path.stem for path in (COMMITTED / PACKAGE).glob("*_pb2*.py"))
    assert "index_pb2_grpc" in names
    code = "; ".join(f"import kvpool.v1.{name}" for name in names)
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=COMMITTED)


def test_it_was_made_for_the_floors_of_the_distribution() -> None:
    """Code from a newer generator would not import where an engine holds protobuf or grpcio back."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    floors = dict(re.findall(r"(protobuf|grpcio)>=([\d.]+)", " ".join(project["dependencies"])))
    for path in (COMMITTED / PACKAGE).glob("*_pb2.py"):
        assert f"# Protobuf Python Version: {floors['protobuf']}\n" in path.read_text()
    for path in (COMMITTED / PACKAGE).glob("*_pb2_grpc.py"):
        assert f"GRPC_GENERATED_VERSION = '{floors['grpcio']}'\n" in path.read_text()
