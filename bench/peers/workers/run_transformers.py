"""transformers: `generate` with attention by SDPA, one request after the other."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from bench.peers.workers.loop import Arrival, Engine, Job, main


class Times(BaseStreamer):
    """Notes when each token comes; `generate` shows it the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._begun = False

    def put(self, value: Any) -> None:
        if self._begun:
            self.times.append(time.perf_counter())
        self._begun = True

    def end(self) -> None:
        pass


class Sequential:
    """One `step` is one whole request."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._jobs: deque[Job] = deque()

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @torch.inference_mode()
    def step(self) -> list[Arrival]:
        job, times = self._jobs.popleft(), Times()
        prompt = torch.tensor([job.ids])
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=job.n_out,
            min_new_tokens=job.n_out,
            do_sample=False,
            streamer=times,
        )
        return [(job.index, at, 1) for at in times.times]


def load(options: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    torch.set_num_threads(options["threads"])
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"],
        dtype=getattr(torch, options["dtype"]),
        attn_implementation="sdpa",
        local_files_only=True,
    )
    return Sequential(model.eval()), {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "weights": options["dtype"],
        "kv": options["dtype"],
        "threads": torch.get_num_threads(),
        "how": "generate, one request after the other, sdpa",
    }


if __name__ == "__main__":
    main(load)
