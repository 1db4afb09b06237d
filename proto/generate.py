"""Generates the Python stubs from the .proto files beside this one into proto/python (`make proto`).

The path of a .proto equals its Python package, so the generated imports work unchanged.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
OUT = ROOT / "python"


def main() -> int:
    """Return protoc's exit status; stubs of services are made only for the public package."""
    well_known = str(files("grpc_tools") / "_proto")
    public = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "pagemill" / "v1").glob("*.proto"))
    internal = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "pagemill" / "engine").rglob("*.proto"))
    common = ["protoc", f"-I{ROOT}", f"-I{well_known}", f"--python_out={OUT}", f"--pyi_out={OUT}"]
    return protoc.main([*common, *internal]) or protoc.main([*common, f"--grpc_python_out={OUT}", *public])


if __name__ == "__main__":
    sys.exit(main())
