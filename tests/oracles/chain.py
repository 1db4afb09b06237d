"""The chain oracle: the next id is a hash of all ids before it, seed and position."""

from __future__ import annotations

from pagemill.engine.v1 import executor_pb2 as pb
from tests.oracles.base import Lane, OracleExecutor
from tests.oracles.expected import START, digest_after, token_after


class ChainExecutor(OracleExecutor):
    """Digests live in the mirror: nothing depends on blocks."""

    def on_session(self) -> None:
        self._chains: dict[int, tuple[int, int]] = {}

    def on_admit(self, lane: Lane, envelope: pb.ExecutorEnvelope) -> None:
        self._chains[lane.lane] = (START, 0)
        self.write(lane, 0, lane.position)

    def write(self, lane: Lane, start: int, count: int) -> None:
        previous, total = self._chains[lane.lane]
        for token_id in lane.tokens[start : start + count]:
            previous = digest_after(previous, token_id)
            total += previous
        self._chains[lane.lane] = (previous, total)

    def next_ids(self, lane: Lane) -> list[int] | pb.RowError:
        _, total = self._chains[lane.lane]
        return [
            token_after(
                total,
                len(lane.tokens),
                seed=lane.seed,
                choice=lane.choice,
                vocab_size=self.geometry.vocab_size,
                forbidden=lane.forbidden(),
            )
        ]
