"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file.

Two kinds: "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names how text is cut before merging) and "llama"
(SentencePiece BPE with scores and byte fallback). Anything else is refused by name: a tokenizer that is nearly right
gives answers that are nearly right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL = 3
_UNKNOWN = 2
_USER_DEFINED = 4
_BYTE = 6

# How modern byte-level tokenizers cut text; the digits of a number are the only part in which they differ here.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class UnsupportedTokenizerError(ValueError):
    """The file's tokenizer is of a kind that is not built here; the text is one line for the operator."""


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _cut(digits: str) -> Callable[[], Any]:
    def build() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_CUT.format(digits=digits)), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


_PRE: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "refact": _digits_then_gpt2,
    "llama-bpe": _cut(r"\p{N}{1,3}"),
    "llama3": _cut(r"\p{N}{1,3}"),
    "llama-v3": _cut(r"\p{N}{1,3}"),
    "smaug-bpe": _cut(r"\p{N}{1,3}"),
    "qwen2": _cut(r"\p{N}"),
    "deepseek-r1-qwen": _cut(r"\p{N}"),
}
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})


def build(metadata: dict[str, Any], *, add_bos: bool) -> Tokenizer:
    """The tokenizer that the metadata describes. Raises UnsupportedTokenizerError."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise UnsupportedTokenizerError("the GGUF file holds no tokenizer")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise UnsupportedTokenizerError(f"GGUF tokenizer {kind!r} is not supported (gpt2 and llama are)")
    _add_special_tokens(tokenizer, metadata, tokens)
    if add_bos:
        _begin_with_bos(tokenizer, metadata, tokens)
    return tokenizer


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE:
        known = ", ".join(sorted(_PRE))
        raise UnsupportedTokenizerError(f"GGUF pre-tokenizer {pre!r} is not supported (these are: {known})")
    merges = [_pair(m) for m in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORE_MERGES, fuse_unk=False)
    tokenizer = Tokenizer(model)
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise UnsupportedTokenizerError("the GGUF file's llama tokenizer has no scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    model = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(vocab, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All ways to make a token of two others, best score first: SentencePiece's order as BPE merges.

    Among the ways to make one token the earlier ids go first, as in the published conversions of such vocabularies.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        splits = [
            (vocab[token[:i]], vocab[token[i:]], token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in vocab and token[i:] in vocab
        ]
        ranked.extend((-scores[token_id], left_id, right_id, left, right) for left_id, right_id, left, right in splits)
    ranked.sort(key=lambda entry: (entry[0], entry[1], entry[2]))
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Control tokens are special (never matched in client text); user-defined ones are ordinary added tokens."""
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    for wanted, special in ((_CONTROL, True), (_UNKNOWN, True), (_USER_DEFINED, False)):
        found = [t for t, kind in zip(tokens, kinds, strict=False) if kind == wanted]
        added = [AddedToken(t, special=special, normalized=False) for t in found]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _begin_with_bos(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if not isinstance(bos_id, int) or not 0 <= bos_id < len(tokens):
        raise UnsupportedTokenizerError("the GGUF file asks for a BOS token but names none")
    bos = tokens[bos_id]
    template = processors.TemplateProcessing(single=f"{bos}:0 $A:0", special_tokens=[(bos, bos_id)])
    tokenizer.post_processor = template
