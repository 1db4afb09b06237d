"""llama.cpp through llama-cpp-python's low-level interface: continuous batching over sequences of one context.

The high-level class serves one request at a time; this loop does what llama.cpp's own server does: a token for every
running sequence, then prompts within the batch, one `llama_decode` a step.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import llama_cpp
import numpy as np

from bench.peers.workers.loop import Arrival, Engine, Job, main

BATCH, MICRO_BATCH = 2048, 512
"""llama.cpp's defaults: tokens of a call, and of a computation."""


@dataclass
class Running:
    """A sequence: `done` positions are computed; `last` is the token to feed when the prompt is."""

    job: Job
    slot: int
    done: int = 0
    produced: int = 0
    last: int = 0


class Batched:
    """One `step` is one `llama_decode`."""

    def __init__(self, context: Any, vocab_size: int, num_slots: int) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._vocab_size = vocab_size
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._free = deque(range(num_slots))
        self._queue: deque[Job] = deque()
        self._running: list[Running] = []

    def add(self, job: Job) -> None:
        self._queue.append(job)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    def step(self) -> list[Arrival]:
        while self._queue and self._free:
            self._running.append(Running(self._queue.popleft(), self._free.popleft()))
        outputs = self._fill()
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed: the context is too small for this load")
        tokens = [self._argmax(place) for place, _ in outputs]  # waits for the result
        now = time.perf_counter()
        arrivals = []
        for token, (_, sequence) in zip(tokens, outputs, strict=True):
            sequence.last = token
            sequence.produced += 1
            arrivals.append((sequence.job.index, now, 1))
            if sequence.produced == sequence.job.n_out:
                self._end(sequence)
        return arrivals

    def _fill(self) -> list[tuple[int, Running]]:
        """Fill the batch; the places that give a token, and whose."""
        outputs, place = [], 0
        for sequence in self._running:
            if sequence.produced:
                self._put(place, sequence.last, sequence.done, sequence.slot, wanted=True)
                sequence.done += 1
                outputs.append((place, sequence))
                place += 1
        for sequence in self._running:
            ids = sequence.job.ids
            while not sequence.produced and sequence.done < len(ids) and place < BATCH:
                last = sequence.done == len(ids) - 1
                self._put(place, ids[sequence.done], sequence.done, sequence.slot, wanted=last)
                sequence.done += 1
                if last:
                    outputs.append((place, sequence))
                place += 1
        self._batch.n_tokens = place
        return outputs

    def _put(self, place: int, token: int, position: int, slot: int, *, wanted: bool) -> None:
        batch = self._batch
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, slot
        batch.logits[place] = wanted

    def _argmax(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def _end(self, sequence: Running) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence.slot, -1, -1)
        self._running.remove(sequence)
        self._free.append(sequence.slot)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: Any) -> None:
    pass


def load(options: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(options["gguf"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not load {options['gguf']}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = options["kv_tokens"], BATCH, MICRO_BATCH
    params.n_seq_max, params.kv_unified = options["max_seqs"], True
    params.n_threads = params.n_threads_batch = options["threads"]
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp made no context: too little memory?")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return Batched(context, vocab_size, options["max_seqs"]), {
        "versions": {"llama-cpp-python": metadata.version("llama-cpp-python")},
        "weights": options["gguf_type"],
        "kv": "float16",
        "threads": options["threads"],
        "how": f"continuous batching, batch {BATCH}, micro-batch {MICRO_BATCH}, unified KV cache, flash attention auto",
    }


if __name__ == "__main__":
    main(load)
