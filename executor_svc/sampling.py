"""Chooses tokens: a pure function of (logits, parameters, seed, choice index, position), row by row.

A row is computed from its own values alone, in a buffer of its own, so it comes out the same bit for bit whatever its
neighbours are, whatever its place in the batch, and again after a preemption, a migration or a restart.

Randomness is counter-based. Each (seed, choice, position) gives a key, each (key, token) a number v in (0, 1); the
token that minimises ``-log1p(-v) / weight`` wins, with weight = exp(logit): exponential clocks racing, which is the
Gumbel-max trick in another dress. Chosen over inverting a cumulative sum because the noise belongs to the token: when
bf16 rounding moves all probabilities a little, the winner almost always stays, and filters change no one's noise.

Order: min_tokens mask, temperature, top-k, top-p, min-p. Ties go to the lower id. The arg-max passes every filter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]
UInt32s = NDArray[np.uint32]

MIN_TEMPERATURE = 1e-3
"""Below this a row is greedy. A token 0.02 below the best then has a chance of e**-20, and 0.02 is finer than bf16
logits are: what is left to decide is rounding (exact ties are common there) and, below 1e-30, an overflow."""

_CACHED_ROWS = 8
"""Rows that stay in the cache from the first pass to the second: 256 rows of 49,152 ids cost 10 us a row, not 14."""

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_SLACK = 1e-3
"""Relative margin of the float32 preselections, whose own error is below 1e-4; the float64 pass behind them decides."""
_CLIP = 64.0
"""exp(64) * 2**32 is finite in float32. A token that far below the best can win only with a v below 2**-80."""
_COARSE = np.uint32(1024)
"""From here on, 32 bits of v tell it to better than `_SLACK`."""


class NumericalError(ArithmeticError):
    """The logits of a row are not finite, or none may be chosen."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one token is chosen; ranges are checked before (`codec.check_sampling`)."""

    temperature: float
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""


def argmax_rows(logits: Float32s) -> tuple[Int64s, NDArray[np.bool_]]:
    """Per row of (rows, vocab) the lowest id of the largest logit, and whether all its logits are finite.

    An arg-max stops at a NaN and finds plus infinity, so only minus infinity needs a pass of its own.
    """
    best = np.empty(len(logits), np.int64)
    low = np.empty(len(logits), np.float32)
    for i in range(0, len(logits), _CACHED_ROWS):
        part = slice(i, i + _CACHED_ROWS)
        logits[part].argmax(axis=1, out=best[part])
        logits[part].min(axis=1, out=low[part])
    top = logits[np.arange(len(logits)), best]
    return best, np.isfinite(top) & np.isfinite(low)


class Sampler:
    """Chooses one row's token at a time. Keeps scratch buffers, no state: calls do not affect one another."""

    def __init__(self, vocab_size: int) -> None:
        self._row: Float32s = np.empty(vocab_size, np.float32)
        self._work: Float32s = np.empty(vocab_size, np.float32)
        self._early: Float32s = np.empty(vocab_size, np.float32)
        self._hash: UInt32s = np.empty(vocab_size, np.uint32)
        self._shifted: UInt32s = np.empty(vocab_size, np.uint32)
        self._spread: UInt32s = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B9)

    def choose(
        self,
        logits: Float32s,
        params: SamplingParams,
        *,
        seed: int,
        choice: int,
        position: int,
        held_back: Int64s | None = None,
    ) -> int:
        """The token id for `logits` (vocab,) at `position`, the index that the token will have in its sequence.

        `held_back`: ids that must not be chosen now. Does not change `logits`. Raises NumericalError.
        """
        row = self._row
        np.copyto(row, logits)
        best = int(row.argmax())
        if not (math.isfinite(row[best]) and math.isfinite(row.min())):
            raise NumericalError("logits are not finite")
        if held_back is not None and held_back.size:
            row[held_back] = -np.inf
            best = int(row.argmax())
            if row[best] == -np.inf:
                raise NumericalError("every token is held back")
        if params.temperature < MIN_TEMPERATURE or params.top_k == 1:
            return best
        top = float(row[best])
        key = stream_key(seed, choice, position)
        with np.errstate(over="ignore"):  # differences beyond float32 become infinite: a weight of 0, as it should be
            kept = self._filter(top, params)
            if kept is None:
                kept = self._contenders(top, params.temperature, key)
            return _race(kept, _scaled(row, kept, top, params.temperature), key)

    def filtered(self, logits: Float32s, params: SamplingParams) -> Int64s:
        """Ids that pass the filters, ascending: what `choose` chooses from. For finite logits."""
        np.copyto(self._row, logits)
        with np.errstate(over="ignore"):
            kept = self._filter(float(self._row.max()), params)
        return np.arange(self._row.size) if kept is None else np.sort(kept)

    def _filter(self, top: float, params: SamplingParams) -> Int64s | None:
        """Ids of `_row` that pass top-k, top-p and min-p, ascending; None if none of them is on."""
        kept: Int64s | None = None
        if 0 < params.top_k < self._row.size:
            kept = _largest(self._row, params.top_k)
        if params.top_p < 1.0:
            kept = self._nucleus(kept, top, params)
        if params.min_p > 0.0:
            kept = self._likely(kept, top, params.temperature, params.min_p)
        return kept

    def _nucleus(self, kept: Int64s | None, top: float, params: SamplingParams) -> Int64s:
        """The fewest most likely ids whose probabilities add up to top_p, ascending."""
        if kept is None:
            weights = self._weights(top, params.temperature)
            total = float(weights.sum(dtype=np.float64))
            # Ids below this hold less than 1 - top_p together, so all of the nucleus is above: no sort of everything.
            kept = np.flatnonzero(weights >= (1.0 - params.top_p) * (1.0 - _SLACK) * total / weights.size)
            exact = np.exp(_scaled(self._row, kept, top, params.temperature))
        else:
            exact = np.exp(_scaled(self._row, kept, top, params.temperature))
            total = float(exact.sum())
        order = np.argsort(-exact, kind="stable")
        before = np.cumsum(exact[order]) - exact[order]
        count = max(1, int((before < params.top_p * total).sum()))
        return np.sort(kept[order[:count]])

    def _likely(self, kept: Int64s | None, top: float, temperature: float, min_p: float) -> Int64s:
        """Ids at least `min_p` times as likely as the best, ascending."""
        if kept is None:
            kept = np.flatnonzero(self._weights(top, temperature) >= min_p * (1.0 - _SLACK))
        return kept[np.exp(_scaled(self._row, kept, top, temperature)) >= min_p]

    def _weights(self, top: float, temperature: float) -> Float32s:
        """exp((logit - top) / temperature) for all ids, to float32 accuracy."""
        work = self._work
        np.subtract(self._row, np.float32(top), out=work)
        np.divide(work, np.float32(temperature), out=work)
        return np.exp(work, out=work)

    def _contenders(self, top: float, temperature: float, key: int) -> Int64s:
        """The few ids, ascending, that can win the race among all: a look at the upper 32 bits of everybody's v."""
        work, early = self._work, self._early
        np.subtract(np.float32(top), self._row, out=work)
        np.divide(work, np.float32(temperature), out=work)
        np.minimum(work, np.float32(_CLIP), out=work)
        np.exp(work, out=work)
        bits = self._high_bits(key)
        np.maximum(bits, _COARSE, out=bits)  # so the leader's weight is never so small that dividing by it overflows
        np.copyto(early, bits, casting="unsafe")  # float32 all the way: twice as fast
        np.multiply(early, work, out=early)  # v * 2**32 / weight
        # A clock shows -log1p(-v) >= v. So who is not ahead of the leader's exact time by v alone cannot win; below
        # _COARSE the upper bits say too little, so those few ids (one in four million) are always looked at.
        leader = np.array([int(early.argmin())])
        first = _clocks(leader, key)[0] / math.exp(_scaled(self._row, leader, top, temperature)[0])
        return np.flatnonzero((early <= first * 2.0**32 * (1.0 + 2 * _SLACK)) | (bits == _COARSE))

    def _high_bits(self, key: int) -> UInt32s:
        """`high_bits` of all ids, in place."""
        bits, shifted = self._hash, self._shifted
        np.bitwise_xor(self._spread, np.uint32(key & 0xFFFFFFFF), out=bits)
        _mix32(bits, shifted, np.uint32(key >> 32))
        return bits


