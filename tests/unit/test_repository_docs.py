"""Documents that repeat what the code knows agree with it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

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
