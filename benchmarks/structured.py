"""Structured outputs under speculation: how many of many requests satisfy their schema, at temperature 1.

A request is valid if it ended by itself and its text is JSON that jsonschema accepts. The schemas become harder; all
are bounded, numbers too, so that every text must end.
"""

import json
from collections import Counter
from collections.abc import Mapping
from time import perf_counter
from typing import Annotated, Any

import jsonschema  # type: ignore[import-untyped]
import typer

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.output import listing, report
from foretoken.bench.workloads import FUNCTIONS
from foretoken.outputs import RequestOutput
from options import Output

COLUMNS = {name.replace("_", " "): f"{{{name}}}" for name in ("schema", "requests", "valid", "tokens")}
COLUMNS |= {"tokens per step": "{tokens_per_step:.2f}"}
TEXT = {"type": "string", "maxLength": 24}
COUNT = {"type": "integer", "minimum": -999, "maximum": 9999}


def record(required: bool = True, **properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with exactly these properties."""
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def items(of: Any, min_items: int, max_items: int) -> dict[str, Any]:
    """Returns the schema of an array of ``min_items`` to ``max_items`` elements."""
    return {"type": "array", "items": of, "minItems": min_items, "maxItems": max_items}


LINK = record(to={"type": "string", "maxLength": 12}, weight={"type": "integer", "minimum": 0, "maximum": 99})
CELL = {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "maximum": 1e6, "multipleOf": 0.25}, TEXT]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "one of three": {"enum": ["yes", "no", 'it depends: "ünïcode" \\ 🙂']},
    "flat object": record(name=TEXT, ok={"type": "boolean"}),
    "optional and null": record(
        required=False, a={"anyOf": [COUNT, {"type": "null"}]}, b=TEXT, c={"const": [1, {"x": None}]}
    ),
    "bounds": record(
        port={"type": "integer", "minimum": 1024, "maximum": 65535},
        share={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.125},
        even={"type": "integer", "multipleOf": 2, "minimum": -10, "maximum": 10},
    ),
    "patterns": record(
        id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
        day={"type": "string", "format": "date"},
        key={"type": "string", "format": "uuid"},
    ),
    "short texts": items({"type": "string", "minLength": 1, "maxLength": 3}, 3, 6),
    "nested": record(
        user=record(name=TEXT, tags=items({"enum": ["a", "b", "c"]}, 1, 4)), grid=items(items(COUNT, 2, 2), 1, 3)
    ),
    "any of": items(
        {"anyOf": [record(kind={"const": "int"}, value=COUNT), record(kind={"const": "text"}, value=TEXT)]}, 1, 4
    ),
    "references": {
        "$defs": {
            "leaf": record(name={"type": "string", "maxLength": 8}),
            "branch": record(leaves=items({"$ref": "#/$defs/leaf"}, 0, 2), link=LINK),
            "tree": record(branches=items({"$ref": "#/$defs/branch"}, 0, 3)),
        },
        "$ref": "#/$defs/tree",
    },
    "all together": record(
        rows=items(record(id={"type": "string", "pattern": "^[a-f0-9]{8}$"}, cell=CELL), 2, 5),
        next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]},
    )
    | {"$defs": {"link": LINK}},
}


def fault(text: str, schema: Mapping[str, Any]) -> str | None:
    """Returns the reason why ``text`` is not valid; None if it is."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def judge(name: str, outputs: list[RequestOutput]) -> dict[str, Any]:
    """Returns the counts of one schema. reasons: finish reasons; wrong: some texts that are not valid."""
    done = [output.outputs[0] for output in outputs]
    valid = [d.finish_reason == "stop" and fault(d.text, SCHEMAS[name]) is None for d in done]
    tokens, steps = sum(len(d.token_ids) for d in done), sum(d.stats.steps for d in done)
    wrong = tuple(d.text for d, good in zip(done, valid, strict=True) if not good)
    reasons = Counter(str(d.finish_reason) for d in done)
    counts = {"schema": name, "requests": len(done), "valid": sum(valid), "tokens": tokens}
    return counts | {"tokens_per_step": tokens / max(1, steps), "reasons": dict(reasons), "wrong": wrong[:3]}


def main(
    requests: Annotated[int, typer.Option(min=1, help="In all, spread over the schemas.")] = 500,
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
    tree: Annotated[str, typer.Option(help="chain, top_k, sampled or greedy_multi.")] = "sampled",
    depth: Annotated[int, typer.Option(min=0, help="Draft tokens per step.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    seed: Annotated[int, typer.Option(help="Where all random numbers come from.")] = 0,
    dtype: str = "auto",
    output: Output = None,
) -> None:
    """Completes requests with the bundled pair and counts the valid ones. The exit code is 1 if any is not valid."""
    config = {"method": "draft_model", "model": str(zoo.path("draft")), "tree": tree, "num_speculative_tokens": depth}
    llm = LLM(zoo.path("target"), speculative_config=config, max_num_seqs=concurrency, dtype=dtype, seed=seed)
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(requests)]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, structured_outputs={"json": SCHEMAS[name]})
        for name in names
    ]
    started = perf_counter()
    outputs = llm.generate([FUNCTIONS[i % len(FUNCTIONS)] for i in range(requests)], params)
    seconds = perf_counter() - started
    rows = [judge(name, [o for o, n in zip(outputs, names, strict=True) if n == name]) for name in dict.fromkeys(names)]
    facts = config | {"concurrency": concurrency, "temperature": temperature, "seconds": round(seconds, 1)}
    facts["model"] = zoo.path("draft").name
    wrong = [
        f"{row['schema']}: {fault(text, SCHEMAS[row['schema']])}: {text!r}" for row in rows for text in row["wrong"]
    ]
    total = {"schema": "all"} | {name: sum(row[name] for row in rows) for name in ("requests", "valid", "tokens")}
    report([listing(COLUMNS, [*rows, total]), *wrong], facts, output, rows=rows)
    raise typer.Exit(total["valid"] < total["requests"])


if __name__ == "__main__":
    typer.run(main)
