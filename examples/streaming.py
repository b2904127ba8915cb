"""Text as it is accepted, from two requests at once, each piece with the origin of its tokens.

.venv/bin/python examples/streaming.py
"""

from __future__ import annotations

from foretoken import LLM, SamplingParams


def main() -> None:
    """Streams two completions and stops the second one early."""
    llm = LLM()
    prompts = ("def read_lines(path):", "class Queue:")
    params = [SamplingParams(max_tokens=40, temperature=0), SamplingParams(max_tokens=40, temperature=0, stop=["def"])]
    for piece in llm.stream(prompts, params):
        print(f"{piece.request_id}: {piece.text!r}")
        if piece.output is not None:
            print(f"{piece.request_id}: finished, {piece.output.finish_reason}")


if __name__ == "__main__":
    main()
