from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_svc.blocks.hashing import KEY_BYTES, block_key, extend_chain, root_key

ROOT = root_key("model", "bf16", b"", "")
ids = st.integers(0, 2**32 - 1)


def chain(token_ids: list[int], block_size: int, num_blocks: int, root: bytes = ROOT) -> list[bytes]:
    keys: list[bytes] = []
    extend_chain(keys, root, token_ids, block_size, num_blocks)
    return keys


def test_a_key_is_sha256_of_its_parent_and_the_ids_as_little_endian_words() -> None:
    assert block_key(ROOT, [1, 0x01020304]) == sha256(ROOT + b"\1\0\0\0\4\3\2\1").digest()
    assert len(ROOT) == len(block_key(ROOT, [])) == KEY_BYTES


def test_known_keys_have_not_changed() -> None:
    """A key outlives a process: a change here makes every stored block unreachable, and needs a new form in the tag."""
    root = root_key("sha256:ab", "bf16", b"tenant", "lora-7")
    assert root.hex() == "dc4974767441a8f3ff9103a91aaca01a5a7a7af582a8fdd06dbc8427b2431b7f"
    assert block_key(root, range(16)).hex() == "47c9fe4e3da97f7050bfa5a1aec2474c53d6b413fc0accca9502c08a83ea1766"


@given(token_ids=st.lists(ids, max_size=40), block_size=st.integers(1, 7), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_chain_in_any_parts_is_the_keys_one_after_another(
    token_ids: list[int], block_size: int, data: st.DataObject
) -> None:
    most = len(token_ids) // block_size
    parent, expected = ROOT, []
    for block in range(most):
        parent = block_key(parent, token_ids[block * block_size : (block + 1) * block_size])
        expected.append(parent)
    keys: list[bytes] = []
    for stop in sorted(data.draw(st.lists(st.integers(0, most), max_size=4))):
        extend_chain(keys, ROOT, token_ids, block_size, stop)
        assert keys == expected[:stop]
    extend_chain(keys, ROOT, token_ids, block_size, most)
    extend_chain(keys, ROOT, token_ids, block_size, 0)
    assert keys == expected


def test_a_block_that_is_not_full_gets_no_key() -> None:
    keys: list[bytes] = []
    with pytest.raises(ValueError, match="Got 11 tokens"):
        extend_chain(keys, ROOT, list(range(11)), 4, 3)
    assert keys == []


def test_a_chain_tells_apart_what_its_parts_do_not() -> None:
    """Other tokens before, other borders, other lengths, another order: another key."""
    assert chain([1, 2, 3, 4], 2, 2)[1] != chain([5, 2, 3, 4], 2, 2)[1]
    assert len({*chain([7] * 12, 2, 6), *chain([7] * 12, 3, 4), *chain([7] * 12, 4, 3)}) == 13
    assert chain([1, 2], 2, 1) != chain([2, 1], 2, 1)
    assert block_key(ROOT, [0]) != block_key(ROOT, [0, 0]) != block_key(ROOT, [])


def test_every_field_of_the_root_counts_and_none_runs_into_the_next() -> None:
    roots = [
        root_key("ab", "c", b"d", "e"),
        root_key("a", "bc", b"d", "e"),
        root_key("ab", "cd", b"", "e"),
        root_key("ab", "c", b"de", ""),
        root_key("ab", "c", b"", "de"),
        root_key("", "abc", b"de", ""),
        root_key("ab", "c", b"d\0", "e"),
        root_key("ab", "c", b"d", "e\0"),
    ]
    assert len(set(roots)) == len(roots)


def test_prompts_that_collide_under_python_hash_have_different_keys() -> None:
    """hash(2**61 - 1) == hash(0) and hash(-1) == hash(-2), in every process; tuples of them collide too."""
    assert hash((1, 2**61)) == hash((1, 1))
    with pytest.raises(ValueError, match="token id"):
        block_key(ROOT, [1, 2**61])
    assert hash((-1, 5)) == hash((-2, 5))
    for bad in ([-1, 5], [-2, 5], [2**32, 0]):
        with pytest.raises(ValueError, match="token id"):
            block_key(ROOT, bad)
        keys: list[bytes] = []
        with pytest.raises(ValueError, match="token id"):
            extend_chain(keys, ROOT, [0, 0, *bad], 2, 2)
        assert keys == []


def test_a_salt_cannot_be_made_to_look_like_a_block() -> None:
    """A root whose salt is the message of another tenant's block is not that block's key."""
    other = root_key("m", "bf16", b"other tenant", "")
    forged = other + struct.pack("<2I", 1, 2)
    assert root_key("m", "bf16", forged, "") != block_key(other, [1, 2])
    assert chain([1, 2], 2, 1, root_key("m", "bf16", forged, "")) != chain([1, 2], 2, 1, other)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: block_key(b"", [1]),
        lambda: block_key(ROOT + b"\0", [1]),
        lambda: extend_chain([], b"short", [1, 2], 2, 1),
    ],
)
def test_a_parent_is_a_key(misuse: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="parent"):
        misuse()


PROGRAM = """
from cache_svc.blocks.hashing import extend_chain, root_key
keys = []
extend_chain(keys, root_key("model-é", "int8", b"\\xff salt", "lora"), list(range(0, 9000, 100)), 16, 5)
print(hash("salted by process"))
print(*[key.hex() for key in keys])
"""


def test_keys_are_the_same_in_every_process() -> None:
    """Python's own hash is not, which the first line of the output proves."""
    outputs = []
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        outputs.append(done.stdout.splitlines())
    assert len({python_hash for python_hash, _ in outputs}) > 1
    own = chain(list(range(0, 9000, 100)), 16, 5, root_key("model-é", "int8", b"\xff salt", "lora"))
    assert {keys for _, keys in outputs} == {" ".join(key.hex() for key in own)}
