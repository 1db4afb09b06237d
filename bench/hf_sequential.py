"""transformers, one request after the other: the baseline of W2. A process that answers one line per turn.

Reads {"requests": [[ids, n_out], …]} from standard input, runs `generate` on each in order, and writes
{"seconds": …, "tokens": …, "first_ids": […]}. Started by `bench.w2`; the model stays loaded between turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from executor_svc.weights.source import open_source
from pagemill.model_files import read_model_info


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(args.threads)
    model = load(args.model, getattr(torch, args.dtype)).eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        requests = json.loads(line)["requests"]
        start = time.perf_counter()
        outputs = [_generate(model, ids, n_out) for ids, n_out in requests]
        seconds = time.perf_counter() - start
        print(
            json.dumps({"seconds": seconds, "tokens": sum(map(len, outputs)), "first_ids": outputs[0][:8]}), flush=True
        )


def load(path: Path, dtype: torch.dtype) -> Any:
    """The model in transformers' own implementation. The weights of a GGUF file are read by Pagemill's reader:
    transformers' own needs one more package.
    """
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    info = read_model_info(path)
    config = AutoConfig.for_model(**info.config)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    source = open_source(info)
    for name, parameter in model.named_parameters():  # tied ones are named once
        source.read_into(name, parameter.data)
    return model


@torch.inference_mode()
def _generate(model: Any, ids: list[int], n_out: int) -> list[int]:
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=n_out,
        min_new_tokens=n_out,
        do_sample=False,
    )
    new: list[int] = output[0, len(ids) :].tolist()
    return new


if __name__ == "__main__":
    main()
