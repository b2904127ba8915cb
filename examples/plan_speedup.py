"""Planning from Python: finds the fastest method and draft length on this machine and text, before deployment.

    .venv/bin/python examples/plan_speedup.py

`foretoken plan` does the same with more candidates and more measurements.
"""

from __future__ import annotations

from foretoken import LLM, zoo
from foretoken.plan.candidates import Candidate
from foretoken.plan.planner import Planner, PlanSettings
from foretoken.speculation import Builder

PROMPTS = ("def read_lines(path):", "class Stack:", "import json\n\ndef load(", "def merge(left, right):")


def main(max_tokens: int = 32, turns: int = 6) -> None:
    """Plans for the bundled target with its draft model and prompt lookup.

    Args:
        max_tokens: Tokens that the target generates after each prompt.
        turns: Timed steps of each candidate. More steps give narrower intervals.
    """
    llm = LLM(speculative_config={"method": "none"})
    candidates = [
        Candidate("draft model", {"method": "draft_model", "model": str(zoo.path("draft"))}, depths=(2, 4, 6)),
        Candidate("prompt lookup", {"method": "ngram"}, depths=(4, 8)),
    ]
    builder = Builder(llm.target, llm.tokenizer, zoo.path("target"), lambda model: LLM(model).target)
    settings = PlanSettings(temperatures=(0.0,), max_tokens=max_tokens, turns=turns)
    plan = Planner(llm.target, builder.build, settings).plan(list(map(llm.tokenizer.encode, PROMPTS)), candidates)
    for row in plan.rows:
        length = row.config["num_speculative_tokens"]
        interval = f"{row.low:.2f} to {row.high:.2f}"
        print(f"{row.name}, {length} tokens: {row.tokens_per_pass:.2f} tokens a pass, {row.speedup:.2f}x ({interval})")
    (choice,) = plan.choices
    print("recommended:", choice.row.config if choice.row else "do not speculate")


if __name__ == "__main__":
    main()
