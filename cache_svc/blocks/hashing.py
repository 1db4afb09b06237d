"""Names for the content of blocks: a SHA-256 chain over token ids, the same bytes in every process, run and machine.

    root ──► key of block 0 = H(root, ids 0..B-1) ──► key of block 1 = H(key 0, ids B..2B-1) ──► …

A key stands for everything that the block's K and V depend on: the model, the numeric format of the cache, the tenant,
the adapter, and every token before and in the block. Two blocks with one key hold the same bytes, and whoever does not
know a tenant's salt cannot make its keys. Python's own `hash` plays no part: it differs from process to process and
collides on purpose (`hash(-1) == hash(-2)`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

KEY_BYTES = 32
"""Length of every key and root."""

_ROOT_TAG = b"pagemill kv block chain, form 1\n"
# A block's message starts with a digest and a root's with this tag of the same length, so no salt that a client
# chooses can make a root equal to the key of some block.
assert len(_ROOT_TAG) == KEY_BYTES

_ID_TYPE = next(code for code in "IL" if array(code).itemsize == 4)


def root_key(model_fingerprint: str, kv_dtype: str, salt: bytes, adapter: str) -> bytes:
    """What the first block of a chain has for a parent. Fields carry their length, so none runs into the next."""
    message = bytearray(_ROOT_TAG)
    for field in (model_fingerprint.encode(), kv_dtype.encode(), salt, adapter.encode()):
        message += len(field).to_bytes(8, "little")
        message += field
    return sha256(message).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block behind `parent` (a root or a key) that holds `token_ids`.

    ValueError for an id that is not an unsigned 32-bit number, and for a parent that is no key.
    """
    _require_key(parent)
    return sha256(parent + _as_bytes(token_ids)).digest()


def extend_chain(keys: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Appends the keys of full blocks until there are `num_blocks`; no-op when there are already.

    `keys` are those of the first `len(keys)` blocks of `token_ids`, so a caller can go on where it stopped, and bound
    the time of one call by `num_blocks`: about 0.7 µs a block of 16. ValueError, changing nothing, when `token_ids`
    does not fill `num_blocks` blocks: a key for half a block would name content that is still to change.
    """
    if len(token_ids) < num_blocks * block_size:
        raise ValueError(f"Got {len(token_ids)} tokens but expected {num_blocks = } times {block_size = }")
    parent = keys[-1] if keys else root
    _require_key(parent)
    ids = _as_bytes(token_ids[len(keys) * block_size : num_blocks * block_size])
    stride = block_size * 4
    for start in range(0, len(ids), stride):
        parent = sha256(parent + ids[start : start + stride]).digest()
        keys.append(parent)


def _require_key(parent: bytes) -> None:
    if len(parent) != KEY_BYTES:
        raise ValueError(f"Got a parent of {len(parent)} bytes but expected {KEY_BYTES}")


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    """The ids as little-endian uint32, one after another."""
    try:
        ids = array(_ID_TYPE, token_ids)
    except OverflowError:
        raise ValueError("Got a token id outside 0 .. 2**32 - 1") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
