"""What a model on disk says about itself, and which models are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.model_files import MAX_TEMPLATE_BYTES, ModelFileError, find_demo_model, read_model_info
from pagemill.safetensors_header import SafetensorsError, read_header
from tests.unit.modelfiles.gguf_writer import LLAMA_TENSORS, gguf, llama_metadata

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


def safetensors(tensors: dict[str, tuple[int, ...]], fill: int = 0) -> bytes:
    header, offset = {}, 0
    for name, shape in tensors.items():
        count = 4
        for size in shape:
            count *= size
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + count]}
        offset += count
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes([fill]) * offset


def directory(path: Path, **files: Any) -> Path:
    """A model directory; keys are file names with the dot as `__`; None leaves a default file out."""
    contents: dict[str, Any] = {
        "config__json": CONFIG,
        "tokenizer__json": {"added_tokens": [{"id": 3, "content": "<|eot|>"}]},
        "model__safetensors": safetensors({"w": (2, 2)}),
        **files,
    }
    for name, content in contents.items():
        if content is not None:
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            (path / name.replace("__", ".")).write_bytes(raw)
    return path


def test_a_plain_directory(tmp_path: Path) -> None:
    info = read_model_info(directory(tmp_path))
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("llama", 4, 64)
    assert info.eos_token_ids == (0,)
    assert info.chat_template is None
    assert info.tensors is not None
    assert info.tensors["w"].shape == (2, 2)
    assert info.tokenizer_json == tmp_path / "tokenizer.json"


def test_all_end_tokens_count(tmp_path: Path) -> None:
    info = read_model_info(
        directory(
            tmp_path,
            generation_config__json={"eos_token_id": [1, 2], "bos_token_id": 1},
            tokenizer_config__json={"eos_token": {"content": "<|eot|>"}, "bos_token": "a"},
        )
    )
    assert info.eos_token_ids == (1, 2, 3)
    assert info.bos_token_id == 1
    assert info.special_tokens == {"eos_token": "<|eot|>", "bos_token": "a"}


def test_templates(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    assert read_model_info(directory(tmp_path, tokenizer_config__json={"chat_template": named})).chat_template == "D"
    assert read_model_info(directory(tmp_path, chat_template__jinja=b"J")).chat_template == "J"
    with pytest.raises(ModelFileError, match="larger than"):
        read_model_info(directory(tmp_path, chat_template__jinja=b"x" * (MAX_TEMPLATE_BYTES + 1)))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config__json": {**CONFIG, "auto_map": {"AutoModel": "evil.Model"}}}, "run code of its own"),
        ({"config__json": {**CONFIG, "trust_remote_code": True}}, "run code of its own"),
        ({"tokenizer_config__json": {"auto_map": {"AutoTokenizer": ["evil.Tok", None]}}}, "run code of its own"),
        ({"model__safetensors": None, "pytorch_model.bin": b"x"}, "pickle"),
        ({"model__safetensors": None}, "no model.safetensors"),
        ({"config__json": None}, "no config.json"),
        ({"config__json": b"[" * 100_000}, "not valid JSON"),
        ({"config__json": b"[]"}, "not a JSON object"),
        ({"config__json": {**CONFIG, "vocab_size": -1}}, "vocab_size must be a positive"),
        ({"config__json": {**CONFIG, "max_position_embeddings": 2**40}}, "must be a positive"),
        ({"tokenizer__json": None}, "no tokenizer.json"),
    ],
)
def test_refusals_are_one_line(files: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=why) as refused:
        read_model_info(directory(tmp_path, **files))
    assert "\n" not in str(refused.value)


def test_shards(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    files = {
        "model__safetensors": None,
        "model.safetensors.index.json": index,
        "a.safetensors": safetensors({"w": (2,)}),
        "b.safetensors": safetensors({"v": (3,)}),
    }
    info = read_model_info(directory(tmp_path, **files))
    assert info.tensors is not None
    assert sorted(info.tensors) == ["v", "w"]
    for bad in ("../a.safetensors", "/etc/passwd", "a.bin", 7):
        with pytest.raises(ModelFileError, match=r"plain name|no weight_map"):
            read_model_info(
                directory(tmp_path, **{**files, "model.safetensors.index.json": {"weight_map": {"w": bad}}})
            )
    missing = {"weight_map": {"w": "a.safetensors", "u": "b.safetensors"}}
    with pytest.raises(ModelFileError, match="in no shard"):
        read_model_info(directory(tmp_path, **{**files, "model.safetensors.index.json": missing}))


def test_fingerprint_follows_weights_and_configuration(tmp_path: Path) -> None:
    def digest(name: str, **files: Any) -> str:
        (tmp_path / name).mkdir()
        return read_model_info(directory(tmp_path / name, **files)).fingerprint

    first = digest("a")
    assert digest("b") == first
    assert digest("c", model__safetensors=safetensors({"w": (2, 2)}, fill=1)) != first
    assert digest("d", model__safetensors=safetensors({"v": (2, 2)})) != first
    assert digest("e", config__json={**CONFIG, "rope_theta": 7.0}) != first
    assert digest("f", config__json={**CONFIG, "transformers_version": "9"}) == first


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf(llama_metadata(**{"tokenizer.ggml.eot_token_id": 3}), LLAMA_TENSORS))
    info = read_model_info(file)
    assert info.name == "tiny"
    assert info.eos_token_ids == (0, 3)
    assert info.special_tokens == {"eos_token": "<|end|>"}
    assert info.config["num_key_value_heads"] == 1
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf(llama_metadata(**{"tokenizer.ggml.merges": ["a b"]}), LLAMA_TENSORS))
    assert read_model_info(other).tokenizer_hash != info.tokenizer_hash


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x80\x04")
    for path, why in ((tmp_path / "none", "no model at"), (tmp_path / "x.bin", "neither a directory nor a GGUF")):
        with pytest.raises(ModelFileError, match=why):
            read_model_info(path)


SAFE = safetensors({"w": (2, 2), "v": (3,)})


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(SAFE) - 1), st.binary(min_size=1, max_size=6), st.booleans())
def test_any_mutation_of_safetensors_is_read_or_refused(
    tmp_path: Path, position: int, change: bytes, cut: bool
) -> None:
    data = SAFE[:position] + (b"" if cut else change + SAFE[position + len(change) :])
    file = tmp_path / "m.safetensors"
    file.write_bytes(data)
    try:
        tensors = read_header(file)
    except SafetensorsError:
        return
    for info in tensors.values():
        assert info.offset + info.nbytes <= len(data)


@pytest.mark.model
def test_the_demo_model() -> None:
    info = read_model_info(find_demo_model())
    assert (info.vocab_size, info.max_model_len, info.add_bos_token) == (49152, 8192, False)
    assert info.gguf is not None
    tokens = info.gguf.metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in info.eos_token_ids] == ["<|im_end|>"]  # the file names no other end
    assert info.chat_template is not None
    assert "<|im_start|>" in info.chat_template
