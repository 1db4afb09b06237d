"""Documents that repeat what the code knows agree with it."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pagemill.errors import STATUS_OF, Reason

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_page_is_what_the_settings_classes_say() -> None:
    page = load(ROOT / "docs" / "configuration.py")
    assert (ROOT / "docs" / "configuration.md").read_text() == page.render(), "run `make docs`"


def test_error_table_has_every_reason_with_its_status() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    assert dict(rows) == {reason.value: STATUS_OF[reason].name for reason in Reason}
    assert len(rows) == len(Reason)


PACKAGES = {
    "proto/README.md": "proto/python/pagemill",
    "cache_svc/README.md": "cache_svc/blocks",
    "scheduler_svc/README.md": "scheduler_svc",
    "scheduler_svc/core": "scheduler_svc/core",
    "scheduler_svc/gateway/README.md": "scheduler_svc/gateway",
    "executor_svc/README.md": "executor_svc",
    "client/README.md": "client/python/pagemill_client",
}


@pytest.mark.parametrize(("readme", "folder"), PACKAGES.items())
def test_package_readme_names_every_module(readme: str, folder: str) -> None:
    path = ROOT / readme
    text = (path if path.suffix else path.parent / "README.md").read_text()
    modules = {p.stem for p in (ROOT / folder).glob("*.py")} - {"__init__"}
    missing = {name for name in modules if not re.search(rf"(?<![\w]){re.escape(name)}(?!\w)", text)}
    assert not missing


def test_the_tests_that_the_readme_of_tests_names_exist() -> None:
    """A name that ends with an ellipsis stands for all that begin so."""
    text = (ROOT / "tests" / "README.md").read_text()
    files = {path for path in re.findall(r"`([a-z_]+/[a-z_0-9/]+(?:\.py)?)`", text) if not path.startswith("build/")}
    assert files
    assert not [path for path in files if not (ROOT / "tests" / path).exists()]
    names = set(re.findall(r"`(test_[a-z0-9_]+…?)`", text))
    defined = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    found = {name for name in names if re.search(rf"def {name.replace('…', '[a-z0-9_]*')}\(", defined)}
    assert len(names) > 50
    assert names - found == set()


@pytest.mark.parametrize("role", ["scheduler", "gateway", "executor"])
def test_image_lock_covers_what_the_role_depends_on(role: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"].get(role, [])]
    lock = (ROOT / "deploy" / "lock" / f"{role}.txt").read_text() + (ROOT / "constraints-cpu.txt").read_text()
    locked = {canonicalize_name(n): v for n, v in re.findall(r"^([\w.-]+)==([\w.+]+)", lock, flags=re.MULTILINE)}
    stale = [str(r) for r in wanted if not r.specifier.contains(locked.get(canonicalize_name(r.name), "0"))]
    assert not stale, "run `make lock`"


def test_metrics_table_names_what_the_processes_publish() -> None:
    """Every name of the table is in the source, so that a dashboard built from it finds its series."""
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page[page.index("## Metrics") : page.index("Start with these")]
    names = {name for row in table.splitlines()[4:] for name in re.findall(r"`([a-z_0-9]+)(?:\{[a-z,]*\})?`", row)}
    sources = (
        "scheduler_svc/metrics.py",
        "scheduler_svc/counters.py",
        "scheduler_svc/gateway/metrics.py",
        "executor_svc/metrics.py",
    )
    source = "".join((ROOT / path).read_text() for path in sources)
    missing = {name for name in names if f"{name.removesuffix('_total')}" not in source}
    assert len(names) > 25
    assert not missing


PAGES = sorted(
    p for folder in ROOT.iterdir() if folder.is_dir() and folder.name[0] != "." for p in folder.rglob("*.md")
)


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_want_the_environment_come_after_the_word_how_to_activate_it(page: Path) -> None:
    before, wants = "", re.compile(r"^(?:\w+=\S+ )*(?:python|pip|pagemill|buf|pytest|ruff|mypy)\b", flags=re.MULTILINE)
    for number, part in enumerate(page.read_text().split("```")):
        if number % 2 and part.startswith("sh\n") and wants.search(part):
            assert "source .venv/bin/activate" in before, part
        before += part
