"""Weights that stay in 8 or 4 bits: the numbers they stand for, the files they come from, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.models.loading import WeightLoader
from executor_svc.models.rope import UnsupportedModelError
from executor_svc.runner import PagedRunner, load
from executor_svc.weights import quantised as forms
from executor_svc.weights.quantised import Format, keep_blocks, quantise_rows
from executor_svc.weights.source import WeightError, open_source
from pagemill.model_files import read_model_info
from tests.golden.golden_paged import forward, new_rows
from tests.unit.models import quantised_gguf as tiny
from tests.unit.models.test_model_loading import tiny as tiny_float32
from tests.unit.native.quantised_cases import KINDS, blocks_of, kept, quantised


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (48, 64), (37, 96)])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_rows_are_the_numbers_of_the_file(
    kind: str, shape: tuple[int, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, whatever is converted at once, and in any order."""
    monkeypatch.setattr(forms, "_CHUNK_VALUES", chunk)
    torch.manual_seed(0)
    case = quantised(kind, torch.randn(shape))
    ids = torch.randperm(shape[0])
    assert torch.equal(case.matrix.rows(ids), case.numbers.float()[ids])
    whole_panels = -(-shape[0] // 16) * 16
    bits = {"int8": 8, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5}[kind]
    assert case.matrix.nbytes == whole_panels * shape[1] * bits / 8 + (4 * whole_panels if kind == "int8" else 0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("cut", [1, 16, 23])
def test_parts_of_a_layer_lie_one_below_the_other(kind: str, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_CHUNK_VALUES", 1)
    raw = torch.randint(0, 60, (40, 2 * {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]), dtype=torch.uint8)
    case = kept(kind, raw, 64, cut)
    assert torch.equal(case.matrix.rows(torch.arange(40)), case.numbers.float())


def test_int8_is_within_half_a_step_of_each_row() -> None:
    torch.manual_seed(0)
    weight = torch.randn(30, 70) * torch.logspace(-30, 30, 30)[:, None]
    weight[3], weight[4], weight[5] = 0, 1e-42, -5
    matrix = quantise_rows(lambda first, out: out.copy_(weight[first : first + len(out)]), 30, 70)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((matrix.rows(torch.arange(30)) - weight).abs() <= step * 0.5001 + 1e-38).all())
    assert torch.equal(matrix.rows(torch.tensor([5])), weight[5:6])
    weight[7, 9] = torch.inf
    with pytest.raises(WeightError, match="not finite"):
        quantise_rows(lambda first, out: out.copy_(weight[first : first + len(out)]), 30, 70)


def test_what_cannot_be_kept_is_refused() -> None:
    raw = torch.zeros(2, 18, dtype=torch.uint8)
    raw[1, 1] = 0x7E  # a scale that is not a number
    with pytest.raises(WeightError, match="scale of its Q4_0 blocks is not finite"):
        keep_blocks([blocks_of("Q4_0", raw, 32)])


def logits_of(runner: PagedRunner) -> torch.Tensor:
    ids = [[5, 1, 40, 12, 12, 3, 33, 0, 9], [2, 42], [7]]
    rows = new_rows(runner, ids, 1, random.Random(0))
    return forward(runner, [(row, len(row.ids)) for row in rows])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_of_mixed_types(tied: bool, dtype: str, tmp_path: Path) -> None:
    """Close to the dequantised weights, and the same with kernels as without."""
    file = tiny.write(tmp_path / "mixed.gguf", tiny.mixed, tied=tied)
    expected = logits_of(load(file, dtype="float32", num_threads=1))
    found = {}
    for backend in ("native", "sdpa"):
        runner = load(file, dtype=dtype, weight_dtype="gguf", attention=backend, num_threads=1)
        assert runner.dtype_name == f"{dtype}, weights gguf"
        found[backend] = logits_of(runner)
        assert float((found[backend] - expected).norm() / expected.norm()) < 0.04
    distance = float((found["native"] - found["sdpa"]).norm() / expected.norm())
    assert distance < (0.06 if dtype == "bfloat16" else 2e-3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_the_file(kind: str, tied: bool, tmp_path: Path) -> None:
    file = tiny.write(tmp_path / "all.gguf", lambda name: kind, tied=tied)
    tensors = read_model_info(file).gguf.tensors  # type: ignore[union-attr]
    stored = sum(t.nbytes for t in tensors.values())
    per_row = tensors["token_embd.weight"].nbytes // tiny.VOCAB
    padding = (48 - tiny.VOCAB) * per_row * (1 if tied else 2)  # whole panels
    assert load(file, dtype="float32", weight_dtype="gguf", num_threads=1).weight_bytes == stored + padding
    matrices = sum(rows * cols[0] for rows, *cols in tiny.shapes(tied=tied).values() if cols)
    vectors = sum(rows for rows, *cols in tiny.shapes(tied=tied).values() if not cols)
    outputs = sum(rows for rows, *cols in tiny.shapes(tied=tied).values() if cols)
    int8 = load(file, dtype="float32", weight_dtype="int8", num_threads=1).weight_bytes
    dense = 0 if tied else tiny.VOCAB * tiny.HIDDEN  # an embedding of its own stays as it is
    pad_rows = 48 - tiny.VOCAB
    assert int8 == (
        matrices - dense + pad_rows * tiny.HIDDEN + 4 * (outputs - (0 if tied else tiny.VOCAB) + pad_rows)
        + 4 * (vectors + dense)
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_from_any_file(dtype: str, tmp_path: Path) -> None:
    file = tiny.write(tmp_path / "mixed.gguf", tiny.mixed, tied=False)
    expected = logits_of(load(file, dtype="float32", num_threads=1))
    found = {}
    for backend in ("native", "sdpa"):
        found[backend] = logits_of(load(file, dtype=dtype, weight_dtype="int8", attention=backend, num_threads=1))
        assert float((found[backend] - expected).norm() / expected.norm()) < 0.06
    distance = float((found["native"] - found["sdpa"]).norm() / expected.norm())
    assert distance < (0.06 if dtype == "bfloat16" else 2e-3)


def test_an_embedding_that_is_kept_is_exact(tmp_path: Path) -> None:
    file = tiny.write(tmp_path / "mixed.gguf", tiny.mixed)
    source = open_source(read_model_info(file))
    dense, _ = WeightLoader(source, torch.float32, None).tied("model.embed_tokens", tiny.VOCAB, tiny.HIDDEN)
    stored, _ = WeightLoader(source, torch.float32, None, "gguf").tied("model.embed_tokens", tiny.VOCAB, tiny.HIDDEN)
    ids = torch.tensor([0, 42, 7, 7])
    assert torch.equal(stored(ids), dense(ids))


def test_rows_that_a_gguf_file_has_interleaved_are_put_in_order(tmp_path: Path) -> None:
    """Query and key rows, read whole, in parts, and as blocks."""
    file = tiny.write(tmp_path / "q8.gguf", lambda name: "Q8_0")
    source = open_source(read_model_info(file))
    for projection, rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
        name = f"model.layers.1.self_attn.{projection}.weight"
        whole, part = torch.empty(rows, tiny.HIDDEN), torch.empty(5, tiny.HIDDEN)
        source.read_into(name, whole)
        source.read_into(name, part, 9)
        assert torch.equal(part, whole[9:14])
        blocks = source.blocks(name)
        assert blocks is not None
        matrix = keep_blocks([blocks])
        assert matrix.format == Format.INT8_GROUPS
        assert torch.equal(matrix.rows(torch.arange(rows)), whole)
    with pytest.raises(WeightError, match="has 32 rows, not 33"):
        source.read_into(name, part, 28)


def test_choices_that_do_not_go_together_are_refused_in_one_line(tmp_path: Path) -> None:
    cases: list[tuple[Path, dict[str, Any], type[ValueError], str]] = [
        (tiny_float32(tmp_path), {"weight_dtype": "gguf"}, UnsupportedModelError,
         r"^--weight-dtype gguf: tiny.gguf has no matrix in Q8_0, Q4_0, Q4_1 \(F32\)$"),
        (tiny_float32(tmp_path), {"weight_dtype": "int4"}, ValueError, "one of auto, int8, gguf"),
    ]  # fmt: skip
    for file, options, kind, why in cases:
        with pytest.raises(kind, match=why) as refused:
            load(file, num_threads=1, **options)
        assert "\n" not in str(refused.value)


def test_kernels_are_used_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path in torch would give nearly the same, slowly."""
    calls: list[int] = []
    monkeypatch.setattr("executor_svc.models.quantised.QuantisedLinear._torch", lambda *args: calls.append(1))
    file = tiny.write(tmp_path / "q4.gguf", lambda name: "Q4_0")
    for weight_dtype in ("gguf", "int8"):
        logits_of(load(file, weight_dtype=weight_dtype, num_threads=1))
    assert not calls
