"""`pytest tests/transcripts --rewrite-transcripts` writes what the scheduler does now into the transcripts.

Review the diff: commit it only if you understand what caused it.
"""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-transcripts", action="store_true", help="write today's answers into the transcripts")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    # A conftest below the root adds its option only if its folder is named on the command line; the variable works
    # from anywhere.
    option = request.config.getoption("--rewrite-transcripts", default=False)
    return bool(option) or os.environ.get("REWRITE_TRANSCRIPTS") == "1"
