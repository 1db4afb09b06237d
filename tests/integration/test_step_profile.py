"""`make profile` against a whole running service: the names it replaces are those that the product looks up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.model, pytest.mark.timeout(150)]


def test_a_step_is_split_into_all_its_parts(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.step_profile",
            "--load",
            "decode:2",
            "--seconds",
            "6",
            "--out",
            tmp_path / "p.json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    load = json.loads((tmp_path / "p.json").read_text())["loads"]["decode:2"]
    assert load["steps"] >= 2
    assert load["mean_rows"] == load["mean_tokens"] == 2
    parts = load["milliseconds"]
    assert all(parts[row] > 0 for row in ("GEMM", "attention", "sampling", "Python"))
    assert sum(parts.values()) == pytest.approx(load["period_ms"])
    assert parts["GEMM"] > 0.1 * load["period_ms"]  # or most of the products have no timer
    labels = load["labels_ms"]
    if "pm_linear" in labels:  # the output matrix alone, where all layers are one call
        assert sum(ms for label, ms in labels.items() if label.startswith("pm_run_")) > labels["pm_linear"]
    assert 0 < load["not_kernels"]["in_the_way"] <= load["not_kernels"]["all"] < 1
    assert load["beside_ms"]["schedule"] > 0
    assert "decode:2" in done.stdout
