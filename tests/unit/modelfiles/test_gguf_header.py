"""GGUF headers: right ones are read exactly, whatever is wrong is refused with one line and without large memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.gguf import GGML_TYPES, GgufError, is_gguf, read_header
from pagemill.gguf_config import hf_config
from tests.unit.modelfiles.gguf_writer import ARRAY, LLAMA_TENSORS, STRING, entry, gguf, llama_metadata, tensor, text

GOOD = gguf(llama_metadata(), LLAMA_TENSORS)


def head(num_tensors: int, num_metadata: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)


def write(path: Path, data: bytes) -> Path:
    file = path / "model.gguf"
    file.write_bytes(data)
    return file


def test_reads_what_was_written(tmp_path: Path) -> None:
    metadata = llama_metadata(flag=True, pieces=["x", "", "ü"], numbers=[-1, 7])
    header = read_header(write(tmp_path, gguf(metadata, LLAMA_TENSORS)))
    assert header.version == 3
    read = {**header.metadata, "llama.attention.layer_norm_rms_epsilon": 1e-5}  # comes back as the nearest float32
    assert read == metadata
    assert header.metadata["llama.attention.layer_norm_rms_epsilon"] == struct.unpack("<f", struct.pack("<f", 1e-5))[0]
    assert {name: t.shape for name, t in header.tensors.items()} == LLAMA_TENSORS
    raw = header.path.read_bytes()
    for info in header.tensors.values():
        assert struct.unpack_from("<2f", raw, info.offset) == (0.0, 1.0)
        assert info.nbytes == 4 * info.shape[0] * (info.shape[1] if len(info.shape) > 1 else 1)


def test_type_table_equals_the_gguf_package() -> None:
    package = pytest.importorskip("gguf")
    for type_id, kind in GGML_TYPES.items():
        known = package.GGMLQuantizationType(type_id)
        assert (kind.name, kind.block_size, kind.block_bytes) == (known.name, *package.GGML_QUANT_SIZES[known])


HOSTILE = {
    "empty": b"",
    "short": b"GGUF",
    "magic": b"GGML" + GOOD[4:],
    "version 1": gguf(llama_metadata(), LLAMA_TENSORS, version=1),
    "big endian": b"GGUF" + struct.pack(">I", 3) + GOOD[8:],
    "tensor count": head(2**63, 0) + bytes(64),
    "tensor count within the cap": head(60_000, 0) + bytes(64),
    "metadata count": head(0, 2**40) + bytes(64),
    "key length": head(0, 1) + struct.pack("<Q", 2**60) + bytes(64),
    "value length": head(0, 1) + text("k") + struct.pack("<IQ", STRING, 2**62) + bytes(64),
    "array count": head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**40) + bytes(64),
    "array of numbers": head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, 10, 2**61) + bytes(64),
    "array of arrays": head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(64),
    "string in array": head(0, 1) + text("k") + struct.pack("<IIQQ", ARRAY, STRING, 1, 2**63) + bytes(64),
    "value type": head(0, 1) + text("k") + struct.pack("<I", 99) + bytes(64),
    "not UTF-8": head(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64),
    "key twice": head(0, 2) + entry("k", 1) + entry("k", 2) + bytes(64),
    "dimensions": head(1, 0) + text("t") + struct.pack("<I", 2**31) + bytes(64),
    "huge shape": head(1, 0) + tensor("t", (2**62, 2**62), 0) + bytes(64),
    "empty shape": head(1, 0) + tensor("t", (0, 4), 0) + bytes(64),
    "tensor outside": head(1, 0) + tensor("t", (4, 4), 2**40 // 32 * 32) + bytes(64),
    "tensor at the very end": head(1, 0) + tensor("t", (64,), 0) + bytes(64),
    "unaligned": head(1, 0) + tensor("t", (2,), 3) + bytes(64),
    "tensor type": head(1, 0) + tensor("t", (2,), 0, kind=4) + bytes(64),
    "broken block": head(1, 0) + tensor("t", (33,), 0, kind=8) + bytes(64),
    "tensor twice": head(2, 0) + tensor("t", (2,), 0) * 2 + bytes(64),
    "alignment 0": head(0, 1) + entry("general.alignment", 0) + bytes(64),
    "alignment text": head(0, 1) + entry("general.alignment", "32") + bytes(64),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_in_one_line_and_little_memory(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(GgufError) as refused:
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("model.gguf: ")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=8), st.booleans())
def test_any_mutation_is_read_or_refused(tmp_path: Path, position: int, change: bytes, cut: bool) -> None:
    data = GOOD[:position] + (b"" if cut else change + GOOD[position + len(change) :])
    file = write(tmp_path, data)
    try:
        header = read_header(file)
        hf_config(header)
    except GgufError:
        return
    for info in header.tensors.values():
        assert info.offset + info.nbytes <= len(data)


def test_is_gguf_looks_at_the_content(tmp_path: Path) -> None:
    assert is_gguf(write(tmp_path, GOOD))
    (tmp_path / "other.gguf").write_bytes(b"PK")
    assert not is_gguf(tmp_path / "other.gguf")
    assert not is_gguf(tmp_path)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"general.architecture": "gemma"}, "'gemma' is not supported"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.attention.head_count": 0}, "head_count must be a positive"),
        ({"llama.block_count": "1"}, "block_count must be a positive"),
        ({"llama.vocab_size": 5}, "disagree"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "no tokenizer"),
        ({"llama.rope.dimension_count": 2}, "part of the head"),
        ({"llama.attention.value_length": 8}, "different sizes"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' is not supported"),
    ],
)
def test_unsupported_options_are_named(more: dict[str, object], why: str, tmp_path: Path) -> None:
    header = read_header(write(tmp_path, gguf(llama_metadata(**more), LLAMA_TENSORS)))
    with pytest.raises(GgufError, match=why):
        hf_config(header)


def test_rope_scaling_and_windows_come_over(tmp_path: Path) -> None:
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
        "llama.rope.freq_base": 5000.0,
        "llama.attention.sliding_window": 9,
    }
    config = hf_config(read_header(write(tmp_path, gguf(llama_metadata(**yarn), LLAMA_TENSORS))))
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    assert config["sliding_window"] == 9
    factors = {**LLAMA_TENSORS, "rope_freqs.weight": (2,), "output.weight": (4, 8)}
    config = hf_config(read_header(write(tmp_path, gguf(llama_metadata(), factors))))
    assert config["rope_parameters"]["rope_type"] == "factors"
    assert not config["tie_word_embeddings"]
