"""The protos of proto/kvpool/v1 as the compiler understands them, with their comments. Needs grpcio-tools."""

import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
# Where a thing stands in its file: field numbers of descriptor.proto and positions in turn.
Place = tuple[int, ...]
# The place of the `syntax` line, before which stands what a file says of itself.
SYNTAX: Place = (12,)


def compiled(proto_root: Path = PROTO_ROOT) -> list[FileDescriptorProto]:
    """Each file, ordered by name. raises: subprocess.CalledProcessError when the compiler refuses one; it says why."""
    protos = sorted(str(path.relative_to(proto_root)) for path in proto_root.glob("kvpool/v1/*.proto"))
    with tempfile.TemporaryDirectory(prefix="kvpool-descriptors-") as scratch:
        output = Path(scratch) / "descriptors"
        options = [f"-I{proto_root}", "--include_source_info", f"--descriptor_set_out={output}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *protos], check=True, timeout=60)
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


def comments(file: FileDescriptorProto) -> dict[Place, str]:
    """What stands before each thing, without comment signs and the one space after them."""
    return {tuple(at.path): _plain(at.leading_comments) for at in file.source_code_info.location}


def _plain(comment: str) -> str:
    return "\n".join(line.removeprefix(" ") for line in comment.splitlines()).strip("\n")
