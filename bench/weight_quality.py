"""What weights in 8 or 4 bits cost in quality: perplexity, agreement of arg-max and of greedy continuations.

Text, windows and prompts are those of `kv_quality`, keys and values have the type of activations. Each form of weights
is compared with the float32 model, and with bfloat16 weights.

    python -m bench.weight_quality                               # some minutes on two cores
    python -m bench.weight_quality --windows 2 --prompts 0       # a first look
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.kv_quality import (
    Predictions,
    add_sizes,
    agreement,
    continuations,
    perplexity,
    pick_prompts,
    predict,
    read_text,
)
from executor_svc.runner import load
from pagemill.model_files import find_demo_model, read_model_info

FORMS = (
    ("float32", "auto"),
    ("bfloat16", "auto"),
    ("float32", "gguf"),
    ("bfloat16", "gguf"),
    ("float32", "int8"),
    ("bfloat16", "int8"),
)
"""Types of activations, and --weight-dtype; the first two are what all are compared with."""
_REFERENCES = {"float32": 0, "bfloat16": 1}


def compare(args: argparse.Namespace, windows: torch.Tensor, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """A line per form."""
    lines: list[dict[str, Any]] = []
    found: list[tuple[Predictions, list[list[int]]]] = []
    for dtype, weight_dtype in FORMS:
        runner = load(args.model, dtype=dtype, weight_dtype=weight_dtype)
        found.append((predict(runner, windows), continuations(runner, prompts, args.outputs) if prompts else []))
        predictions, outputs = found[-1]
        line: dict[str, Any] = {
            "dtype": dtype,
            "weight_dtype": weight_dtype,
            "weight_bytes": runner.weight_bytes,
            "perplexity": round(perplexity(predictions), 4),
            "ratio_to_float32": round(perplexity(predictions) / perplexity(found[0][0]), 5),
        }
        for name, index in _REFERENCES.items():
            if index < len(found):
                theirs, their_outputs = found[index]
                line[f"same_arg_max_as_{name}"] = round(float((predictions.best == theirs.best).double().mean()), 4)
                if prompts:
                    line |= {f"{k}_as_{name}": v for k, v in agreement(outputs, their_outputs).items()}
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file (default: the demo model)")
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
        "forms": compare(args, windows, prompts),
        "machine": machine.describe(),
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
