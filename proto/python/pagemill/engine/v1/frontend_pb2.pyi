from pagemill.engine.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StreamError(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_ERROR_UNSPECIFIED: _ClassVar[StreamError]
    STREAM_ERROR_PROMPT_EXCEEDS_KV_CAPACITY: _ClassVar[StreamError]
    STREAM_ERROR_QUEUE_FULL: _ClassVar[StreamError]
    STREAM_ERROR_QUEUE_TIMEOUT: _ClassVar[StreamError]
    STREAM_ERROR_DEADLINE: _ClassVar[StreamError]
    STREAM_ERROR_NO_EXECUTOR: _ClassVar[StreamError]
    STREAM_ERROR_DRAINING: _ClassVar[StreamError]
    STREAM_ERROR_NUMERICAL: _ClassVar[StreamError]
    STREAM_ERROR_INTERNAL: _ClassVar[StreamError]
    STREAM_ERROR_CONTEXT_LENGTH: _ClassVar[StreamError]
    STREAM_ERROR_POISON: _ClassVar[StreamError]

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_REASON_UNSPECIFIED: _ClassVar[EndReason]
    END_REASON_STOP: _ClassVar[EndReason]
    END_REASON_LENGTH: _ClassVar[EndReason]
    END_REASON_CANCELLED: _ClassVar[EndReason]

class AdminOperation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMIN_OPERATION_UNSPECIFIED: _ClassVar[AdminOperation]
    ADMIN_OPERATION_CHECK_INVARIANTS: _ClassVar[AdminOperation]
    ADMIN_OPERATION_FLUSH_PREFIX_CACHE: _ClassVar[AdminOperation]
    ADMIN_OPERATION_GET_LOAD: _ClassVar[AdminOperation]
STREAM_ERROR_UNSPECIFIED: StreamError
STREAM_ERROR_PROMPT_EXCEEDS_KV_CAPACITY: StreamError
STREAM_ERROR_QUEUE_FULL: StreamError
STREAM_ERROR_QUEUE_TIMEOUT: StreamError
STREAM_ERROR_DEADLINE: StreamError
STREAM_ERROR_NO_EXECUTOR: StreamError
STREAM_ERROR_DRAINING: StreamError
STREAM_ERROR_NUMERICAL: StreamError
STREAM_ERROR_INTERNAL: StreamError
STREAM_ERROR_CONTEXT_LENGTH: StreamError
STREAM_ERROR_POISON: StreamError
END_REASON_UNSPECIFIED: EndReason
END_REASON_STOP: EndReason
END_REASON_LENGTH: EndReason
END_REASON_CANCELLED: EndReason
ADMIN_OPERATION_UNSPECIFIED: AdminOperation
ADMIN_OPERATION_CHECK_INVARIANTS: AdminOperation
ADMIN_OPERATION_FLUSH_PREFIX_CACHE: AdminOperation
ADMIN_OPERATION_GET_LOAD: AdminOperation

class FrontendEnvelope(_message.Message):
    __slots__ = ("protocol", "epoch", "seq", "ack", "hello", "start", "reject", "submit", "cancel", "accepted", "rejected", "tokens", "ended", "status", "heartbeat", "goodbye", "admin_request", "admin_reply")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ADMIN_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ADMIN_REPLY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    epoch: int
    seq: int
    ack: int
    hello: FrontendHello
    start: FrontendStart
    reject: FrontendReject
    submit: Submit
    cancel: CancelStreams
    accepted: StreamAccepted
    rejected: StreamRejected
    tokens: TokenBatch
    ended: StreamEnded
    status: SchedulerStatus
    heartbeat: FrontendHeartbeat
    goodbye: FrontendGoodbye
    admin_request: AdminRequest
    admin_reply: AdminReply
    def __init__(self, protocol: _Optional[int] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., ack: _Optional[int] = ..., hello: _Optional[_Union[FrontendHello, _Mapping]] = ..., start: _Optional[_Union[FrontendStart, _Mapping]] = ..., reject: _Optional[_Union[FrontendReject, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[CancelStreams, _Mapping]] = ..., accepted: _Optional[_Union[StreamAccepted, _Mapping]] = ..., rejected: _Optional[_Union[StreamRejected, _Mapping]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ..., ended: _Optional[_Union[StreamEnded, _Mapping]] = ..., status: _Optional[_Union[SchedulerStatus, _Mapping]] = ..., heartbeat: _Optional[_Union[FrontendHeartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[FrontendGoodbye, _Mapping]] = ..., admin_request: _Optional[_Union[AdminRequest, _Mapping]] = ..., admin_reply: _Optional[_Union[AdminReply, _Mapping]] = ...) -> None: ...

class FrontendHello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "schema_hash", "version", "incarnation", "host", "model_fingerprint")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    schema_hash: str
    version: str
    incarnation: str
    host: str
    model_fingerprint: str
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., schema_hash: _Optional[str] = ..., version: _Optional[str] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class FrontendStart(_message.Message):
    __slots__ = ("chosen_protocol", "lease_ms", "status")
    CHOSEN_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    chosen_protocol: int
    lease_ms: int
    status: SchedulerStatus
    def __init__(self, chosen_protocol: _Optional[int] = ..., lease_ms: _Optional[int] = ..., status: _Optional[_Union[SchedulerStatus, _Mapping]] = ...) -> None: ...

class FrontendReject(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("stream", "client_request_id", "tenant", "priority", "prompt_ids", "emitted_ids", "sampling", "choice_index", "max_tokens", "deadline_ms", "max_queue_ms", "cache_salt", "age_ms")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    client_request_id: str
    tenant: str
    priority: int
    prompt_ids: bytes
    emitted_ids: bytes
    sampling: _sampling_pb2.Sampling
    choice_index: int
    max_tokens: int
    deadline_ms: int
    max_queue_ms: int
    cache_salt: bytes
    age_ms: int
    def __init__(self, stream: _Optional[int] = ..., client_request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., emitted_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., choice_index: _Optional[int] = ..., max_tokens: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., max_queue_ms: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., age_ms: _Optional[int] = ...) -> None: ...

class CancelStreams(_message.Message):
    __slots__ = ("streams",)
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    streams: bytes
    def __init__(self, streams: _Optional[bytes] = ...) -> None: ...

class StreamAccepted(_message.Message):
    __slots__ = ("stream",)
    STREAM_FIELD_NUMBER: _ClassVar[int]
    stream: int
    def __init__(self, stream: _Optional[int] = ...) -> None: ...

class StreamRejected(_message.Message):
    __slots__ = ("stream", "error", "message", "retry_after_ms")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    error: StreamError
    message: str
    retry_after_ms: int
    def __init__(self, stream: _Optional[int] = ..., error: _Optional[_Union[StreamError, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("streams", "counts", "first_index", "token_ids")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    streams: bytes
    counts: bytes
    first_index: bytes
    token_ids: bytes
    def __init__(self, streams: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., first_index: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class StreamEnded(_message.Message):
    __slots__ = ("stream", "reason", "error", "message", "num_output_tokens", "cached_tokens", "queue_ms", "computed_tokens", "num_preemptions", "swapped_bytes", "retry_after_ms")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    stream: int
    reason: EndReason
    error: StreamError
    message: str
    num_output_tokens: int
    cached_tokens: int
    queue_ms: int
    computed_tokens: int
    num_preemptions: int
    swapped_bytes: int
    retry_after_ms: int
    def __init__(self, stream: _Optional[int] = ..., reason: _Optional[_Union[EndReason, str]] = ..., error: _Optional[_Union[StreamError, str]] = ..., message: _Optional[str] = ..., num_output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., swapped_bytes: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("ready", "draining", "model_fingerprint", "max_model_len", "kv_capacity_tokens", "queue_requests", "queue_tokens", "running_requests", "num_executors")
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    draining: bool
    model_fingerprint: str
    max_model_len: int
    kv_capacity_tokens: int
    queue_requests: int
    queue_tokens: int
    running_requests: int
    num_executors: int
    def __init__(self, ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., model_fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., queue_requests: _Optional[int] = ..., queue_tokens: _Optional[int] = ..., running_requests: _Optional[int] = ..., num_executors: _Optional[int] = ...) -> None: ...

class FrontendHeartbeat(_message.Message):
    __slots__ = ("num_streams",)
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    num_streams: int
    def __init__(self, num_streams: _Optional[int] = ...) -> None: ...

class FrontendGoodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class AdminRequest(_message.Message):
    __slots__ = ("id", "operation")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    id: int
    operation: AdminOperation
    def __init__(self, id: _Optional[int] = ..., operation: _Optional[_Union[AdminOperation, str]] = ...) -> None: ...

class AdminReply(_message.Message):
    __slots__ = ("id", "error", "violations", "num_violations", "num_flushed_blocks", "load")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_FLUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    id: int
    error: str
    violations: _containers.RepeatedScalarFieldContainer[str]
    num_violations: int
    num_flushed_blocks: int
    load: SchedulerLoad
    def __init__(self, id: _Optional[int] = ..., error: _Optional[str] = ..., violations: _Optional[_Iterable[str]] = ..., num_violations: _Optional[int] = ..., num_flushed_blocks: _Optional[int] = ..., load: _Optional[_Union[SchedulerLoad, _Mapping]] = ...) -> None: ...

class SchedulerLoad(_message.Message):
    __slots__ = ("queue_requests", "queue_tokens", "running_requests", "swapped_requests", "tiers")
    QUEUE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    queue_requests: int
    queue_tokens: int
    running_requests: int
    swapped_requests: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierBlocks]
    def __init__(self, queue_requests: _Optional[int] = ..., queue_tokens: _Optional[int] = ..., running_requests: _Optional[int] = ..., swapped_requests: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierBlocks, _Mapping]]] = ...) -> None: ...

class TierBlocks(_message.Message):
    __slots__ = ("tier", "total", "free", "used", "cached", "in_flight", "reserved")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    total: int
    free: int
    used: int
    cached: int
    in_flight: int
    reserved: int
    def __init__(self, tier: _Optional[str] = ..., total: _Optional[int] = ..., free: _Optional[int] = ..., used: _Optional[int] = ..., cached: _Optional[int] = ..., in_flight: _Optional[int] = ..., reserved: _Optional[int] = ...) -> None: ...
