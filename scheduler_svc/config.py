"""Options of the scheduler process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from pagemill import endpoints
from pagemill.settings import ServiceSettings
from scheduler_svc.core.limits import check_config
from scheduler_svc.core.params import HostCache, PreemptionMode, QueuePolicy, SchedulerConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the loop needs to know besides `SchedulerConfig`; times in seconds."""

    lease_s: float = 2.0
    heartbeat_s: float = 0.25
    step_timeout_s: float = 120.0
    hello_timeout_s: float = 60.0
    no_executor_grace_s: float = 10.0
    drain_timeout_s: float = 30.0
    max_pending_tokens: int = 262_144
    check_every_plans: int = 1_024


class SchedulerSettings(ServiceSettings):
    """Decides what runs next; needs no accelerator. Gateways and executors connect to it."""

    prog: ClassVar[str] = "pagemill scheduler"

    gateway_endpoint: str = Field(
        default=endpoints.default_endpoint(endpoints.GATEWAYS_SOCKET),
        description="ipc://PATH or tcp://HOST:PORT (conventionally port 5560) to bind for gateways",
    )
    executor_endpoint: str = Field(
        default=endpoints.default_endpoint(endpoints.EXECUTORS_SOCKET),
        description="ipc://PATH or tcp://HOST:PORT (conventionally port 5561) to bind for executors",
    )
    insecure: bool = Field(
        default=False,
        description="allow what is neither encrypted nor authenticated: tcp:// endpoints, metrics beyond loopback",
    )

    max_num_batched_tokens: int = Field(
        default=256,
        ge=1,
        le=1_048_576,
        description="tokens of one step, decode rows included, where --max-step-ms leaves time for so many",
    )
    max_num_seqs: int = Field(
        default=64, ge=1, le=65_536, description="sequences running at once; the executor may lower it"
    )
    max_prefill_chunk: int = Field(
        default=192,
        ge=1,
        le=1_048_576,
        description="prompt tokens of one sequence in one step, so that a long prompt leaves room for a short one",
    )
    max_step_ms: int = Field(
        default=250,
        ge=0,
        le=600_000,
        description="prompts are cut so that a step takes at most this by the executor's measured rates, decode rows "
        "included: it bounds pauses between tokens, and a cancel waits for two steps; 0 for no limit",
    )
    queue_policy: Literal["fcfs", "priority", "length-aware"] = Field(
        default="length-aware",
        description="order of waiting requests; length-aware (short prompts first, long ones age: none is starved)",
    )
    max_skip_ahead: int = Field(
        default=8,
        ge=0,
        le=1_000,
        description="sequences admitted past one that does not fit now, before admission waits for it",
    )
    watermark: float = Field(
        default=0.01,
        ge=0.0,
        lt=1.0,
        description="share of the KV blocks kept free at admission, so that running sequences grow unpreempted",
    )
    growth_reserve: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="share of what running sequences are expected to grow by that admission leaves to them; 0 for none",
    )
    preemption_mode: Literal["auto", "swap", "recompute"] = Field(
        default="auto",
        description="what becomes of the KV blocks of a request that makes room; auto takes what costs least by the "
        "executor's measured rates, the others are for comparison",
    )
    prefix_cache: bool = Field(
        default=True, description="keep full KV blocks after their request and reuse them for prompts that begin alike"
    )
    prefix_cache_share: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="share of a tier's KV blocks that one cache salt's kept ones hold against others'; beyond it they "
        "are evicted first; 1 for no limit",
    )
    host_cache: Literal["on-evict", "write-through", "off"] = Field(
        default="on-evict",
        description="when KV blocks kept for reuse are copied to the executor's host memory: as they are evicted from "
        "the device, as soon as they are full, or never",
    )
    pipeline_depth: int = Field(
        default=2,
        ge=1,
        le=4,
        description="plans sent ahead of their results; 2 hides scheduling and the wire, more only adds latency",
    )
    max_queue_requests: int = Field(
        default=10_000, ge=1, le=1_000_000, description="waiting requests beyond this are refused with QUEUE_FULL"
    )
    max_queue_tokens: int = Field(
        default=50_000_000,
        ge=1,
        le=10_000_000_000,
        description="waiting prompt tokens beyond this are refused with QUEUE_FULL; the default is about 2 GB of ids",
    )

    max_pending_tokens: int = Field(
        default=262_144,
        ge=1,
        le=100_000_000,
        description="generated tokens that wait for a gateway which does not read, before it is detached; its streams "
        "go on in its next session",
    )
    lease_ms: int = Field(
        default=2_000,
        ge=100,
        le=600_000,
        description="milliseconds of silence after which a peer is dead; eight heartbeats",
    )
    heartbeat_ms: int = Field(default=250, ge=10, le=60_000, description="milliseconds between heartbeats")
    step_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="seconds one step may run before its executor is given up; a first step may compile",
    )
    hello_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="seconds a connected executor may take to load before the log says so, and the longest that "
        "requests wait for one that is loading",
    )
    no_executor_grace_s: float = Field(
        default=10.0,
        ge=0,
        le=86_400,
        description="seconds without an executor in which requests queue, before they are refused with NO_EXECUTOR; "
        "while one is loading --hello-timeout-s, if that is longer",
    )
    check_every_plans: int = Field(
        default=1_024,
        ge=1,
        le=1_000_000_000,
        description="step plans between two checks of the block accounting; it is also checked when idle. "
        "Below 64: between two comparisons with the executor's lanes, too",
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, le=86_400, description="seconds that running requests may take to finish after SIGTERM"
    )

    metrics_host: str = Field(default="127.0.0.1", description="address of the Prometheus endpoint")
    metrics_port: int = Field(default=9101, ge=0, le=65_535, description="its port; 0: no metrics endpoint")

    @model_validator(mode="after")
    def _check(self) -> SchedulerSettings:
        endpoints.parse(self.gateway_endpoint, insecure=self.insecure)
        endpoints.parse(self.executor_endpoint, insecure=self.insecure)
        endpoints.check_host(self.metrics_host, "--metrics-host", insecure=self.insecure)
        check_config(self.core())
        if self.heartbeat_ms * 2 > self.lease_ms:
            raise ValueError(f"heartbeat_ms = {self.heartbeat_ms} must be at most half of lease_ms = {self.lease_ms}")
        return self

    def core(self) -> SchedulerConfig:
        """The part the scheduler core needs."""
        values = {field.name: getattr(self, field.name) for field in fields(SchedulerConfig)}
        enums = {
            "queue_policy": QueuePolicy(self.queue_policy),
            "preemption_mode": PreemptionMode(self.preemption_mode),
            "host_cache": HostCache(self.host_cache),
        }
        return SchedulerConfig(**values | enums)

    def engine(self) -> EngineConfig:
        """The part the loop needs."""
        return EngineConfig(
            lease_s=self.lease_ms / 1000,
            heartbeat_s=self.heartbeat_ms / 1000,
            step_timeout_s=self.step_timeout_s,
            hello_timeout_s=self.hello_timeout_s,
            no_executor_grace_s=self.no_executor_grace_s,
            drain_timeout_s=self.drain_timeout_s,
            max_pending_tokens=self.max_pending_tokens,
            check_every_plans=self.check_every_plans,
        )
