from pagemill.engine.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_STATUS_UNSPECIFIED: _ClassVar[StepStatus]
    STEP_STATUS_OK: _ClassVar[StepStatus]
    STEP_STATUS_ROW_ERRORS: _ClassVar[StepStatus]
    STEP_STATUS_FAILED: _ClassVar[StepStatus]

class RowErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_ERROR_CODE_UNSPECIFIED: _ClassVar[RowErrorCode]
    ROW_ERROR_CODE_NUMERICAL: _ClassVar[RowErrorCode]
    ROW_ERROR_CODE_BAD_ROW: _ClassVar[RowErrorCode]
    ROW_ERROR_CODE_INTERNAL: _ClassVar[RowErrorCode]

class ExecutorState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTOR_STATE_UNSPECIFIED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_LOADING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_WARMING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_IDLE: _ClassVar[ExecutorState]
    EXECUTOR_STATE_RUNNING: _ClassVar[ExecutorState]
STEP_STATUS_UNSPECIFIED: StepStatus
STEP_STATUS_OK: StepStatus
STEP_STATUS_ROW_ERRORS: StepStatus
STEP_STATUS_FAILED: StepStatus
ROW_ERROR_CODE_UNSPECIFIED: RowErrorCode
ROW_ERROR_CODE_NUMERICAL: RowErrorCode
ROW_ERROR_CODE_BAD_ROW: RowErrorCode
ROW_ERROR_CODE_INTERNAL: RowErrorCode
EXECUTOR_STATE_UNSPECIFIED: ExecutorState
EXECUTOR_STATE_LOADING: ExecutorState
EXECUTOR_STATE_WARMING: ExecutorState
EXECUTOR_STATE_IDLE: ExecutorState
EXECUTOR_STATE_RUNNING: ExecutorState

