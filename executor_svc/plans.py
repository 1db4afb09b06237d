"""A step plan as checked columns, and what a step gave: the values between the codec, the mirror and the step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from executor_svc.kv.copy_engine import CopyReport, Pairs
from pagemill.engine.v1 import executor_pb2 as pb

Int32s = NDArray[np.int32]

NO_TOKEN = -1
"""In a result: the row gave no token."""

EMPTY: Int32s = np.zeros(0, np.int32)
EMPTY.flags.writeable = False
NO_PAIRS: Pairs = (EMPTY, EMPTY)


class PlanError(ValueError):
    """A plan of which nothing can be run; the text is for the log."""


class MirrorError(PlanError):
    """The scheduler expects other lanes than there are, whose digest is `digest`."""

    def __init__(self, expected: int, digest: int) -> None:
        super().__init__(f"state digest {expected:#010x}, the mirror's is {digest:#010x}")
        self.digest = digest


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What the executor said in its hello; plans beyond it are refused."""

    num_lanes: int
    num_blocks: int
    max_rows: int
    max_tokens: int
    max_model_len: int
    vocab_size: int
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LaneSampling:
    """How a lane's tokens are chosen; checked by `codec.check_sampling`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    min_tokens: int
    stop_token_ids: Int32s


@dataclass(frozen=True, slots=True)
class AdmitOp:
    """A sequence gets a lane. `fault` says why it does not fit the lane; such a lane's rows fail."""

    lane: int
    generation: int
    token_ids: Int32s
    num_prompt_tokens: int
    num_cached_tokens: int
    block_ids: Int32s
    sampling: LaneSampling
    choice_index: int
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class DecodedPlan:
    """A plan as columns; fields as in the proto, lanes and copied blocks in range, parallel columns equally long.

    Copies are pairs of columns (source, destination), as `executor_svc.kv.copy_engine.Pairs` demands them.
    """

    step_id: int
    release_lanes: Int32s = field(default_factory=lambda: EMPTY)
    rewind_lanes: Int32s = field(default_factory=lambda: EMPTY)
    rewind_num_tokens: Int32s = field(default_factory=lambda: EMPTY)
    rewind_num_blocks: Int32s = field(default_factory=lambda: EMPTY)
    swap_out: Pairs = NO_PAIRS
    copy: Pairs = NO_PAIRS
    swap_in: Pairs = NO_PAIRS
    admit: tuple[AdmitOp, ...] = ()
    append_lanes: Int32s = field(default_factory=lambda: EMPTY)
    append_block_ids: Int32s = field(default_factory=lambda: EMPTY)
    repeat_decode: bool = False
    row_lanes: Int32s = field(default_factory=lambda: EMPTY)
    row_num_tokens: Int32s | None = None
    deadline_ms: int = 0
    state_digest: int | None = None

    @property
    def has_copies(self) -> bool:
        """Whether there is anything to copy."""
        return bool(self.swap_out[0].size or self.copy[0].size or self.swap_in[0].size)


@dataclass(slots=True)
class StepOutcome:
    """What one step gave, before it is a message."""

    step_id: int
    token_ids: Int32s = field(default_factory=lambda: EMPTY)
    """(num_rows,) NO_TOKEN where a row gave none."""
    row_errors: dict[int, pb.RowErrorCode] = field(default_factory=dict)
    """Failed rows by index in the batch."""
    failed: bool = False
    wait_us: int = 0
    execute_us: int = 0
    copies: CopyReport | None = None
    """Copies of this or earlier steps that have finished; None: none has."""
    copy_wait_us: int = 0
    """Part of `execute_us`: the batch stood still for copies."""
    num_mapped_blocks: int = 0
    """Distinct device blocks in the tables of all lanes after the step."""
    state_digest: int | None = None
    """The mirror's before the plan, where the plan expected another."""
