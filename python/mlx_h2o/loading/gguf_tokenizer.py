"""The tokenizer and chat template in a GGUF file: byte-level BPE, or SentencePiece's BPE.

The former is that of GPT-2, SmolLM, Llama 3 and Qwen; the latter that of Llama 2 and Gemma.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from mlx_h2o.loading.gguf_file import Metadata

# Kinds of token in `tokenizer.ggml.token_type` (llama.cpp's llama_token_type).
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_ADDED = (CONTROL, USER_DEFINED)
# Tokens that end a turn in chat models, whichever token the file calls its end of text.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>")

# The rules that cut text before its bytes are joined; from the models' own tokenizer.json.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_AFTER_NUMBERS}",
    "llama-bpe": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_AFTER_NUMBERS}",
}
_GPT2, _SMOLLM = ("gpt-2", "gpt2", "default"), ("smollm",)
#: SentencePiece's mark of a space.
SPACE = "\u2581"


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
    names = ", ".join([*_GPT2, *_SMOLLM, *_PATTERNS])
    raise ValueError(f"The GGUF file's pre-tokenizer {kind!r} is not known; known are {names}.")


def byte_level_bpe(metadata: Metadata, tokens: list[str]) -> Any:
    """A `tokenizers.Tokenizer` of a file's vocabulary and merges.

    Raises:
        ValueError: The merges do not fit the vocabulary, or the pre-tokenizer is not known.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    kind = metadata.text("tokenizer.ggml.pre", "default")
    pairs = [merge.split(" ", 1) for merge in metadata.items("tokenizer.ggml.merges", str)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for pair in pairs:
        if len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)}:
            raise ValueError(
                f"The GGUF file's tokenizer.ggml.merges has {' '.join(pair)[:40]!r}, which does "
                "not join two of its tokens to one of its tokens."
            )
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer_of(kind)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(metadata: Metadata, tokens: list[str], types: list[int]) -> Any:
    """A `tokenizers.Tokenizer` of a file's vocabulary and scores.

    SentencePiece joins the two neighbours that give the token of the highest score, so the merges
    are all splits of a token into two, by its score.

    Args:
        metadata: The file's metadata.
        tokens: Its tokens.
        types: The kind of each token.

    Raises:
        ValueError: There is not a score for each token.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _one_for_each(metadata.items("tokenizer.ggml.scores", float), tokens, "scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in ranked if types[i] == NORMAL)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = _role(metadata, tokens, "unknown")
    bpe = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _has_prefix_space(metadata):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _has_prefix_space(metadata: Metadata) -> bool:
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _one_for_each(values: list[Any], tokens: list[str], what: str) -> list[Any]:
    """The values; ValueError unless there is one for each token."""
    if len(values) != len(tokens):
        raise ValueError(
            f"The GGUF file's tokenizer.ggml.{what} has {len(values)} entries for {len(tokens)} "
            "tokens."
        )
    return values


def _role(metadata: Metadata, tokens: list[str], role: str) -> str | None:
    """The token of a role ("bos", "eos", "unknown", "padding"), None where the file gives none."""
    key = f"tokenizer.ggml.{role}_token_id"
    return tokens[metadata.whole(key, 0, len(tokens) - 1)] if key in metadata else None


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


def bpe_of(metadata: Metadata, tokens: list[str]) -> tuple[Any, Any]:
    """The file's `tokenizers.Tokenizer`, and mlx-lm's class that decodes its tokens in a stream.

    Raises:
        ValueError: The file's tokenizer is of another kind, or damaged.
    """
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer
    from tokenizers import AddedToken

    types = metadata.items("tokenizer.ggml.token_type", int, [NORMAL] * len(tokens))
    types = _one_for_each(types, tokens, "token_type")
    model = metadata.get("tokenizer.ggml.model")
    detokenizer: Any
    if model == "gpt2":
        tokenizer, detokenizer = byte_level_bpe(metadata, tokens), BPEStreamingDetokenizer
    elif model == "llama":
        tokenizer = sentencepiece_bpe(metadata, tokens, types)
        detokenizer = partial(SPMStreamingDetokenizer, trim_space=_has_prefix_space(metadata))
    else:
        raise ValueError(
            f"The GGUF file's tokenizer is {str(model)[:40]!r}; 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece) can be read. Convert the model with mlx_lm.convert."
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in _ADDED
        ]
    )
    return tokenizer, detokenizer


def tokenizer_of(metadata: Mapping[str, Any], rows: int | None = None) -> Any:
    """The file's tokenizer in mlx-lm's wrapper, with its chat template and ends of a turn.

    Args:
        metadata: The file's metadata.
        rows: Rows of the model's embedding; every token must have one. None if not known.

    Raises:
        ValueError: The tokenizer is of a kind that is not known here, or damaged, or a token has no
            row.
    """
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    metadata = Metadata(metadata)
    tokens = metadata.items("tokenizer.ggml.tokens", str)
    if rows is not None and len(tokens) > rows:  # MLX does not check what it gathers
        raise ValueError(
            f"The GGUF file's tokenizer.ggml.tokens has {len(tokens)} tokens, and "
            f"token_embd.weight {rows} rows."
        )
    bpe, detokenizer = bpe_of(metadata, tokens)
    begin = _role(metadata, tokens, "bos")
    # SentencePiece's models begin with it unless the file says otherwise, as in llama.cpp.
    begins = metadata.get(
        "tokenizer.ggml.add_bos_token", metadata["tokenizer.ggml.model"] == "llama"
    )
    if begins and begin:
        begins_with(bpe, begin, metadata["tokenizer.ggml.bos_token_id"])
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer = make(
        tokenizer_object=bpe,
        bos_token=begin,
        eos_token=_role(metadata, tokens, "eos"),
        unk_token=_role(metadata, tokens, "unknown"),
        pad_token=_role(metadata, tokens, "padding"),
        clean_up_tokenization_spaces=False,
    )
    template = "tokenizer.chat_template"
    tokenizer.chat_template = metadata.text(template) if template in metadata else None
    vocabulary = set(tokens)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in TURN_ENDS if end in vocabulary]
    return TokenizerWrapper(tokenizer, detokenizer, eos_token_ids=ends, **tool_calls_of(tokenizer))


def tool_calls_of(tokenizer: Any) -> dict[str, Any]:
    """What mlx-lm's wrapper needs to read a family's tool calls; nothing if it knows none.

    mlx-lm knows the family by its chat template, in a function that only its loader of folders
    calls.

    Args:
        tokenizer: The tokenizer, with its chat template.
    """
    from mlx_lm import tokenizer_utils

    infer = getattr(tokenizer_utils, "_infer_tool_parser", lambda _: None)
    name = infer(tokenizer)
    if name is None:
        return {}
    family = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return {
        "tool_parser": family.parse_tool_call,
        "tool_call_start": family.tool_call_start,
        "tool_call_end": family.tool_call_end,
    }
