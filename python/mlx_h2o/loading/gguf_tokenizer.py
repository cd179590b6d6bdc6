"""The tokenizer and chat template in a GGUF file: byte-level BPE, as GPT-2, SmolLM and Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_h2o.loading.gguf_metadata import items, text, whole

# Kinds of token in `tokenizer.ggml.token_type` (llama.cpp's llama_token_type).
CONTROL, USER_DEFINED = 3, 4
_ADDED = (CONTROL, USER_DEFINED)
# Tokens that end a turn in chat models, whichever token the file calls its end of text.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>")

# The rules that cut text before its bytes are joined; from the models' own tokenizer.json.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_AFTER_NUMBERS}",
    "llama-bpe": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_AFTER_NUMBERS}",
}
_GPT2, _SMOLLM = ("gpt-2", "gpt2", "default"), ("smollm",)


def pre_tokenizer_of(kind: str) -> Any:
    """The pre-tokenizer that cuts text, for a file's `tokenizer.ggml.pre`.

    Raises:
        ValueError: The kind is not known.
    """
    from tokenizers import Regex, pre_tokenizers

    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _GPT2:
        return by_words
    if kind in _SMOLLM:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    if kind in _PATTERNS:
        cut = pre_tokenizers.Split(Regex(_PATTERNS[kind]), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([cut, as_bytes])
    known = ", ".join([*_GPT2, *_SMOLLM, *_PATTERNS])
    raise ValueError(f"The GGUF file's pre-tokenizer {kind!r} is not known; known are {known}.")


def bpe_of(metadata: Mapping[str, Any]) -> Any:
    """The file's vocabulary and merges as a `tokenizers.Tokenizer`.

    Raises:
        ValueError: The file's tokenizer is not byte-level BPE, or it has none.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(
            f"The GGUF file's tokenizer is {model!r}; only byte-level BPE ('gpt2') can be read. "
            "Convert the model with mlx_lm.convert."
        )
    kind = metadata.get("tokenizer.ggml.pre", "default")
    tokens = items(metadata, "tokenizer.ggml.tokens", str)
    pairs = [merge.split(" ", 1) for merge in items(metadata, "tokenizer.ggml.merges", str)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for pair in pairs:
        if len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)}:
            raise ValueError(
                f"The GGUF file's tokenizer.ggml.merges has {' '.join(pair)[:40]!r}, which does "
                "not join two of its tokens to one of its tokens."
            )
    bpe = models.BPE(
        vocab=vocabulary,
        merges=[tuple(pair) for pair in pairs],
        ignore_merges=kind == "llama-bpe",
    )
    tokenizer = Tokenizer(bpe)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer_of(kind)
    tokenizer.decoder = decoders.ByteLevel()
    types = items(metadata, "tokenizer.ggml.token_type", int, [1] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(
            f"The GGUF file's tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} "
            "tokens."
        )
    marked = [(t, kind) for t, kind in zip(tokens, types, strict=True) if kind in _ADDED]
    tokenizer.add_tokens(
        [AddedToken(t, special=kind == CONTROL, normalized=False) for t, kind in marked]
    )
    return tokenizer


def begins_with(tokenizer: Any, token: str, token_id: int) -> None:
    """Make encoding put one token first.

    Args:
        tokenizer: The tokenizer to change.
        token: The token's text.
        token_id: The token's number.
    """
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, token_id)]
    )


def tokenizer_of(metadata: Mapping[str, Any], rows: int | None = None) -> Any:
    """The file's tokenizer in mlx-lm's wrapper, with its chat template and ends of a turn.

    Args:
        metadata: The file's metadata.
        rows: Rows of the model's embedding; every token must have one. None if not known.

    Raises:
        ValueError: As in `bpe_of`, or a token has no row.
    """
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    bpe = bpe_of(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    if rows is not None and len(tokens) > rows:  # MLX does not check what it gathers
        raise ValueError(
            f"The GGUF file's tokenizer.ggml.tokens has {len(tokens)} tokens, and "
            f"token_embd.weight {rows} rows."
        )

    def named(role: str) -> str | None:
        key = f"tokenizer.ggml.{role}_token_id"
        if metadata.get(key) is None:
            return None
        token: str = tokens[whole(metadata, key, 0, len(tokens) - 1)]
        return token

    if metadata.get("tokenizer.ggml.add_bos_token") and named("bos"):
        begins_with(bpe, named("bos") or "", metadata["tokenizer.ggml.bos_token_id"])
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer = make(
        tokenizer_object=bpe,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        clean_up_tokenization_spaces=False,
    )
    template = "tokenizer.chat_template"
    tokenizer.chat_template = text(metadata, template) if template in metadata else None
    vocabulary = set(tokens)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in TURN_ENDS if end in vocabulary]
    return TokenizerWrapper(tokenizer, BPEStreamingDetokenizer, eos_token_ids=ends)
