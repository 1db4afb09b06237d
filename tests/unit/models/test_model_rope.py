"""RoPE variants from both spellings of a configuration; what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor_svc.attention.rotation import rotate
from executor_svc.models.rope import RotaryTable, UnsupportedModelError, inverse_frequencies, rope_spec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
BASE: dict[str, Any] = {"max_position_embeddings": 128}


def test_both_spellings_mean_the_same() -> None:
    new = rope_spec({**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, 16)
    old = rope_spec({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}, 16)
    assert new == old
    assert rope_spec({**BASE, "rope_theta": 7.0, "rope_scaling": None}, 16).rope_type == "default"


def test_factors_of_a_gguf_file_reproduce_llama3() -> None:
    spec = rope_spec({**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}}, 16)
    plain, _ = inverse_frequencies(rope_spec(BASE, 16))
    scaled, _ = inverse_frequencies(spec)
    assert not torch.equal(plain, scaled)
    again, _ = inverse_frequencies(rope_spec({**BASE, "rope_parameters": {"rope_type": "factors"}}, 16), plain / scaled)
    torch.testing.assert_close(again, scaled)


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"rope_type": "longrope"}, "'longrope' is not supported"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "part"),
        ({"rope_type": "linear"}, "needs the number factor"),
        ({"rope_type": "linear", "factor": "2"}, "needs the number factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs the number low_freq_factor"),
        ({"rope_type": "factors"}, "factors must have shape"),
    ],
)
def test_refusals_name_what_is_missing(parameters: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        inverse_frequencies(rope_spec({**BASE, "rope_parameters": parameters}, 16))


def test_the_table_grows_to_any_position() -> None:
    inv_freq, scale = inverse_frequencies(rope_spec(BASE, 8))
    table = RotaryTable(inv_freq, scale)
    x = torch.randn(2, 3, 8)
    positions = torch.tensor([3, 9001])
    turned = rotate(x, *table.rotation(positions).gathered(torch.float32))
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :4], x[..., 4:]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    torch.testing.assert_close(turned, expected)
