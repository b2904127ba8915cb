"""OpenAI's client against `foretoken serve`: completions, a stream, and parameters beyond OpenAI's.

    foretoken serve &
    .venv/bin/python examples/openai_client.py http://127.0.0.1:8000/v1

It needs `pip install openai`, and `pip install 'foretoken[serve]'` for the server.
"""

from __future__ import annotations

import sys

import openai


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    """Sends three requests to the server at ``base_url``."""
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt="def read_lines(path):", max_tokens=30, seed=1)
        print(answer.choices[0].text)

        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "class Stack:"}]
        for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=30, stream=True):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        # Foretoken's own parameters, such as the draft length, go into extra_body.
        beyond = {"speculative_tokens": 0, "top_k": 20}
        plain = client.completions.create(model=model, prompt="import", max_tokens=10, extra_body=beyond)
        print(plain.choices[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
