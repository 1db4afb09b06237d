"""Any decoder-only architecture of transformers, through its attention interface: slower than own models, but working.

transformers runs the layers on the flat batch as one sequence of length num_tokens; our registered attention function
writes keys and values into the paged pool and reads them back only through block tables. The model has no cache and no
mask of its own. What would go wrong silently (attention options we lack, position ids that a model ignores, layers
without attention) is looked for at load time and refused by name.
"""

from __future__ import annotations

import contextvars
import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

from executor_svc.attention.base import AttentionOptions, AttentionStep
from executor_svc.attention.sdpa import SdpaBackend
from executor_svc.batch import Batch
from executor_svc.kv.geometry import KvGeometry
from executor_svc.kv.pool import KvPool
from executor_svc.models.base import ModelShape
from executor_svc.models.rope import UnsupportedModelError
from pagemill.model_files import ModelInfo

_NAME = "pagemill_paged"
_step: contextvars.ContextVar[AttentionStep | _Probe] = contextvars.ContextVar("pagemill_attention_step")


class TransformersModel:
    """`CausalLM` around a transformers model."""

    batch_invariant = False
    implementation = "transformers"

    def __init__(self, info: ModelInfo, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._model = _load(info, dtype)
        self.shape = _probe_shape(self._model, info)
        self.buffer_bytes_per_token = 0
        self.weight_bytes = sum(p.nbytes for p in self._model.parameters()) + sum(
            b.nbytes for b in self._model.buffers()
        )
        _check_paging(self, info)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, sample: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As `CausalLM.forward`."""
        keep = sample if sample is not None else torch.zeros(1, dtype=torch.int64)
        logits = self._run(token_ids, positions, step, keep)
        return None if sample is None else logits

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, keep: torch.Tensor
    ) -> torch.Tensor:
        mark = _step.set(step)
        try:
            out = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
            )
        finally:
            _step.reset(mark)
        logits: torch.Tensor = out.logits[0]
        return logits if logits.shape[0] == keep.shape[0] else logits[keep]  # some models know no logits_to_keep


def _load(info: ModelInfo, dtype: torch.dtype) -> Any:
    transformers: Any = importlib.import_module("transformers")  # seconds, and only needed here
    transformers.AttentionInterface.register(_NAME, _attention)
    config = transformers.AutoConfig.from_pretrained(info.path, trust_remote_code=False, local_files_only=True)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    if kind is None or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{info.architecture} is no decoder-only language model of transformers")
    if getattr(kind, "_is_stateful", False) or not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedModelError(f"{kind.__name__} does not let its attention be replaced, so it cannot be paged")
    model: Any = kind.from_pretrained(
        info.path,
        config=config,
        dtype=dtype,
        attn_implementation=_NAME,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
    )
    return model.eval()


# What an attention call may carry without changing the result, given that the batch is causal.
_HARMLESS = frozenset({
    "dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache", "output_attentions",
    "output_hidden_states", "cache_position", "return_dict", "logits_to_keep", "position_embeddings",
    "num_items_in_batch", "output_router_logits", "layer_idx",
})  # fmt: skip


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: (1, heads, num_tokens, head_dim) in, (1, num_tokens, heads, head_dim) out."""
    step = _step.get()
    options = AttentionOptions(kwargs.get("scaling"), kwargs.get("sliding_window"))
    if isinstance(step, _Probe):
        if attention_mask is not None:
            step.problem = "its attention needs a mask of its own"
        return step.record(module, (query, key, value), kwargs), None
    step.write(module.layer_idx, torch.stack((key[0], value[0])).permute(2, 0, 1, 3))
    out = step.attend(module.layer_idx, query[0].transpose(0, 1), options)
    return out.view(1, query.shape[2], query.shape[1], -1), None


@dataclass(slots=True)
class _Probe:
    """Stands in for a step while one token is run to learn the shapes of all layers."""

    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    problem: str | None = None

    def record(
        self, module: Any, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Note the shapes of one layer, or what is wrong with it; returns zeros in place of attention."""
        query, key, value = heads
        extra = sorted(name for name, v in kwargs.items() if v is not None and name not in _HARMLESS)
        layer = getattr(module, "layer_idx", None)
        if extra:
            self.problem = f"its attention uses {', '.join(extra)}"
        elif layer is None or layer in self.layers:
            self.problem = "its attention layers are not numbered as transformers' interface has them"
        elif key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            self.problem = "its query, key and value heads have different sizes"
        elif kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self.problem = "its attention is not causal"
        else:
            self.layers[layer] = (query.shape[1], key.shape[1], key.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def _probe_shape(model: Any, info: ModelInfo) -> ModelShape:
    probe = _Probe()
    mark = _step.set(probe)
    try:
        out = model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64),
            position_ids=torch.zeros(1, 1, dtype=torch.int64),
            use_cache=False,
        )
    finally:
        _step.reset(mark)
    shapes = set(probe.layers.values())
    num_layers = model.config.get_text_config().num_hidden_layers
    if probe.problem is None and (len(shapes) != 1 or sorted(probe.layers) != list(range(num_layers))):
        probe.problem = f"{len(probe.layers)} of its {num_layers} layers have attention of one shape"
    if probe.problem is not None:
        raise UnsupportedModelError(f"{info.architecture} cannot be paged: {probe.problem}")
    if out.logits.shape[-1] != info.vocab_size:
        raise UnsupportedModelError(
            f"{info.architecture} gives {out.logits.shape[-1]} logits, its configuration has {info.vocab_size} ids"
        )
    num_heads, num_kv_heads, head_dim = shapes.pop()
    return ModelShape(num_layers, num_heads, num_kv_heads, head_dim, info.vocab_size, info.max_model_len)


def _check_paging(model: TransformersModel, info: ModelInfo) -> None:
    """Compare a chunked, paged run of two rows with transformers' own attention on one of them.

    Catches what the probe cannot see: models that derive positions from the batch instead of `position_ids`, or mix
    tokens outside attention. Raises UnsupportedModelError.
    """
    ids = torch.arange(1, 9) % info.vocab_size
    shape = model.shape
    pool = KvPool(KvGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, 2, model.dtype), 12)
    tables = torch.tensor([[7, 1, 9, 3], [4, 8, 0, 0]], dtype=torch.int32)

    def run(spans: list[tuple[int, int, int]]) -> torch.Tensor:
        position = torch.cat([torch.arange(start, end) for _, start, end in spans])
        rows = torch.cat([torch.full((end - start,), row) for row, start, end in spans])
        slots = tables[rows, position // 2].long() * 2 + position % 2
        batch = Batch(
            ids[position], position, slots, [e - s for _, s, e in spans], [e for _, _, e in spans],
            tables[[row for row, _, _ in spans]], [0],
        )  # fmt: skip
        step = SdpaBackend().begin(batch, pool)
        return model._run(batch.token_ids, position, step, torch.tensor([spans[0][2] - spans[0][1] - 1]))

    run([(0, 0, 5), (1, 0, 3)])
    paged = run([(0, 5, 8), (1, 3, 4)]).float()
    model._model.set_attn_implementation("eager")
    expected = model._model(input_ids=ids[None], use_cache=False).logits[0, -1:].float()
    model._model.set_attn_implementation(_NAME)
    error = (paged - expected).norm() / expected.norm().clamp_min(1e-9)
    if not error < (0.05 if model.dtype == torch.bfloat16 else 1e-3):
        raise UnsupportedModelError(
            f"{info.architecture} cannot be paged: a paged run differs from its own by {error:.2g}"
        )
