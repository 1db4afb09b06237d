"""`ModelRunner` on a CPU: a model, a paged pool and an attention backend; one forward per batch."""

from __future__ import annotations

import ctypes
import logging
import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.attention.base import AttentionBackend, AttentionError
from executor_svc.attention.native import NativeBackend
from executor_svc.attention.sdpa import SdpaBackend
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.pool import KvPool
from executor_svc.models.base import CausalLM
from executor_svc.models.layers import packs_bfloat16
from executor_svc.models.loading import WEIGHT_DTYPES
from executor_svc.models.registry import has_own_implementation, load_model
from executor_svc.native.library import Library, NativeError
from executor_svc.native.library import load as load_library
from executor_svc.native.verify import PORTABLE, use_only_what_agrees
from pagemill.logs import kv
from pagemill.model_files import ModelInfo, read_model_info

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KV_DTYPES = {**DTYPES, "int8": torch.int8}
BACKENDS = ("native", "sdpa")


class PagedRunner:
    """See `executor_svc.batch.ModelRunner`. Built by `load`."""

    def __init__(
        self,
        info: ModelInfo,
        model: CausalLM,
        backend: AttentionBackend,
        geometry: KvGeometry,
        weight_dtype: str = "auto",
    ) -> None:
        shape = model.shape
        self._model = model
        self._backend = backend
        self._pool: KvPool | None = None
        self.geometry = geometry
        self.info = info
        self.vocab_size = shape.vocab_size
        self.max_model_len = shape.max_model_len
        self.block_size = geometry.block_size
        self.num_blocks = 0
        self.bytes_per_block = self.geometry.bytes_per_block
        self.weight_bytes = model.weight_bytes
        self.buffer_bytes_per_token = model.buffer_bytes_per_token
        kept = "" if weight_dtype == "auto" else f", weights {weight_dtype}"
        self.dtype_name = str(model.dtype).removeprefix("torch.") + kept
        self.kv_dtype_name = str(geometry.dtype).removeprefix("torch.")
        self.device_name = f"cpu: {torch.get_num_threads()} threads"
        self.attention_name = backend.name
        self.model_name = info.name
        self.fingerprint = info.fingerprint
        self.tokenizer_hash = info.tokenizer_hash

    def allocate_kv(self, num_blocks: int) -> None:
        """As `ModelRunner.allocate_kv`."""
        self._pool, self.num_blocks = None, 0  # the old memory goes first
        self._pool, self.num_blocks = KvPool(self.geometry, num_blocks), num_blocks

    def forward(self, batch: Batch) -> torch.Tensor:
        """As `ModelRunner.forward`."""
        with torch.inference_mode():
            step = self._backend.begin(batch, self._require_pool())
            sample = None
            if batch.sample_rows:
                ends = list(accumulate(batch.query_lens))
                sample = torch.tensor([ends[row] - 1 for row in batch.sample_rows])
            logits = self._model.forward(batch.token_ids, batch.positions, step, sample)
            return torch.empty(0, self.vocab_size) if logits is None else logits.float()

    def block_bytes(self) -> NDArray[np.uint8]:
        """As `ModelRunner.block_bytes`."""
        return self._require_pool().block_bytes()

    @property
    def pool(self) -> KvPool:
        """The pool, for tests."""
        return self._require_pool()

    def _require_pool(self) -> KvPool:
        if self._pool is None:
            raise RuntimeError("allocate_kv must come first")
        return self._pool


