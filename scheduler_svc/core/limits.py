"""What one executor and the configuration allow together."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from cache_svc.blocks.geometry import blocks_for
from scheduler_svc.core.costs import OVERLAP, BlockCosts, block_costs
from scheduler_svc.core.events import Refusal, RefusalReason
from scheduler_svc.core.pace import StepPace, step_pace
from scheduler_svc.core.params import ExecutorLimits, HostCache, PreemptionMode, SchedulerConfig

_DEPTHS = range(1, 5)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The smaller of what the operator set and what the executor can, worked out once when it connects."""

    block_size: int
    num_blocks: int
    num_lanes: int
    max_seqs: int
    """Sequences running at once. At most the token budget, so that each can always have its one token."""
    max_tokens: int
    """Tokens in one step."""
    max_chunk: int
    """Prompt tokens of one sequence in one step."""
    max_model_len: int
    watermark_blocks: int
    """Blocks that stay free at admission, unless nothing runs."""
    num_host_blocks: int
    costs: BlockCosts
    pace: StepPace
    prefix_cache: bool
    prefix_cache_share: float
    host_cache: HostCache
    preemption_mode: PreemptionMode
    model_fingerprint: str
    kv_dtype: str

    @property
    def token_limit(self) -> int:
        """Most tokens of one sequence: the context, and every token must have a slot in a pool of its own."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def most_per_salt(self, num_blocks: int) -> int | None:
        """Cached blocks of a tier of that many that one salt keeps when others need room; None for no limit."""
        return max(1, int(num_blocks * self.prefix_cache_share)) if self.prefix_cache_share < 1.0 else None

    def num_blocks_in(self, share: float) -> int:
        """Blocks that can be copied to the host tier in that share of the time that a full step of prompts takes.

        0 where either rate is unknown. The batch waits for these copies, so they are not weighed by `OVERLAP`.
        """
        num_tokens = self.pace.num_prompt_tokens(0, self.max_tokens)
        step_s, copy_s = num_tokens / self.block_size * self.costs.recompute_s, self.costs.swap_out_s / OVERLAP
        return int(min(share * step_s / copy_s, self.num_blocks)) if max(step_s, copy_s) < inf else 0


def check_config(config: SchedulerConfig) -> None:
    """ValueError naming the first number that cannot work."""
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_prefill_chunk", "max_queue_requests"):
        if getattr(config, name) < 1:
            raise ValueError(f"Got {name} = {getattr(config, name)} but expected at least 1")
    if config.max_step_ms < 0:
        raise ValueError(f"Got max_step_ms = {config.max_step_ms} but expected at least 0")
    if config.max_skip_ahead < 0:
        raise ValueError(f"Got max_skip_ahead = {config.max_skip_ahead} but expected at least 0")
    if config.pipeline_depth not in _DEPTHS:
        raise ValueError(f"Got pipeline_depth = {config.pipeline_depth} but expected 1 to 4")
    if not 0.0 <= config.growth_reserve <= 1.0:
        raise ValueError(f"Got growth_reserve = {config.growth_reserve} but expected 0 to 1")
    if not 0.0 < config.prefix_cache_share <= 1.0:
        raise ValueError(f"Got prefix_cache_share = {config.prefix_cache_share} but expected a share above 0")
    if not 0.0 <= config.watermark < 1.0:
        raise ValueError(f"Got watermark = {config.watermark} but expected a share below 1")


def combine(config: SchedulerConfig, executor: ExecutorLimits) -> StepLimits:
    """The limits of a step. ValueError when the executor offers less than one of anything."""
    for name in ("block_size", "num_device_blocks", "max_rows", "max_tokens", "num_lanes", "max_model_len"):
        if getattr(executor, name) < 1:
            raise ValueError(f"Got {name} = {getattr(executor, name)} but expected at least 1")
    if executor.num_host_blocks < 0:
        raise ValueError(f"Got num_host_blocks = {executor.num_host_blocks} but expected at least 0")
    max_tokens = min(config.max_num_batched_tokens, executor.max_tokens)
    return StepLimits(
        block_size=executor.block_size,
        num_blocks=executor.num_device_blocks,
        num_lanes=executor.num_lanes,
        max_seqs=min(config.max_num_seqs, executor.max_rows, executor.num_lanes, max_tokens),
        max_tokens=max_tokens,
        max_chunk=config.max_prefill_chunk,
        max_model_len=executor.max_model_len,
        watermark_blocks=ceil(config.watermark * executor.num_device_blocks),
        num_host_blocks=executor.num_host_blocks,
        costs=block_costs(executor),
        pace=step_pace(config.max_step_ms, executor),
        prefix_cache=config.prefix_cache,
        prefix_cache_share=config.prefix_cache_share,
        host_cache=config.host_cache,
        preemption_mode=config.preemption_mode,
        model_fingerprint=executor.model_fingerprint,
        kv_dtype=executor.kv_dtype,
    )


def refuse_length(limits: StepLimits, prompt_len: int) -> Refusal | None:
    """Why a prompt of this length can never run with even one output token; None when it can."""
    if prompt_len + 1 > limits.max_model_len:
        return Refusal(
            RefusalReason.CONTEXT_LENGTH,
            f"the prompt has {prompt_len} tokens and the context limit is {limits.max_model_len}, "
            "which leaves no room for an output token",
        )
    needed = blocks_for(prompt_len + 1, limits.block_size)
    if needed > limits.num_blocks:
        return Refusal(
            RefusalReason.PROMPT_EXCEEDS_KV_CAPACITY,
            f"the prompt has {prompt_len} tokens and needs {needed} blocks of {limits.block_size} tokens with one "
            f"output token; the executor has {limits.num_blocks}",
        )
    return None
