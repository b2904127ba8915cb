"""A hostile text, and steps of an invented one."""

import math

import torch

from foretoken.core.draft import Draft, Sampled
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import Verdict
from foretoken.outputs import CompletionOutput, Logprob, SpeculationStats, StreamPiece

HOSTILE = (
    '</style><script>alert(\'x\')</script><img src="http://example.org/x.png" onerror="alert(1)"> '
    "\x00\x1b[31m \ud800 & ]]>"
)
SETTING = {"date": "2026-01-01", "processor": "a <fast> one", "cores": 2, "command": 'foretoken x "a&b"'}


WORDS = ["def ", "f", "(", "x", ")", ":", "\n", "    ", "return ", "x", " + ", "1", "\n\n", "€", "<b>", "&", " "]


class Letters:
    """A tokenizer whose token i is a word of the list, the last an end mark."""

    def __init__(self, words: list[str] | None = None) -> None:
        self.words = [*(words or WORDS), "<|end|>"]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i == len(self.words) - 1)]
        return "".join(self.words[i] for i in kept)


def pieces(tokenizer: Letters, steps: int = 12, finish: str | None = "length", words: int = 16) -> list[StreamPiece]:
    """Sampled chains of three: in turn all, two, one and none of them are accepted."""
    q = torch.full((4, len(tokenizer.words)), 1.0 / len(tokenizer.words))
    made: list[StreamPiece] = []
    emitted: list[int] = []
    for number in range(steps):
        ids = [(len(emitted) + k) % words for k in range(3)]
        landed = 3 - number % 4
        draft = Draft.chain(
            ids if landed == 3 else [*ids[:landed], *((i + 5) % words for i in ids[landed:])], Sampled(q)
        )
        own = (len(emitted) + landed) % words
        tokens = (*ids[:landed], own)
        last = number == steps - 1
        timings = Timings(0.001, 0.03 if number == 0 else 0.004, 0.0005, 0.0002, 1)
        step = StepOutput(
            0, len(emitted), draft, Verdict(tuple(range(landed)), own), tokens, timings, finish if last else None
        )
        emitted += tokens
        text = tokenizer.decode(list(tokens))
        output = _output(tokenizer, emitted, steps, finish) if last else None
        made.append(StreamPiece(0, 0, text, tokens, step, output))
    return made


def _output(tokenizer: Letters, emitted: list[int], steps: int, finish: str | None) -> CompletionOutput:
    logprobs = tuple(
        {i: Logprob(math.log(0.5), 1, tokenizer.words[i]), (i + 5) % 16: Logprob(math.log(0.25), 2, "other")}
        for i in emitted
    )
    stats = SpeculationStats(steps, steps, 3 * steps, len(emitted) - steps, len(emitted), 0.1)
    return CompletionOutput(0, tokenizer.decode(emitted), tuple(emitted), finish, None, logprobs, stats)