def load(
    model: Path | str | ModelInfo,
    *,
    dtype: str = "auto",
    weight_dtype: str = "auto",
    kv_dtype: str = "auto",
    block_size: int = 16,
    attention: str = "auto",
    num_threads: int | None = None,
    deterministic: bool = False,
) -> PagedRunner:
    """Load a model and return its runner, without a KV pool yet.

    `dtype`: "bfloat16", "float32", or "auto" (bfloat16 where the CPU or the kernels compute it fast). `weight_dtype`:
    "auto" (the same), "int8" or "gguf" (see `executor_svc.models.loading`). `kv_dtype`: of keys and values, one of the
    types of `dtype`, "int8", or "auto" (the same as `dtype`). `num_threads`: None takes what torch starts with
    (OMP_NUM_THREADS, else the cores), at most the CPUs this process may use. `deterministic`: refuse a model or a CPU
    with which the bits of a sequence's logits would depend on others in the batch or on how the prompt is cut. Raises
    ValueErrors (ModelFileError, UnsupportedModelError, WeightError, AttentionError) whose text is one line for the
    operator.
    """
    if dtype not in (*DTYPES, "auto"):
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)} (got {dtype!r})")
    if weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"weight_dtype must be one of {', '.join(WEIGHT_DTYPES)} (got {weight_dtype!r})")
    if kv_dtype not in (*KV_DTYPES, "auto"):
        raise ValueError(f"kv_dtype must be one of auto, {', '.join(KV_DTYPES)} (got {kv_dtype!r})")
    if attention not in (*BACKENDS, "auto"):
        raise AttentionError(f"attention backend must be one of auto, {', '.join(BACKENDS)} (got {attention!r})")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 (got {block_size})")
    torch.set_num_threads(num_threads or min(torch.get_num_threads(), usable_cpus()))
    keep_freed_memory()
    info = model if isinstance(model, ModelInfo) else read_model_info(model)
    kernels, reason = _kernels(attention)
    if deterministic and kernels is None:
        raise AttentionError(f"deterministic: torch computes everything ({reason}), not the compiled kernels")
    if deterministic and not has_own_implementation(info):  # before transformers is imported and weights are read
        raise AttentionError("deterministic: transformers runs this model, and torch multiplies its matrices")
    chosen = _fastest_dtype(info, kernels, deterministic=deterministic) if dtype == "auto" else DTYPES[dtype]
    with torch.inference_mode():
        loaded = load_model(info, chosen, kernels, weight_dtype, deterministic=deterministic)
    kv_type = chosen if kv_dtype == "auto" else KV_DTYPES[kv_dtype]
    geometry = KvGeometry(
        loaded.shape.num_layers, loaded.shape.num_kv_heads, loaded.shape.head_dim, block_size, kv_type
    )
    backend, refusal = _backend(attention, kernels, geometry)
    invariant = loaded.batch_invariant and backend.batch_invariant
    log.info("attention", extra=kv(backend=backend.name, reason=refusal or reason, deterministic=invariant))
    if deterministic and not invariant:
        raise AttentionError(_not_deterministic(loaded, backend, refusal or reason))
    runner = PagedRunner(info, loaded, backend, geometry, weight_dtype)
    log.info("kv block", extra=kv(kv_dtype=runner.kv_dtype_name, arithmetic=runner.geometry.arithmetic))
    return runner


def _fastest_dtype(info: ModelInfo, kernels: Library | None, *, deterministic: bool) -> torch.dtype:
    """bfloat16 where the CPU multiplies it, or our kernels do for it in vectors: the same speed for prompts as float32
    in torch, and half the bytes of weights to read for each token. Where it must be `deterministic` always."""
    fast = kernels is not None and (deterministic or kernels.isa != PORTABLE)
    ours = fast and has_own_implementation(info)
    return torch.bfloat16 if ours or packs_bfloat16() else torch.float32


def _kernels(attention: str) -> tuple[Library | None, str]:
    """The compiled kernels, None for plain torch; and why. Raises AttentionError if they are forced and not there."""
    if attention == "sdpa":
        return None, "forced"
    try:
        library = load_library()
    except NativeError as error:
        if attention == "native":
            raise AttentionError(f"attention backend native: {error}") from error
        return None, str(error)
    use_only_what_agrees(library)
    return library, f"{'forced' if attention == 'native' else 'the fastest on CPUs'} ({library.isa})"


def _backend(attention: str, kernels: Library | None, geometry: KvGeometry) -> tuple[AttentionBackend, str | None]:
    """The backend, and why it is not the compiled one. Raises AttentionError if a forced one refuses the blocks."""
    if kernels is None:
        return _accepted(SdpaBackend(), geometry), None
    native = NativeBackend(kernels)
    refusal = native.refusal(geometry)
    if refusal is None:
        return native, None
    if attention == "native":
        raise AttentionError(refusal)
    return _accepted(SdpaBackend(), geometry), refusal


def _not_deterministic(model: CausalLM, backend: AttentionBackend, reason: str) -> str:
    """Why the logits of a sequence may depend on other sequences."""
    if not backend.batch_invariant:
        return f"deterministic: attention is computed by {backend.name} ({reason}), not by the compiled kernels"
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"deterministic: torch multiplies matrices ({model.implementation}, {dtype}); "
        "the compiled kernels do for the own implementation's bfloat16, int8 and gguf weights"
    )


def _accepted(backend: AttentionBackend, geometry: KvGeometry) -> AttentionBackend:
    refusal = backend.refusal(geometry)
    if refusal is not None:
        raise AttentionError(refusal)
    return backend


def keep_freed_memory() -> None:
    """Let the C allocator keep what is freed instead of giving it back to the system after every large tensor.

    Activations of a step are megabytes that come and go hundreds of times; by default each is a fresh mapping whose
    pages fault in one by one (a fifth of all CPU time, measured). One arena, because only the main one grows without
    the 64 MiB limit and one thread computes. Does nothing where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30)):
            mallopt(option, value)


def usable_cpus() -> int:
    """CPUs this process may really use: its affinity, and the cgroup's quota rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or none with a CPU controller
        pass
    return max(1, count)
