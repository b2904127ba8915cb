"""Structured output: JSON that fits a schema, one of several choices, and a regular expression.

    .venv/bin/python examples/structured_output.py

The schema and the regular expression need `pip install 'foretoken[serve]'`.
"""

from __future__ import annotations

import json

from foretoken import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
    "required": ["name", "port"],
    "additionalProperties": False,
}


def main() -> None:
    """Prints one text of each kind. The draft model samples under the same grammar as the target."""
    llm = LLM()
    kinds = {"json": SCHEMA, "choice": ["GET", "POST", "DELETE"], "regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}
    for kind, value in kinds.items():
        params = SamplingParams(structured_outputs={kind: value}, max_tokens=60, temperature=1.0, seed=3)
        (output,) = llm.generate("request = ", params)
        text = output.outputs[0].text
        print(f"{kind}: {text}  ({output.stats.accepted} of {output.stats.drafted} draft tokens accepted)")
        if kind == "json":
            print("parsed:", json.loads(text))


if __name__ == "__main__":
    main()
