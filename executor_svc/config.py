"""Options of an executor process."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from pagemill.endpoints import EXECUTORS_SOCKET, check_host, default_endpoint
from pagemill.settings import ServiceSettings


def _default_name() -> str:
    host = "".join(char for char in socket.gethostname() if char.isascii() and (char.isalnum() or char in "-_."))
    return f"{host or 'executor'}-{os.getpid()}"[:128]


class ExecutorSettings(ServiceSettings):
    """What an operator may tune. Everything measured (blocks, rates) is in the hello, never written back here."""

    prog: ClassVar[str] = "pagemill executor"

    model: Path = Field(description="directory in Hugging Face form (safetensors), or a GGUF file")
    scheduler_endpoint: str = Field(
        default_factory=lambda: default_endpoint(EXECUTORS_SOCKET),
        description="where the scheduler takes executors: ipc://PATH or tcp://HOST:PORT",
    )
    insecure: bool = Field(
        default=False,
        description="allow what is neither encrypted nor authenticated: a tcp:// endpoint, metrics beyond loopback",
    )
    name: str = Field(
        default_factory=_default_name,
        description="name of this executor in logs and metrics; visible ASCII without '/'",
        pattern=r"^[!-.0-~]{1,128}$",
    )
    device: Literal["cpu"] = Field(default="cpu", description="where the model runs; cpu is the only choice so far")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="type of weights and activations; auto: bfloat16 where this CPU, or the compiled kernels on it,"
        " compute it fast",
    )
    weight_dtype: Literal["auto", "int8", "gguf"] = Field(
        default="auto",
        description="what weights are kept in; auto: the type that --dtype gives; int8: 8 bits with a scale per output,"
        " made at the start from any file; gguf: Q4_0, Q4_1 and Q8_0 matrices as the GGUF file has them. With the last"
        " two, inputs of products become int8 on the way",
    )
    kv_dtype: Literal["auto", "int8", "bfloat16", "float32"] = Field(
        default="auto",
        description="type of keys and values; auto: the type that --dtype gives; int8, with a scale per position and"
        " head: about twice the tokens of bfloat16 in the same memory",
    )
    attention_backend: Literal["auto", "native", "sdpa"] = Field(
        default="auto",
        description="native: compiled kernels, also for norms, rotation, SiLU and products with bfloat16 weights; sdpa:"
        " plain torch throughout; auto: native where they were compiled and serve the model",
    )
    deterministic: bool = Field(
        default=False,
        description="do not start where the bits of a sequence's logits could depend on the sequences beside it, on how"
        " its prompt is cut or on preemption. Wherever the compiled kernels compute everything they do not, with or"
        " without this; the log says so at the start. On CPUs with AMX the kernels then do what oneDNN does faster",
    )
    num_threads: int = Field(default=0, ge=0, le=1024, description="compute threads; 0: one per usable core")
    block_size: int = Field(default=16, ge=1, le=1024, description="token positions per KV block")
    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="most sequences in one step")
    max_num_batched_tokens: int = Field(default=512, ge=1, le=1_048_576, description="most tokens in one step")
    max_model_len: int | None = Field(
        default=None, ge=2, description="most tokens of one sequence, prompt and output; default: the model's own"
    )
    memory_utilization: float = Field(
        default=0.8,
        gt=0.0,
        le=1.0,
        description="share of the memory limit (container's or machine's) that the executor may use in all",
    )
    kv_memory_bytes: int | None = Field(default=None, ge=1, description="bytes of the KV pool; default: what is left")
    num_device_blocks: int | None = Field(default=None, ge=1, description="blocks of the KV pool; default: what fits")
    host_kv_memory_bytes: int | None = Field(
        default=None,
        ge=0,
        description="bytes of the host tier, to which blocks are swapped out; 0: none; default: half of what the KV"
        " pool leaves, at most twice its size",
    )
    copy_delay_ms: float = Field(
        default=0.0,
        ge=0.0,
        le=60_000.0,
        description="for tests: milliseconds that each copy between tiers waits before it begins",
    )
    copy_bytes_per_s: float = Field(
        default=0.0,
        ge=0.0,
        description="for benchmarks: copies between tiers are slowed down to this many bytes per second; 0: full speed",
    )
    verify_copies: bool = Field(
        default=False,
        description="for debugging: check the checksum of every copied block; a row with a changed block fails",
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of the metrics page")
    metrics_port: int = Field(default=9102, ge=0, le=65535, description="port of the metrics page; 0: no page")
    lease_ms: int = Field(
        default=2000,
        ge=100,
        le=3_600_000,
        description="milliseconds of the scheduler's silence after which it counts as dead, until it names its own",
    )
    exit_after_reject: bool = Field(
        default=True, description="exit when the scheduler refuses this executor; otherwise ask again every 5 seconds"
    )
    die_with_parent: bool = Field(default=False, description="end when the process that started this one ends")

    @model_validator(mode="after")
    def _plaintext_stays_at_home(self) -> ExecutorSettings:
        check_host(self.metrics_host, "--metrics-host", insecure=self.insecure)
        return self
