"""What an oracle's stream must be. One definition for all oracles: `token_after`.

Each position has a digest that depends on all ids up to it; the next id depends on the sum of the digests of *all*
positions, so one lost, doubled, swapped or stale position anywhere changes every id after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

MASK = 2**64 - 1
START = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """A 64-bit finaliser (splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


@lru_cache(1 << 16)
def digest_after(previous: int, token_id: int) -> int:
    """Digest of a position from the digest before it and its id."""
    return mix((previous * 31 + token_id + 1) & MASK)


def digests(token_ids: Sequence[int]) -> list[int]:
    """Digest of each position."""
    found, previous = [], START
    for token_id in token_ids:
        previous = digest_after(previous, token_id)
        found.append(previous)
    return found


def token_after(
    digest_sum: int,
    position: int,
    *,
    seed: int,
    choice: int,
    vocab_size: int,
    forbidden: Collection[int] = (),
) -> int:
    """The id at `position`; `digest_sum` is over all positions before it. Skips `forbidden` ids upwards."""
    token_id = mix((digest_sum + mix((seed * 1_000_003 + choice * 7919 + position) & MASK)) & MASK) % vocab_size
    while token_id in forbidden:
        token_id = (token_id + 1) % vocab_size
    return token_id


def expected_output(
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    vocab_size: int,
    seed: int = 0,
    choice: int = 0,
    stop_token_ids: Collection[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """The whole output, a stop id included, as chain and kv oracles give it."""
    all_digests = digests(prompt_ids)
    total = sum(all_digests)
    previous = all_digests[-1]
    output: list[int] = []
    while len(output) < max_tokens:
        forbidden = stop_token_ids if len(output) < min_tokens else ()
        token_id = token_after(
            total, len(prompt_ids) + len(output), seed=seed, choice=choice, vocab_size=vocab_size, forbidden=forbidden
        )
        output.append(token_id)
        if token_id in stop_token_ids:
            break
        previous = digest_after(previous, token_id)
        total += previous
    return output
