"""Writes the Python stubs of `proto/*.proto`, or checks that the committed ones are what they would be.

    python -m waypath.tools.stubs [--check]

Owns the protoc call. Called by `make proto` and `make check`. Run from the repository's root: the stubs import each other
as `waypath.proto.x`, which they only do when protoc sees the files under that path.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(out: Path) -> list[str]:
    """Run protoc on every schema; returns the names of the files written to `out/waypath/proto`."""
    from grpc_tools import protoc

    schemas = sorted(f"waypath/proto/{path.name}" for path in (ROOT / "proto").glob("*.proto"))
    arguments = ["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main([*arguments, *(str(ROOT / schema) for schema in schemas)]) != 0:
        raise SystemExit("protoc failed")
    return sorted(path.name for pattern in PATTERNS for path in (out / "waypath" / "proto").glob(pattern))


def differences(fresh: Path, committed: Path, names: list[str]) -> list[str]:
    """Names of stubs that are missing, stale, or belong to no schema."""
    there = {path.name for pattern in PATTERNS for path in committed.glob(pattern)}
    stale = [n for n in names if n in there and (fresh / n).read_bytes() != (committed / n).read_bytes()]
    return sorted(stale + list(there ^ set(names)))


def main(argv: list[str] | None = None) -> int:
    """Write or check; returns 1 where the check finds a difference."""
    parser = argparse.ArgumentParser(description="Write the stubs of proto/*.proto.")
    parser.add_argument("--check", action="store_true", help="only compare with the committed stubs")
    check: bool = parser.parse_args(argv).check
    committed = ROOT / "proto"
    with tempfile.TemporaryDirectory() as folder:
        names = generate(Path(folder))
        fresh = Path(folder) / "waypath" / "proto"
        different = differences(fresh, committed, names)
        if not check:
            for name in names:
                (committed / name).write_bytes((fresh / name).read_bytes())
    if check and different:
        print(f"stale stubs: {', '.join(different)}; run `make proto` and commit", file=sys.stderr)
        return 1
    print(f"{len(names)} stubs, {len(different)} differ" if not check else f"{len(names)} stubs are fresh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
