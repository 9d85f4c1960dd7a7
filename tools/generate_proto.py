"""Write clients/python/kvpool/v1 from proto/kvpool/v1, or with --check say whether it is current.

Needs grpcio-tools and mypy-protobuf (`make setup`). Run it as `make proto`; `make check` runs it with --check.
"""

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = Path("kvpool/v1")
INIT_TEXT = '"""Generated from proto/kvpool/v1; never edited by hand."""\n'


def generate(proto_root: Path, output_root: Path) -> None:
    """Write the modules and stubs of every proto of the package under output_root/kvpool/v1, and its __init__.py.

    Raises subprocess.CalledProcessError when the compiler refuses a proto; it has then said why on stderr.
    """
    protos = sorted(str(path.relative_to(proto_root)) for path in (proto_root / PACKAGE).glob("*.proto"))
    (output_root / PACKAGE).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto_root}"]
    # The plugins of mypy-protobuf are scripts of this environment, which need not be on the PATH.
    for plugin in ("mypy", "mypy_grpc"):
        command += [f"--plugin=protoc-gen-{plugin}={Path(sys.executable).parent / f'protoc-gen-{plugin}'}"]
    command += [f"--{kind}_out={output_root}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run([*command, *protos], check=True)
    (output_root / PACKAGE / "__init__.py").write_text(INIT_TEXT)


def differences(expected: Path, actual: Path) -> list[str]:
    """One line for each file that is missing, stale or left over in `actual`, sorted; empty when it is current."""
    wanted = {path.name for path in expected.iterdir() if path.is_file()}
    present = {path.name for path in actual.iterdir() if path.is_file()} if actual.is_dir() else set()
    stale = (name for name in wanted & present if not filecmp.cmp(expected / name, actual / name, shallow=False))
    lines = [f"missing: {name}" for name in wanted - present]
    lines += [f"left over: {name}" for name in present - wanted]
    lines += [f"stale: {name}" for name in stale]
    return sorted(lines)


def run(proto_root: Path, output_root: Path, *, check: bool) -> int:
    """Generate into output_root, or only compare with it. Returns the exit code: 0, or 1 when it is not current."""
    with tempfile.TemporaryDirectory(prefix="kvpool-proto-") as scratch:
        generate(proto_root, Path(scratch))
        fresh, package = Path(scratch) / PACKAGE, output_root / PACKAGE
        if check:
            lines = differences(fresh, package)
            for line in lines:
                print(f"{package}: {line}", file=sys.stderr)
            if lines:
                print("the generated code is not current: run `make proto` and commit the result", file=sys.stderr)
            return 1 if lines else 0
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(fresh, package)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the committed code differs")
    parser.add_argument("--proto-root", type=Path, default=REPOSITORY / "proto")
    parser.add_argument("--output-root", type=Path, default=REPOSITORY / "clients" / "python")
    options = parser.parse_args()
    return run(options.proto_root, options.output_root, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
