"""Fill-in-the-middle: a prompt of the text before and after a gap, in the tokens that code models know for it."""

from __future__ import annotations

from typing import Any

from foretoken.serve.errors import invalid

# (before the prefix, before the suffix, before the middle), as llama.cpp knows them by name
FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
)


def fill_in_tokens(tokenizer: Any) -> tuple[int, int, int] | None:
    """Returns the tokens before the prefix, the suffix and the middle; None if the tokenizer has none."""
    vocabulary = tokenizer.get_vocab()
    for names in FORMATS:
        if all(name in vocabulary for name in names):
            return vocabulary[names[0]], vocabulary[names[1]], vocabulary[names[2]]
    return None


def fill_in_prompt(tokenizer: Any, prefix: str, suffix: str) -> list[int]:
    """Returns the tokens of a prompt for the text between ``prefix`` and ``suffix``. Raises ApiError."""
    marks = fill_in_tokens(tokenizer)
    if marks is None:
        raise invalid(
            "this model has no tokens for filling in (such as <|fim_prefix|>); leave suffix out, or serve a code model "
            "that has them",
            param="suffix",
        )

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    starts = list(tokenizer("")["input_ids"])  # such as a beginning-of-text token
    beginning = starts[:1] if starts and starts[0] == tokenizer.bos_token_id else []
    return [*beginning, marks[0], *ids(prefix), marks[1], *ids(suffix), marks[2]]
