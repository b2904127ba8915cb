"""How much an audit of an endpoint asks for: from a budget to numbers of texts, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.core.errors import InvalidRequest

LEAST = 4_000  # tokens of the smallest audit
OBJECTS, OBJECT_TOKENS = 4, 48  # JSON texts of each side
_TUNED = 7  # parameters that are sampled under
_SMALL, _LARGE = 10_000, 100_000  # budgets from which texts are longer
_PARITY_SHARE, _TUNED_SHARE = 0.15, 0.25
_BASE_TEXTS = 26  # greedy texts that the parameters of one side take, about


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is generated.

    Attributes:
        parity_prompts: Prompts whose greedy texts are compared.
        parity_tokens: Tokens of each of these texts.
        sampled: Texts sampled with speculation.
        sampled_plain: Texts sampled without, to test the reference.
        sampled_tokens: Tokens of a sampled text.
        tuned: Texts for each sampling parameter, on each side.
        tuned_tokens: Tokens of each of these.
    """

    parity_prompts: int
    parity_tokens: int
    sampled: int
    sampled_plain: int
    sampled_tokens: int
    tuned: int
    tuned_tokens: int

    @classmethod
    def of(cls, tokens: int, sides: int, each: bool) -> Sizes:
        """Returns the sizes for a budget.

        Args:
            tokens: Generated tokens of all requests, about.
            sides: 1 if there is no plain side, else 2.
            each: Whether a scored token takes a request of its own.

        Raises:
            InvalidRequest: The budget is too small for an audit.
        """
        if tokens < LEAST:
            raise InvalidRequest(f"--budget must be at least {LEAST:,} tokens for an endpoint, got {tokens:,}")
        parity = 16 if tokens < _SMALL else 32 if tokens < _LARGE else 64
        prompts = _within(tokens * _PARITY_SHARE / (7 * parity), 4, 16)
        length, price = 24 if tokens < _LARGE else 32, 2 if each else 1
        tuned = _within(tokens * _TUNED_SHARE / (_TUNED * sides * length * price), 3, 64)
        fixed = sides * (_BASE_TEXTS * parity + OBJECTS * OBJECT_TOKENS) + (7 if sides == 2 else 1) * prompts * parity
        left = tokens - fixed - _TUNED * sides * tuned * length * price
        sampled = _within(left / (length * price), 3, 100_000)
        plain = sampled // 3 if sides == 2 else 0
        return cls(prompts, parity, sampled - plain, plain, length, tuned, length)

    def costs(self, sides: int, prompt_tokens: float, each: bool, scored: bool) -> dict[str, Mapping[str, int]]:
        """Returns by check about how many requests, prompt tokens and generated tokens it takes.

        Args:
            sides: See ``of``.
            prompt_tokens: Of a prompt, about.
            each: See ``of``.
            scored: Whether sampled texts are sent back to be scored.
        """
        greedy = 7 * self.parity_prompts if sides == 2 else 0
        return {
            "greedy parity": _cost(greedy, self.parity_tokens, prompt_tokens),
            "sampled distribution": _sampled(
                self.sampled + self.sampled_plain, self.sampled_tokens, prompt_tokens, each, scored
            ),
            "sampling parameters": _sampled(
                _TUNED * sides * self.tuned, self.tuned_tokens, prompt_tokens, each, scored
            ),
            "other parameters": _cost(sides * (_BASE_TEXTS + OBJECTS), self.parity_tokens, prompt_tokens),
        }


def _within(value: float, minimum: int, maximum: int) -> int:
    return max(minimum, min(maximum, int(value)))


def _cost(requests: int, tokens: int, prompt_tokens: float) -> Mapping[str, int]:
    return {
        "requests": requests,
        "prompt_tokens": round(requests * prompt_tokens),
        "tokens": requests * tokens,
    }


def _sampled(texts: int, tokens: int, prompt_tokens: float, each: bool, scored: bool) -> Mapping[str, int]:
    own = _cost(texts, tokens, prompt_tokens)
    again = texts * tokens if each else texts if scored else 0
    read = prompt_tokens + (tokens / 2 if each else tokens)
    return {
        "requests": own["requests"] + again,
        "prompt_tokens": own["prompt_tokens"] + round(again * read),
        "tokens": own["tokens"] + again,
    }
