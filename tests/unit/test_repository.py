"""Rules about the repository itself: what no file may contain, and what the documents promise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest
from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("cache_svc", "scheduler_svc", "executor_svc", "proto/python/pagemill", "client/python/pagemill_client")

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj"}
FORBIDDEN_METHODS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("numpy", "load"), ("np", "load")}

SHARED_FOLDERS = {Path(p) for p in ("/", "/tmp", "/src", "/app", "/opt", "/srv", "/usr", "/usr/src", "/var/tmp")}
"""Where a clone may lie without its path telling whose machine it is."""


@cache
def tracked() -> list[Path]:
    """Files git knows or would add, so that a rule also holds before the first `git add`."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def product_files() -> list[Path]:
    found = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 20
    return found


def unsafe_code(source: str) -> list[str]:
    """What a Python text uses that turns bytes into code (S1), or loads weights that can (S6)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [a.name for a in names if a.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                found += [module] if module.split(".")[0] in FORBIDDEN_MODULES else []
                found += [f"{module}.{a.name}" for a in names if (module, a.name) in FORBIDDEN_METHODS]
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(f"{name}()")
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                # `model.eval()` is torch's switch to inference, not the builtin.
                owner = value.id if isinstance(value, ast.Name) else ""
                if (owner, attr) in FORBIDDEN_METHODS or attr in {"recv_pyobj", "send_pyobj"}:
                    found.append(f"{owner}.{attr}()")
                if owner == "builtins" and attr in FORBIDDEN_CALLS:
                    found.append(f"builtins.{attr}()")
            case ast.keyword(arg="trust_remote_code", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    found.append("trust_remote_code")
            case ast.keyword(arg="allow_pickle" | "weights_only"):
                found.append("pickle-based loading")
    return found


def test_product_never_turns_bytes_into_code() -> None:
    found = {str(p.relative_to(ROOT)): what for p in product_files() if (what := unsafe_code(p.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "yaml.load(text)",
        "eval(text)",
        "socket.recv_pyobj()",
        "from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_the_rule_finds_unsafe_code(source: str) -> None:
    assert unsafe_code(source)


def test_the_rule_lets_safe_code_pass() -> None:
    assert not unsafe_code(
        "import json\nmodel.eval()\nfrom_pretrained(path, trust_remote_code=False)\nyaml.safe_load(t)"
    )


def text_files() -> list[tuple[Path, str]]:
    found = []
    for path in tracked():
        try:
            found.append((path, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    assert len(found) > 40
    return found


def registry_hosts() -> set[str]:
    """Host names of package registries, asked of pip or put together here: this file may not hold them either."""
    parts = [
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("download", "pytorch", "org"),
        ("proxy", "golang", "org"),
    ]
    return {PyPI.netloc, PyPI.file_storage_domain, *(".".join(part) for part in parts)}


def test_no_tracked_file_names_a_package_registry() -> None:
    hosts = registry_hosts()
    assert not [(str(path.relative_to(ROOT)), host) for path, text in text_files() for host in hosts if host in text]


def test_no_tracked_file_has_a_path_of_somebodys_machine() -> None:
    folders = {
        f"{re.escape(str(folder))}/" for folder in (ROOT, ROOT.parent, Path.home()) if folder not in SHARED_FOLDERS
    }
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(folders)}|/(?:home|Users)/[a-z]\w*/)")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}" for path, text in text_files() for match in pattern.finditer(text)
    ]
    assert not found


def documents() -> list[Path]:
    found = [p for p in tracked() if p.suffix == ".md"]
    assert len(found) >= 5
    return found


def commands_in(text: str) -> list[str]:
    """Lines of the shell blocks and inline code of a document."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, flags=re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()] + inline


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {m.group(1) for c in commands_in(document.read_text()) if (m := re.match(r"make ([a-z][a-z-]*)", c))}
    assert named <= targets


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_subcommands_exist(document: Path) -> None:
    named = {m.group(1) for c in commands_in(document.read_text()) if (m := re.match(r"pagemill ([a-z]+)\b", c))}
    unknown = {name for name in named if not subcommand_exists(name)}
    assert not unknown


@cache
def subcommand_exists(name: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "pagemill_client.cli", name, "--help"], capture_output=True, timeout=60, check=False
    )
    return done.returncode == 0


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    broken = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not broken


def test_required_files_are_there() -> None:
    documents = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE"]
    assert not [name for name in [*documents, "Makefile", "compose.yaml", ".ci/run"] if not (ROOT / name).is_file()]
    packages = [
        "proto",
        "cache_svc",
        "scheduler_svc",
        "scheduler_svc/gateway",
        "executor_svc",
        "client",
        "tests",
        "bench",
        "deploy",
    ]
    assert not [name for name in packages if not (ROOT / name / "README.md").is_file()]


@pytest.mark.timeout(300)  # it compiles the kernels for five instruction sets, beside other tests
def test_wheel_holds_every_package_and_the_type_information(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in tracked():  # a copy, because setuptools leaves build/ and egg-info beside what it builds
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source],
        capture_output=True,
        timeout=280,
        check=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    wanted = {"pagemill/py.typed", "pagemill/v1/inference_pb2.pyi", "pagemill/engine/v1/executor_pb2.pyi"}
    for package, folder in config["package-dir"].items():
        for path in (ROOT / folder).rglob("*.py"):
            wanted.add(f"{package}/{path.relative_to(ROOT / folder)}")
    assert not wanted - held
    assert not [name for name in held if name.startswith(("tests/", "bench/", "build/"))]