class ExecutorEnvelope(_message.Message):
    __slots__ = ("protocol", "epoch", "seq", "ack", "hello", "session_start", "reject", "plan", "result", "nack", "heartbeat", "goodbye")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SESSION_START_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    epoch: int
    seq: int
    ack: int
    hello: ExecutorHello
    session_start: SessionStart
    reject: Reject
    plan: StepPlan
    result: StepResult
    nack: Nack
    heartbeat: Heartbeat
    goodbye: Goodbye
    def __init__(self, protocol: _Optional[int] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., ack: _Optional[int] = ..., hello: _Optional[_Union[ExecutorHello, _Mapping]] = ..., session_start: _Optional[_Union[SessionStart, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class ExecutorHello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "schema_hash", "version", "incarnation", "host", "device", "rank", "world_size", "model_fingerprint", "tokenizer_hash", "dtype", "kv_dtype", "block_size", "num_device_blocks", "num_host_blocks", "bytes_per_block", "max_rows", "max_tokens", "num_lanes", "max_model_len", "swap_out_bytes_per_s", "swap_in_bytes_per_s", "prefill_tokens_per_s", "features", "vocab_size")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LANES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    schema_hash: str
    version: str
    incarnation: str
    host: str
    device: str
    rank: int
    world_size: int
    model_fingerprint: str
    tokenizer_hash: str
    dtype: str
    kv_dtype: str
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    bytes_per_block: int
    max_rows: int
    max_tokens: int
    num_lanes: int
    max_model_len: int
    swap_out_bytes_per_s: float
    swap_in_bytes_per_s: float
    prefill_tokens_per_s: float
    features: _containers.RepeatedScalarFieldContainer[str]
    vocab_size: int
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., schema_hash: _Optional[str] = ..., version: _Optional[str] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_tokens: _Optional[int] = ..., num_lanes: _Optional[int] = ..., max_model_len: _Optional[int] = ..., swap_out_bytes_per_s: _Optional[float] = ..., swap_in_bytes_per_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., features: _Optional[_Iterable[str]] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class SessionStart(_message.Message):
    __slots__ = ("chosen_protocol", "lease_ms", "first_step_id", "pipeline_depth")
    CHOSEN_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    chosen_protocol: int
    lease_ms: int
    first_step_id: int
    pipeline_depth: int
    def __init__(self, chosen_protocol: _Optional[int] = ..., lease_ms: _Optional[int] = ..., first_step_id: _Optional[int] = ..., pipeline_depth: _Optional[int] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "release_lanes", "rewind_lanes", "rewind_num_tokens", "rewind_num_blocks", "swap_out_src", "swap_out_dst", "copy_src", "copy_dst", "swap_in_src", "swap_in_dst", "admit", "append_lanes", "append_block_ids", "repeat_decode", "row_lanes", "row_num_tokens", "draft_ids", "num_drafts", "want_logprobs", "mask_follows", "deadline_ms", "state_digest")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_LANES_FIELD_NUMBER: _ClassVar[int]
    REWIND_LANES_FIELD_NUMBER: _ClassVar[int]
    REWIND_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWIND_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_SRC_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_DST_FIELD_NUMBER: _ClassVar[int]
    COPY_SRC_FIELD_NUMBER: _ClassVar[int]
    COPY_DST_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_SRC_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_DST_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    APPEND_LANES_FIELD_NUMBER: _ClassVar[int]
    APPEND_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    REPEAT_DECODE_FIELD_NUMBER: _ClassVar[int]
    ROW_LANES_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    WANT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MASK_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    release_lanes: bytes
    rewind_lanes: bytes
    rewind_num_tokens: bytes
    rewind_num_blocks: bytes
    swap_out_src: bytes
    swap_out_dst: bytes
    copy_src: bytes
    copy_dst: bytes
    swap_in_src: bytes
    swap_in_dst: bytes
    admit: _containers.RepeatedCompositeFieldContainer[Admit]
    append_lanes: bytes
    append_block_ids: bytes
    repeat_decode: bool
    row_lanes: bytes
    row_num_tokens: bytes
    draft_ids: bytes
    num_drafts: bytes
    want_logprobs: bool
    mask_follows: bool
    deadline_ms: int
    state_digest: int
    def __init__(self, step_id: _Optional[int] = ..., release_lanes: _Optional[bytes] = ..., rewind_lanes: _Optional[bytes] = ..., rewind_num_tokens: _Optional[bytes] = ..., rewind_num_blocks: _Optional[bytes] = ..., swap_out_src: _Optional[bytes] = ..., swap_out_dst: _Optional[bytes] = ..., copy_src: _Optional[bytes] = ..., copy_dst: _Optional[bytes] = ..., swap_in_src: _Optional[bytes] = ..., swap_in_dst: _Optional[bytes] = ..., admit: _Optional[_Iterable[_Union[Admit, _Mapping]]] = ..., append_lanes: _Optional[bytes] = ..., append_block_ids: _Optional[bytes] = ..., repeat_decode: _Optional[bool] = ..., row_lanes: _Optional[bytes] = ..., row_num_tokens: _Optional[bytes] = ..., draft_ids: _Optional[bytes] = ..., num_drafts: _Optional[bytes] = ..., want_logprobs: _Optional[bool] = ..., mask_follows: _Optional[bool] = ..., deadline_ms: _Optional[int] = ..., state_digest: _Optional[int] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("lane", "generation", "token_ids", "num_prompt_tokens", "num_cached_tokens", "block_ids", "sampling", "choice_index", "adapter", "flags")
    LANE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    lane: int
    generation: int
    token_ids: bytes
    num_prompt_tokens: int
    num_cached_tokens: int
    block_ids: bytes
    sampling: _sampling_pb2.Sampling
    choice_index: int
    adapter: str
    flags: int
    def __init__(self, lane: _Optional[int] = ..., generation: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., choice_index: _Optional[int] = ..., adapter: _Optional[str] = ..., flags: _Optional[int] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "code")
    ROW_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    row: int
    code: RowErrorCode
    def __init__(self, row: _Optional[int] = ..., code: _Optional[_Union[RowErrorCode, str]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "status", "token_ids", "num_tokens", "logprobs", "finished_copy_steps", "row_errors", "wait_us", "execute_us", "copy_us", "state_digest")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_COPY_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_US_FIELD_NUMBER: _ClassVar[int]
    COPY_US_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    status: StepStatus
    token_ids: bytes
    num_tokens: bytes
    logprobs: bytes
    finished_copy_steps: _containers.RepeatedScalarFieldContainer[int]
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    wait_us: int
    execute_us: int
    copy_us: int
    state_digest: int
    def __init__(self, step_id: _Optional[int] = ..., status: _Optional[_Union[StepStatus, str]] = ..., token_ids: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., finished_copy_steps: _Optional[_Iterable[int]] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., wait_us: _Optional[int] = ..., execute_us: _Optional[int] = ..., copy_us: _Optional[int] = ..., state_digest: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("last_step_id",)
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    last_step_id: int
    def __init__(self, last_step_id: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("state", "last_step_id", "since_ms", "percent")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    state: ExecutorState
    last_step_id: int
    since_ms: int
    percent: int
    def __init__(self, state: _Optional[_Union[ExecutorState, str]] = ..., last_step_id: _Optional[int] = ..., since_ms: _Optional[int] = ..., percent: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
