"""What the KV type costs in quality: perplexity, agreement of arg-max and of greedy continuations, error of the scales.

The text is the repository's own, in windows, each token predicted from those of its window before it, through the real
paged runner with scattered block tables. Every position is a decode row of its own, so what is judged is what decoding
reads back from the blocks. Types are compared with the float32 model on float32 KV, and within one type of weights.

    python -m bench.kv_quality                                   # some minutes on two cores
    python -m bench.kv_quality --windows 2 --prompts 0           # a first look
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import machine
from executor_svc.batch import Batch
from executor_svc.runner import PagedRunner, load
from pagemill.model_files import find_demo_model, read_model_info
from scheduler_svc.gateway import tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXT = ("README.md", "ARCHITECTURE.md", "docs/wire.md", "docs/operations.md", "docs/errors.md")
PAIRS = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
)
"""Types of weights, and of keys and values; the first pair of each type of weights is what the others compare with."""
_ROWS = 64
"""Positions per forward; each is a row that gathers its whole context."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of every token but the first of each window."""

    nats: torch.Tensor
    """(windows, window - 1) -log p of the token that came."""
    best: torch.Tensor
    """(windows, window - 1) the token that the model held for the most likely."""


class Paged:
    """Rows of one runner, each with blocks of its own, scattered over the pool."""

    def __init__(self, runner: PagedRunner, num_rows: int, max_len: int) -> None:
        self.runner = runner
        per_row = -(-max_len // runner.block_size)
        runner.allocate_kv(num_rows * per_row)
        blocks = list(range(runner.num_blocks))
        random.Random(7).shuffle(blocks)
        self.tables = torch.tensor(blocks, dtype=torch.int32).view(num_rows, per_row)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of position i of row i."""
        size = self.runner.block_size
        return self.tables[rows, positions // size].long() * size + positions % size

    def chunk(self, row: int, ids: list[int]) -> torch.Tensor:
        """Compute a new row in one piece; logits (1, vocab) after its last token."""
        positions = torch.arange(len(ids))
        slots = self.slots(torch.full_like(positions, row), positions)
        table = self.tables[row : row + 1]
        return self.runner.forward(Batch(torch.tensor(ids), positions, slots, [len(ids)], [len(ids)], table, [0]))

    def tokens(self, rows: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Compute one token per entry, rows of one sequence in ascending order; logits (entries, vocab)."""
        n = ids.numel()
        lens = (positions + 1).tolist()
        slots = self.slots(rows, positions)
        return self.runner.forward(Batch(ids, positions, slots, [1] * n, lens, self.tables[rows], list(range(n))))


def predict(runner: PagedRunner, windows: torch.Tensor) -> Predictions:
    """Of all windows (windows, window), one after the other."""
    nats, best = [], []
    for ids in windows:
        paged = Paged(runner, 1, ids.numel())
        for start in range(0, ids.numel() - 1, _ROWS):
            positions = torch.arange(start, min(start + _ROWS, ids.numel() - 1))
            logits = paged.tokens(torch.zeros_like(positions), positions, ids[positions])
            nats.append(torch.nn.functional.cross_entropy(logits, ids[positions + 1], reduction="none"))
            best.append(logits.argmax(-1))
    shape = (windows.shape[0], windows.shape[1] - 1)
    return Predictions(torch.cat(nats).view(shape), torch.cat(best).view(shape))


def perplexity(predictions: Predictions) -> float:
    """exp of the mean -log p."""
    return math.exp(float(predictions.nats.double().mean()))


def continuations(runner: PagedRunner, prompts: list[list[int]], num_outputs: int) -> list[list[int]]:
    """Greedy ids after each prompt: prompts in one piece each, then all rows token by token."""
    paged = Paged(runner, len(prompts), max(map(len, prompts)) + num_outputs)
    outputs = [[int(paged.chunk(row, ids).argmax())] for row, ids in enumerate(prompts)]
    rows = torch.arange(len(prompts))
    for _ in range(num_outputs - 1):
        positions = torch.tensor([len(p) + len(o) - 1 for p, o in zip(prompts, outputs, strict=True)])
        chosen = paged.tokens(rows, positions, torch.tensor([o[-1] for o in outputs])).argmax(-1)
        for output, token in zip(outputs, chosen.tolist(), strict=True):
            output.append(token)
    return outputs


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float]:
    """Share of tokens before the first difference, and of continuations without one."""
    common = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(ours, theirs, strict=True)
    ]
    return {
        "tokens_before_first_difference": round(sum(common) / sum(map(len, ours)), 4),
        "identical_continuations": round(sum(n == len(x) for n, x in zip(common, ours, strict=True)) / len(ours), 4),
    }


