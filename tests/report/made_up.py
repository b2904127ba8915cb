"""Invented records in the form of plan, audit and benchmark, and steps of an invented text."""

import math
from typing import Any

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


def plan() -> dict[str, Any]:
    proposers = {"draft_model": 0.82, "eagle3": 0.74, "ngram": 0.35, "suffix": 0.42}
    rows = []
    for temperature in (0.0, 1.0):
        for batch in (1, 4):
            for name, rate in proposers.items():
                alpha = rate - 0.12 * temperature
                for depth in (1, 2, 3, 4, 6, 8):
                    tokens = (1 - alpha ** (depth + 1)) / (1 - alpha)
                    cost = 1 + 0.05 * depth * (1 + 0.5 * batch) + (0.04 * depth if "m" in name else 0.0)
                    rows.append(
                        {
                            "name": f"{name} tiny-1m",
                            "method": name,
                            "num_speculative_tokens": depth,
                            "config": {"method": name, "num_speculative_tokens": depth},
                            "temperature": temperature,
                            "batch": batch,
                            "tokens_per_pass": tokens,
                            "tokens_per_pass_low": tokens * 0.95,
                            "tokens_per_pass_high": tokens * 1.05,
                            "speedup": tokens / cost,
                            "low": tokens / cost * 0.92,
                            "high": tokens / cost * 1.09,
                            "end_to_end": tokens / cost * 0.9,
                            "step_seconds": 0.02 * cost,
                            "draft_seconds": 0.001,
                            "plain_seconds": 0.02,
                            "acceptance": [alpha**k for k in range(1, depth + 1)],
                            "estimator": "distribution",
                            "requests": 12,
                            "best": False,
                        }
                    )
    places = list(dict.fromkeys((row["temperature"], row["batch"]) for row in rows))
    choices = []
    for place in places:
        top = max((row for row in rows if (row["temperature"], row["batch"]) == place), key=lambda row: row["speedup"])
        top["best"] = True
        choices.append({"temperature": place[0], "batch": place[1], "speculate": True, "sure": True, "row": top})
    costs = {
        "tiny-15m": [
            {
                "rows": m,
                "context": context,
                "batch": 1,
                "seconds": {"median": second, "low": second * 0.96, "high": second * 1.1, "turns": 5},
                "floor": {"median": 0.018 * (1 + m / 40), "low": 0.017, "high": 0.03, "turns": 5},
            }
            for context in (512, 4096)
            for m in (1, 2, 3, 4, 5, 8, 12, 16)
            for second in [0.02 * (1 + m / 20 + 0.2 * (m > 4)) * (1 + context / 9000)]
        ]
    }
    predictors = [
        {
            "name": name,
            "correlation": r,
            "error": e,
            "slope": 1.0,
            "intercept": 0.0,
            "draft": "draft_model tiny-1m",
            "temperature": 1.0,
        }
        for name, r, e in (
            ("total variation", -0.97, 0.012),
            ("KL divergence", -0.9, 0.024),
            ("draft entropy", -0.4, 0.047),
            ("constant", 0.0, 0.052),
        )
    ]
    best = {"method": "draft_model", "num_speculative_tokens": 6}
    exports = {
        "foretoken": best,
        "vllm": best,
        "transformers": "draft = AutoModelForCausalLM.from_pretrained('x')\nmodel.generate()",
    }
    return {
        "setting": SETTING,
        "best": best,
        "exports": exports,
        "choices": choices,
        "rows": rows,
        "costs": costs,
        "predictors": predictors,
    }


WHAT = {"ranks": "probability moved between ranks", "surprise": "nats a token"}


def audit(outcome: str = "failed") -> dict[str, Any]:
    names = ("ranks", "surprise", "likeliest token", "unlikely tokens", "toward the draft")
    statistics = [
        {
            "name": f"{group}: {name}",
            "value": 21.3 if name == "ranks" else 0.7 * math.cos(i * 7 + len(group)),
            "dof": 19 if name == "ranks" else 0,
            "p_value": 0.9 / (1 + 3 * i),
            "finds": 0.01 * (i + 1),
            "what": WHAT.get(name, "change of the rate"),
        }
        for group in ("all tokens", "first", "second")
        for i, name in enumerate(names)
    ]
    divergences = [
        {
            "prompt": 2,
            "position": 17,
            "margin": 0.031,
            "moved": 0.002,
            "tie": False,
            "plain": "def f(x):\n    return x + 1\n",
            "speculative": "def f(x):\n    return y + 2\n",
        },
        {"prompt": 5, "position": 3, "margin": None, "moved": None, "tie": False},
    ]
    law = {"tokens": 40960, "rounds": 12000, "impossible": 0, "level": 2e-5, "statistics": statistics}
    checks = [
        (
            "greedy parity",
            outcome,
            "2 of 32 texts part from plain decoding",
            {
                "texts": {"alone": 16, "in a batch": 16},
                "tokens": 1024,
                "diverged": 2,
                "not_ties": 2,
                "divergences": divergences if outcome == "failed" else [],
            },
        ),
        (
            "self-draft control",
            "passed",
            "drafts of the target itself accepted whole: greedy 100.0%",
            {"rounds": 412, "accepted_whole": {"greedy": 1.0, "drawn": 1.0, "seeded": 1.0}, "least": 1.0},
        ),
        ("sampled distribution", "passed", "40,960 tokens, 15 statistics, the most surprising p = 0.02", law),
        (
            "prefix distribution",
            "passed",
            "first 3 tokens of 8,192 texts",
            {
                "texts": 8192,
                "length": 3,
                "fits": [
                    {"g": 80.2, "dof": 77, "p_value": 0.38, "finds": 0.04},
                    {"g": None, "dof": 0, "p_value": 0.0, "finds": 0.0},
                ],
            },
        ),
        (
            "negative control",
            "passed",
            "found, after 4,096 tokens",
            {
                "plants": [
                    {
                        "error": "a rejected token is replaced by a draw from p",
                        "tokens": 4096,
                        "needed": None,
                        "found": {"first: toward the draft": 9.2},
                        "impossible": 0,
                    },
                    {
                        "error": "drafts are accepted with 2 p/q",
                        "tokens": 40960,
                        "needed": 120000,
                        "found": {},
                        "impossible": 0,
                    },
                ]
            },
        ),
        ("seeded distribution", "skipped", "it does not promise one text for one seed", {}),
    ]
    return {
        "outcome": outcome,
        "seconds": 118.2,
        "summary": "not exact: greedy parity failed" if outcome == "failed" else "exact",
        "subject": {"engine": "foretoken", "model": "/a/target", "draft_model": "/a/draft", "method": "draft_model"},
        "checks": [
            {"name": name, "outcome": out, "evidence": said, "numbers": numbers, "seconds": 12.5}
            for name, out, said, numbers in checks
        ],
    }


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
