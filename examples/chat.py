"""A conversation: messages go through the tokenizer's chat template, and every answer joins the next prompt.

    .venv/bin/python examples/chat.py
    .venv/bin/python examples/chat.py your/chat-model your/draft-model

The bundled model completes Python and does not converse: its turns are pieces of source.
"""

from __future__ import annotations

import sys

from foretoken import LLM, SamplingParams


def main(model: str | None = None, draft_model: str | None = None) -> None:
    """Asks twice; the second question refers to the first answer."""
    llm = LLM(model, draft_model, enable_prefix_caching=True)  # the second prompt starts with the first one
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=1)
    messages: list[dict[str, str]] = []
    for question in ("def read_lines(path):", "def write_lines(path, lines):"):
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        print(f"> {question}\n{output.outputs[0].text}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