def scale_errors(runner: PagedRunner) -> dict[str, dict[str, float]]:
    """Error of int8 with scales of each type, on the keys and values that the last window left in a float32 pool.

    Relative: root mean square of the error over that of the numbers; keys and values apart.
    """
    kv = runner.pool.blocks.values
    kv = kv[kv.flatten(1).any(1)].transpose(0, 2).flatten(1, -2)  # (K/V, vectors, head_dim)
    kv = torch.stack([part[part.any(-1)] for part in kv])
    errors = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        scales = (kv.abs().amax(-1, keepdim=True) / 127).to(dtype).float()
        back = (kv / scales).round().clamp(-127, 127) * scales
        relative = (back - kv).square().mean((1, 2)).sqrt() / kv.square().mean((1, 2)).sqrt()
        errors[str(dtype).removeprefix("torch.")] = dict(zip(("keys", "values"), map(float, relative), strict=True))
    return errors


def read_text(model: Path, window: int, most: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """(windows, window) ids of the repository's documents, and what they are."""
    text = "\n\n".join((ROOT / name).read_text() for name in TEXT)
    ids = tokenizer.load(read_model_info(model)).encode(text, add_special_tokens=False)
    count = min(most, len(ids) // window)
    about = {"files": TEXT, "sha256": hashlib.sha256(text.encode()).hexdigest(), "windows": count, "window": window}
    return torch.tensor(ids[: count * window]).view(count, window), about


def pick_prompts(windows: torch.Tensor, count: int) -> list[list[int]]:
    """Pieces of the text, 16 to 256 tokens long, from places all over it."""
    rng = random.Random(11)
    flat = windows.flatten().tolist()
    prompts = []
    for _ in range(count):
        length = rng.randint(16, min(256, len(flat) // 2))
        start = rng.randrange(len(flat) - length)
        prompts.append(flat[start : start + length])
    return prompts


def compare(args: argparse.Namespace, windows: torch.Tensor, prompts: list[list[int]]) -> dict[str, Any]:
    """A line per pair of types, and the errors of the scales."""
    lines: list[dict[str, Any]] = []
    first: dict[str, tuple[Predictions, list[list[int]]]] = {}
    scales: dict[str, dict[str, float]] = {}
    for dtype, kv_dtype in PAIRS:
        runner = load(args.model, dtype=dtype, kv_dtype=kv_dtype, block_size=args.block_size)
        found = predict(runner, windows)
        if not scales:
            scales = scale_errors(runner)
        outputs = continuations(runner, prompts, args.outputs) if prompts else []
        reference, reference_outputs = first.setdefault(dtype, (found, outputs))
        base = first[PAIRS[0][0]]
        line = {
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "bytes_per_block": runner.bytes_per_block,
            "perplexity": round(perplexity(found), 4),
            "ratio": round(perplexity(found) / perplexity(reference), 5),
            "ratio_to_float32": round(perplexity(found) / perplexity(base[0]), 5),
            "same_arg_max": round(float((found.best == reference.best).double().mean()), 4),
            "same_arg_max_as_float32": round(float((found.best == base[0].best).double().mean()), 4),
            **(agreement(outputs, reference_outputs) if prompts else {}),
            **({f"{k}_of_float32": v for k, v in agreement(outputs, base[1]).items()} if prompts else {}),
        }
        print(json.dumps(line), flush=True)
        lines.append(line)
    return {"types": lines, "scale_errors": scales}


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options for how much is compared, and where the figures go."""
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=10, help="most windows")
    parser.add_argument("--prompts", type=int, default=48, help="greedy continuations compared")
    parser.add_argument("--outputs", type=int, default=64, help="tokens of each continuation")
    parser.add_argument("--output", type=Path, help="where the JSON goes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory or GGUF file (default: the demo model)")
    parser.add_argument("--block-size", type=int, default=16, help="positions per block")
    add_sizes(parser)
    args = parser.parse_args()
    args.model = args.model or find_demo_model()
    windows, about = read_text(args.model, args.window, args.windows)
    prompts = pick_prompts(windows, args.prompts)
    result = {
        "model": read_model_info(args.model).name,
        "text": about,
        "prompts": len(prompts),
        "outputs": args.outputs,
        "block_size": args.block_size,
        **compare(args, windows, prompts),
        "machine": machine.describe(),
    }
    print(json.dumps(result["scale_errors"]))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
