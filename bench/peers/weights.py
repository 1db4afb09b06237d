"""The same weights in every peer's format, made once from one model: a Hugging Face directory, a GGUF file, OpenVINO's.

From a GGUF file every weight is dequantised by its format's own rule and rounded to the type that is compared; from a
directory the checkpoint is read. Tokenisers play no part: all requests are token ids.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def hf_directory(model: Path, dtype: str, folder: Path) -> Path:
    """A directory in Hugging Face form with safetensors of this type."""
    import torch  # noqa: PLC0415 (seconds)
    from transformers import AutoTokenizer  # noqa: PLC0415

    from bench.hf_sequential import load  # noqa: PLC0415

    out = folder / f"hf-{dtype}"
    if not (out / "config.json").exists():
        part = _fresh(out)
        load(model, getattr(torch, dtype)).save_pretrained(part)
        if model.is_dir():
            for name in TOKENIZER_FILES:
                if (model / name).exists():
                    shutil.copy(model / name, part / name)
        else:
            tokenizer: Any = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
            tokenizer.save_pretrained(part)
        part.rename(out)
    return out


def gguf_file(model: Path, dtype: str, folder: Path) -> Path:
    """A GGUF file with matrices of this type; vectors in float32, as llama.cpp wants them.

    Raises ValueError for a model that is no GGUF file: llama.cpp's own converter makes one of a directory.
    """
    import gguf  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    if model.is_dir():
        raise ValueError(
            f"llama.cpp needs a GGUF file, and {model} is a directory: convert it, and name it with --gguf"
        )
    out = folder / f"{model.stem}-{dtype}.gguf"
    if out.exists():
        return out
    reader = gguf.GGUFReader(model)
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        writer.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    kind = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}[dtype]
    file_type = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "float32": gguf.LlamaFileType.ALL_F32}[dtype]
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        own = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, own) if own is not gguf.GGMLQuantizationType.F32 else values
        writer.add_tensor(tensor.name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(out)
    return out


def openvino_directory(hf: Path, python: Path, folder: Path) -> Path:
    """OpenVINO's own format with float16 weights, made by optimum-cli in the peer's environment."""
    out = folder / f"openvino-{hf.name}"
    if not (out / "openvino_model.xml").exists():
        part = _fresh(out)
        command = [str(python.with_name("optimum-cli")), "export", "openvino", "-m", str(hf)]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16", str(part)]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL)
        part.rename(out)
    return out


def _fresh(out: Path) -> Path:
    """An empty folder beside `out`, so that a run that was interrupted leaves nothing that looks whole."""
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part
