"""Texts of the bundled pair under schemas: valid, and the same with every proposer."""

import json
from typing import Any

import jsonschema
import pytest

from foretoken import LLM, SamplingParams, zoo

CHOICE = ["return value", "reset", 'größe 🙂\n"x\\']
NUMBER = {"type": "integer", "minimum": -99, "maximum": 999}
TEXT = {"type": "string", "maxLength": 10}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: list[dict[str, Any]] = [
    {"enum": ["yes", 'nö "quoted"', None, 3]},
    closed(name=TEXT, tags={"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}),
    closed(a=NUMBER, b={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.125}, c={"type": "boolean"}),
    closed(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, day={"type": "string", "format": "date"}),
    {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}, "minItems": 2, "maxItems": 4},
    closed(
        user=closed(
            name=TEXT,
            grid={
                "type": "array",
                "items": {"type": "array", "items": NUMBER, "maxItems": 2},
                "minItems": 1,
                "maxItems": 2,
            },
        ),
        note={"anyOf": [TEXT, {"type": "null"}]},
    ),
    {
        "type": "array",
        "items": {"anyOf": [closed(kind={"const": 1}, n=NUMBER), closed(kind={"const": 2}, t=TEXT)]},
        "minItems": 1,
        "maxItems": 3,
    },
    {
        "$defs": {
            "leaf": closed(name={"type": "string", "maxLength": 4}),
            "node": closed(leaves={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}),
        },
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "maxItems": 2,
    },
]


def params(schema: Any, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=300, structured_outputs={"json": schema}, **others)


@pytest.fixture(scope="module")
def pair() -> LLM:
    return LLM(dtype="float32")


@pytest.fixture(scope="module")
def tree() -> LLM:
    config = {"method": "draft_model", "model": str(zoo.path("draft")), "tree": "sampled", "num_speculative_tokens": 8}
    return LLM(zoo.path("target"), speculative_config=config, dtype="float32")


@pytest.mark.parametrize("drafts", ["pair", "tree"])
@pytest.mark.slow
def test_every_text_that_ended_is_valid(drafts, request):
    """All schemas in one batch, hot."""
    llm = request.getfixturevalue(drafts)
    outputs = llm.generate(["def f(x):\n"] * len(SCHEMAS), [params(s) for s in SCHEMAS])
    for schema, output in zip(SCHEMAS, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.Draft202012Validator(schema).validate(json.loads(output.outputs[0].text))


@pytest.mark.slow
def test_one_text_per_seed_for_every_proposer(pair, tree):
    others = [LLM(zoo.path("target"), speculative_config={"method": m}, dtype="float32") for m in ("ngram", "suffix")]
    top_k = {"method": "draft_model", "model": str(zoo.path("draft")), "tree": "top_k", "num_speculative_tokens": 6}
    others.append(LLM(zoo.path("target"), speculative_config=top_k, dtype="float32"))

    def texts(llm: LLM, **settings: Any) -> list[str]:
        some = [params(SCHEMAS[i], seed=i, **settings) for i in (1, 5, 6)]
        some.append(SamplingParams(structured_outputs={"choice": CHOICE}, temperature=0.0, max_tokens=40, **settings))
        return [o.outputs[0].text for o in llm.generate(["class A:\n"] * len(some), some)]

    plain = texts(pair, speculative_tokens=0)
    assert plain[-1] in CHOICE
    for llm in (pair, tree, *others):
        assert texts(llm) == plain


def test_min_tokens_give_way_to_a_finished_text(pair):
    wanted = SamplingParams(structured_outputs={"choice": ["a", "b"]}, min_tokens=20, max_tokens=30)
    done = pair.generate("x", wanted)[0].outputs[0]
    assert done.text in ("a", "b") and done.finish_reason == "stop"
