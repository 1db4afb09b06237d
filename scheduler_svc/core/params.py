"""The numbers the scheduler core works with, validated before they come here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

SeqId = NewType("SeqId", int)
"""Names one sequence for the life of a scheduler; made by the engine, never reused."""


class QueuePolicy(Enum):
    """In which order waiting sequences are considered; see `queues`."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    LENGTH_AWARE = "length-aware"


class PreemptionMode(Enum):
    """What becomes of the blocks of a sequence that makes room; see `preemption`."""

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


class HostCache(Enum):
    """When blocks that are kept for reuse are copied to the host tier; see `memory`."""

    OFF = "off"
    ON_EVICT = "on-evict"
    WRITE_THROUGH = "write-through"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What an operator may tune. Counts are per step unless they say otherwise."""

    max_num_batched_tokens: int = 256
    """Token budget of one step, decode rows included."""
    max_num_seqs: int = 64
    """Most sequences running at once."""
    max_prefill_chunk: int = 192
    """Most prompt tokens of one sequence in one step, so that a long prompt cannot take a whole step."""
    max_step_ms: int = 250
    """What a step may take by the rates the executor has shown; prompts are cut for it. 0: no limit. See `pace`."""
    queue_policy: QueuePolicy = QueuePolicy.LENGTH_AWARE
    max_skip_ahead: int = 8
    """How many sequences may be admitted past one that does not fit now, before admission waits for it."""
    watermark: float = 0.01
    """Share of the device blocks kept free at admission, so that running sequences can grow without preemption."""
    growth_reserve: float = 1.0
    """Share of what running sequences are expected to grow by that admission leaves to them; 0 for none."""
    pipeline_depth: int = 2
    """Most plans whose results are not in; 2 hides scheduling and the wire behind execution."""
    max_queue_requests: int = 10_000
    """Waiting sequences beyond this are refused with QUEUE_FULL."""
    max_queue_tokens: int = 50_000_000
    """Waiting prompt tokens beyond this are refused with QUEUE_FULL."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    prefix_cache: bool = True
    """Whether full blocks are kept under the hash of their tokens and found again by later prompts."""
    prefix_cache_share: float = 0.5
    """Share of a tier that cached blocks of one salt keep when others need room; 1: no limit. See `shares`."""
    host_cache: HostCache = HostCache.ON_EVICT


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What one executor said in its hello."""

    block_size: int
    """Token positions per block."""
    num_device_blocks: int
    max_rows: int
    max_tokens: int
    num_lanes: int
    """Lane ids are below this; at least max_num_seqs * (pipeline_depth + 1)."""
    max_model_len: int
    """Most tokens of one sequence, prompt and output."""
    num_host_blocks: int = 0
    """Blocks of the host tier; 0: this executor cannot swap."""
    bytes_per_block: int = 0
    """Bytes of one block in either tier."""
    swap_out_bytes_per_s: float = 0.0
    """Measured, device to host; 0: unknown."""
    swap_in_bytes_per_s: float = 0.0
    """Measured, host to device; 0: unknown."""
    prefill_tokens_per_s: float = 0.0
    """Measured; 0: unknown."""
    decode_step_s: tuple[float, ...] = ()
    """Item k: seconds of a step of 2^k to 2^(k+1) - 1 decode rows and nothing else; 0: unknown. No hello says it."""
    model_fingerprint: str = ""
    """Digest of configuration and weights; with `kv_dtype` it decides whose blocks are alike."""
    kv_dtype: str = ""
    """Type of keys and values."""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How tokens are chosen, opaque to the core: it goes into Admit unread."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One submitted sequence."""

    seq_id: SeqId
    prompt_ids: list[int]
    """At least one; never written to afterwards."""
    max_tokens: int
    """Most output tokens, at least 1; the core lowers it to what the context limit allows."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the sequence, end-of-sequence ids included. Not honoured before sampling.min_tokens outputs."""
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    choice_index: int = 0
    priority: int = 0
    """Higher runs first, under every policy but FCFS."""
    emitted_ids: list[int] = field(default_factory=list)
    """Output already delivered before a resubmission; generation goes on behind it."""
    arrival: float = 0.0
    """Seconds on the clock that `now` arguments use."""
    deadline: float | None = None
    """Seconds on that clock; past it the sequence is dropped wherever it is."""
    queue_deadline: float | None = None
    """Past it the sequence is dropped if it has never run."""
    group: int = 0
    """Who the tokens are for (the engine's number of a gateway); events are batched by it. The core only carries it."""
    cache_salt: bytes = b""
    """Sequences share cached blocks only if their salts are equal; derived from the tenant."""
    adapter: str = ""
    """Name of an adapter; sequences of different ones never share blocks."""
    reads_prefix_cache: bool = True
    """False: every position is computed anew (prompt log probabilities need that); its blocks may still be kept."""
