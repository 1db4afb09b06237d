"""Generates the Python stubs from the .proto files beside this one into proto/python (`make proto`).

The path of a .proto equals its Python package, so the generated imports work unchanged. With ``--check`` nothing is
written: the exit status is 1 if a committed stub differs from what the .proto files give, or is one too many.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
OUT = ROOT / "python"


def generate(out: Path) -> int:
    """Return protoc's exit status; stubs of services are made only for the public package."""
    well_known = str(files("grpc_tools") / "_proto")
    public = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "pagemill" / "v1").glob("*.proto"))
    internal = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "pagemill" / "engine").rglob("*.proto"))
    common = ["protoc", f"-I{ROOT}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}"]
    status: int = protoc.main([*common, *internal]) or protoc.main([*common, f"--grpc_python_out={out}", *public])
    return status


def stubs(root: Path) -> dict[str, bytes]:
    """Content of every generated file below `root`, by its path there."""
    return {
        str(p.relative_to(root)): p.read_bytes() for pattern in ("*_pb2*.py", "*_pb2*.pyi") for p in root.rglob(pattern)
    }


def check() -> int:
    """Return 0 if the committed stubs are what the .proto files give, else name those that differ and return 1."""
    with tempfile.TemporaryDirectory() as folder:
        status = generate(Path(folder))
        fresh, committed = stubs(Path(folder)), stubs(OUT)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    for name in stale:
        sys.stderr.write(f"stale stub: proto/python/{name} (run `make proto`)\n")
    return status or int(bool(stale))


if __name__ == "__main__":
    sys.exit(check() if "--check" in sys.argv[1:] else generate(OUT))
