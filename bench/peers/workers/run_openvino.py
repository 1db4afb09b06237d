"""OpenVINO GenAI: its pipeline with continuous batching and paged attention, prefix caching on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.workers.loop import Arrival, Engine, Job, main

BATCH_TOKENS = 2048
KV_GB = 2


class Pipeline:
    """One `step` is one of the pipeline's."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._handles: dict[int, Any] = {}
        self._number = 0

    def add(self, job: Job) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = job.n_out
        config.ignore_eos, config.do_sample = True, False
        ids = openvino.Tensor(np.array([job.ids], dtype=np.int64))
        self._handles[job.index] = self._pipeline.add_request(self._number, ids, config)
        self._number += 1

    @property
    def busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def step(self) -> list[Arrival]:
        self._pipeline.step()
        now, arrivals = time.perf_counter(), []
        for index, handle in self._handles.items():
            while handle.can_read():
                count = sum(len(output.generated_ids) for output in handle.read().values())
                if count:
                    arrivals.append((index, now, count))
        if not self.busy:
            self._handles.clear()
        return arrivals


def _pipeline(options: dict[str, Any], scheduler: Any) -> tuple[Any, str]:
    """The pipeline, and the type that it computes and keeps keys and values in: float32 where its kernels for this CPU
    know no bfloat16.
    """
    kinds = {"bfloat16": "bf16", "float32": "f32"}
    for dtype in dict.fromkeys((options["dtype"], "float32")):
        properties = {
            "INFERENCE_PRECISION_HINT": kinds[dtype],
            "KV_CACHE_PRECISION": kinds[dtype],
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": options["threads"],
        }
        try:
            return openvino_genai.ContinuousBatchingPipeline(options["openvino"], scheduler, "CPU", properties), dtype
        except RuntimeError as error:
            print(f"OpenVINO does not run in {dtype} here: {str(error).strip().splitlines()[-1]}")
    raise SystemExit("OpenVINO runs in neither type")


def load(options: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = KV_GB, options["max_seqs"]
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = BATCH_TOKENS, True
    scheduler.enable_prefix_caching = True
    pipeline, computed = _pipeline(options, scheduler)
    return Pipeline(pipeline), {
        "versions": {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__},
        "weights": f"float16, computed in {computed}",
        "kv": computed,
        "threads": options["threads"],
        "how": f"ContinuousBatchingPipeline, {BATCH_TOKENS} tokens a step, prefix caching",
    }


if __name__ == "__main__":
    main(load)
