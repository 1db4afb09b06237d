"""The one table of numbers that bound a request, and what the model adds to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps that do not depend on the model."""

    max_id_chars: int = 128
    max_stop_strings: int = 4
    max_stop_string_chars: int = 64
    max_stop_token_ids: int = 64
    max_outputs: int = 16
    max_logprobs: int = 20
    max_logit_bias: int = 300
    max_logit_bias_abs: float = 100.0
    max_allowed_token_ids: int = 1024
    max_bad_words: int = 64
    max_temperature: float = 100.0
    max_priority: int = 1000
    max_messages: int = 1024
    max_name_chars: int = 64
    prompt_bytes_per_token: int = 8
    """A prompt may have this many bytes per token of context; real text has 3 to 5."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Caps that the model sets."""

    vocab_size: int
    max_model_len: int

    @property
    def max_prompt_bytes(self) -> int:
        """Largest prompt text in bytes of UTF-8."""
        return LIMITS.prompt_bytes_per_token * self.max_model_len
