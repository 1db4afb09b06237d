"""Arrows that a list of forbidden names cannot express; `.importlinter` has the rest."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE = {"scheduler_svc.core", "cache_svc.blocks"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Full names of everything a file imports, at any depth, relative imports resolved."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def below(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"nothing below {folder}"
    return found


@pytest.mark.parametrize("folder", ["scheduler_svc/core", "cache_svc/blocks"])
def test_pure_packages_import_the_standard_library_and_each_other_only(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(folder)
        for name in imported(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not below(name, PURE)
    ]
    assert not wrong


def test_blocks_do_not_import_the_core() -> None:
    assert not [p for p in files("cache_svc/blocks") for name in imported(p) if below(name, {"scheduler_svc"})]


def test_gateway_imports_nothing_of_the_scheduler_process() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files("scheduler_svc/gateway")
        for name in imported(path)
        if below(name, {"scheduler_svc"}) and not below(name, {"scheduler_svc.gateway"})
    ]
    assert not wrong


def test_scheduler_process_does_not_import_the_gateway() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in files("scheduler_svc")
        if not below(module_name(path), {"scheduler_svc.gateway"})
        for name in imported(path)
        if below(name, {"scheduler_svc.gateway"})
    ]
    assert not wrong


ONLY_STDLIB = """
import importlib, pkgutil, sys
from importlib.abc import MetaPathFinder

class Wall(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top not in ("scheduler_svc", "cache_svc"):
            raise ImportError(f"{name} is behind the wall")
        return None

sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, Wall())
count = 0
for package in ("cache_svc.blocks", "scheduler_svc.core"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
        count += 1
print(count)
"""


def test_core_runs_with_everything_but_the_standard_library_blocked() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", ONLY_STDLIB, str(ROOT)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5


def test_scheduler_process_has_no_torch_numpy_or_grpc_among_its_modules() -> None:
    code = (
        "import sys\n"
        "import scheduler_svc.__main__\n"
        "heavy = {'torch', 'numpy', 'grpc', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