def stream_key(seed: int, choice: int, position: int) -> int:
    """64 bits that name one token's noise."""
    return _mix64(_mix64(_mix64(seed & _MASK64) ^ (choice & _MASK64)) ^ (position & _MASK64))


def uniforms(ids: Int64s, key: int) -> Float64s:
    """v in (0, 1) per token id, with 53 random bits."""
    high = ids.astype(np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(key & 0xFFFFFFFF)
    _mix32(high, np.empty_like(high), np.uint32(key >> 32))
    low = np.array([_mix64(key + int(token)) >> 43 for token in ids], np.uint64) if ids.size < 64 else _low(ids, key)
    return (high.astype(np.float64) * 2.0**21 + low.astype(np.float64) + 0.5) * 2.0**-53


def _low(ids: Int64s, key: int) -> NDArray[np.uint64]:
    """21 bits per token id: `_mix64` over an array."""
    x = ids.astype(np.uint64) + np.uint64(key) + np.uint64(_GOLDEN64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(43)


def _mix64(x: int) -> int:
    """splitmix64's step and finaliser (Steele, Lea, Flood 2014)."""
    x = (x + _GOLDEN64) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32(x: UInt32s, shifted: UInt32s, key: np.uint32) -> None:
    """The "lowbias32" finaliser (Wellons 2018) in place, with more of the key between its rounds."""
    np.right_shift(x, 16, out=shifted)
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, np.uint32(0x7FEB352D), out=x)
    np.bitwise_xor(x, key, out=x)
    np.right_shift(x, 15, out=shifted)
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, np.uint32(0x846CA68B), out=x)
    np.right_shift(x, 16, out=shifted)
    np.bitwise_xor(x, shifted, out=x)


def _clocks(ids: Int64s, key: int) -> Float64s:
    """Exponentially distributed time per token id, of mean 1."""
    return -np.log1p(-uniforms(ids, key))


def _scaled(row: Float32s, ids: Int64s, top: float, temperature: float) -> Float64s:
    """(logit - top) / temperature in float64: 0 for the best, never NaN, whatever the temperature."""
    return (row[ids].astype(np.float64) - top) / temperature


def _race(ids: Int64s, scaled: Float64s, key: int) -> int:
    """The id whose clock, sped up by its weight, rings first. Logarithms, so that no weight is too small."""
    return int(ids[(scaled - np.log(_clocks(ids, key))).argmax()])


def _largest(row: Float32s, k: int) -> Int64s:
    """Ids of the k largest values, ascending; of equal ones the lower ids."""
    bound = np.partition(row, row.size - k)[row.size - k]
    above = np.flatnonzero(row > bound)
    ties = np.flatnonzero(row == bound)[: k - above.size]
    return np.sort(np.concatenate((above, ties)))
