"""What the scheduler does in ten situations, written down; see `interpreter` and `conftest`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transcripts.interpreter import Interpreter

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))
DASHES = "----"


def answer(text: str) -> str:
    """The transcript with the answers of now in the place of the written ones."""
    interpreter = Interpreter()
    lines: list[str] = []
    commands: list[str] = []
    is_answer = False
    for line in text.splitlines():
        if is_answer:
            is_answer = bool(line)
            if is_answer:
                continue
        if line == DASHES:
            lines += [line, *interpreter.run_block(commands)]
            commands, is_answer = [], True
            continue
        if line and not line.startswith("#"):
            commands.append(line)
        lines.append(line)
    assert not commands, f"commands without {DASHES} behind them: {commands}"
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, rewrite: bool) -> None:
    written = path.read_text()
    now = answer(written)
    assert "BROKEN" not in now
    if rewrite:
        path.write_text(now)
    assert now == path.read_text()


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 10
