from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "host", "incarnation", "uptime_ms", "model", "model_fingerprint", "ready", "draining", "scheduler_connected", "scheduler_draining", "num_executors", "max_model_len", "kv_capacity_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: str
    host: str
    incarnation: str
    uptime_ms: int
    model: str
    model_fingerprint: str
    ready: bool
    draining: bool
    scheduler_connected: bool
    scheduler_draining: bool
    num_executors: int
    max_model_len: int
    kv_capacity_tokens: int
    def __init__(self, version: _Optional[str] = ..., host: _Optional[str] = ..., incarnation: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., scheduler_connected: _Optional[bool] = ..., scheduler_draining: _Optional[bool] = ..., num_executors: _Optional[int] = ..., max_model_len: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("live_requests", "queue_requests", "queue_tokens", "running_requests", "swapped_requests", "tiers")
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    live_requests: int
    queue_requests: int
    queue_tokens: int
    running_requests: int
    swapped_requests: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierLoad]
    def __init__(self, live_requests: _Optional[int] = ..., queue_requests: _Optional[int] = ..., queue_tokens: _Optional[int] = ..., running_requests: _Optional[int] = ..., swapped_requests: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierLoad, _Mapping]]] = ...) -> None: ...

class TierLoad(_message.Message):
    __slots__ = ("tier", "total_blocks", "free_blocks", "used_blocks", "cached_blocks", "in_flight_blocks", "reserved_blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    total_blocks: int
    free_blocks: int
    used_blocks: int
    cached_blocks: int
    in_flight_blocks: int
    reserved_blocks: int
    def __init__(self, tier: _Optional[str] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., in_flight_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ...) -> None: ...

class ListExecutorsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListExecutorsResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainExecutorRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DrainExecutorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class CheckInvariantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckInvariantsResponse(_message.Message):
    __slots__ = ("violations", "num_violations")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    num_violations: int
    def __init__(self, violations: _Optional[_Iterable[str]] = ..., num_violations: _Optional[int] = ...) -> None: ...
