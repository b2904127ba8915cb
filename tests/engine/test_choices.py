"""Choices against a search through all of them and llguidance; texts of the bundled pair under schemas."""

import json
import time
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import LLM, SamplingParams, zoo
from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.engine.matching import GrammarVocabulary, LocalGrammar
from foretoken.engine.structured import Choices, GrammarRestriction, TokenList

END = 0
PIECES = [
    None,
    b"a",
    b"b",
    b"ab",
    b"aba",
    b"a",
    b"\xc3",
    b"\xbc",
    "ü".encode(),
    "🙂".encode()[:3],
    b"\x82",
    b" ",
    b" a",
    b"bb",
]
SPELLED = [*PIECES, None, *("🙂".encode()[i : i + 1] for i in range(3))]
VOCAB = len(SPELLED) + 3  # the model's rows are wider than the tokenizer
TOKENS = TokenList(SPELLED, VOCAB)
WORDS = st.lists(st.text(alphabet="abü🙂 ", max_size=5), min_size=1, max_size=8)


def expected(texts: list[str], tokens: list[int]) -> set[int] | None:
    """By trying every token on every text; None if no text begins with ``tokens``."""
    if not all(t < len(SPELLED) and SPELLED[t] for t in tokens):
        return None
    so_far = b"".join(SPELLED[t] or b"" for t in tokens)
    whole = [text.encode() for text in texts]
    if not any(text.startswith(so_far) for text in whole):
        return None
    fits = {i for i, p in enumerate(SPELLED) if p and any(text.startswith(so_far + p) for text in whole)}
    return fits | ({END} if so_far in whole else set())


def result(mask: torch.Tensor | None) -> set[int] | None:
    return None if mask is None else set(mask.nonzero().flatten().tolist())


@settings(deadline=None)
@given(WORDS, st.data())
@pytest.mark.slow
def test_masks_are_those_of_a_search_through_all(texts, data):
    grammar, tokens = Choices(texts, TOKENS).follow([END]), [5, 5]
    for _ in range(8):
        cut = data.draw(st.integers(2, len(tokens)))
        mask = grammar.allowed(History(tokens[:cut], 2, tuple(tokens[cut:])))
        assert result(mask) == expected(texts, tokens[2:])
        likely = sorted((result(mask) or set()) - {END})
        stray = st.integers(0, VOCAB - 1)
        tokens.append(data.draw(st.one_of(st.sampled_from(likely), stray) if likely else stray))


@settings(deadline=None, max_examples=50)
@given(WORDS, st.data())
def test_masks_are_those_of_llguidance(texts, data):
    """With the same choices as alternatives of a grammar."""
    lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    special = [i for i, piece in enumerate(SPELLED) if not piece]
    vocabulary = GrammarVocabulary(
        [*(p or b"<[%d]>" % i for i, p in enumerate(SPELLED)), b"<[end]>"], [*special, len(SPELLED)]
    )
    oracle = GrammarRestriction(LocalGrammar(vocabulary.load(), {"grammar": lark}), vocabulary.end, VOCAB).follow([END])
    grammar, tokens = Choices(texts, TOKENS).follow([END]), list[int]()
    while True:
        mask = grammar.allowed(History(tokens, 0))
        assert result(mask) == result(oracle.allowed(History(tokens, 0)))
        likely = sorted((result(mask) or set()) - {END})
        if not likely:
            return
        tokens.append(data.draw(st.sampled_from(likely)))


def test_an_end_id_is_allowed_only_after_a_complete_text():
    """Also where it is one of the texts' own tokens, and where the empty text is one of the choices."""
    grammar = Choices(["", "ab", "abb"], TOKENS).follow([END, 2])
    assert result(grammar.allowed(History([], 0))) == {END, 1, 2, 3, 5}
    assert result(grammar.allowed(History([1], 0))) == {13}
    assert result(grammar.allowed(History([3], 0))) == {END, 2}
    assert grammar.allowed(History([3, END], 0)) is None


def test_choices_without_a_token_are_refused():
    with pytest.raises(InvalidRequest, match="no token of the model can come"):
        Choices(["ccc", "x"], TOKENS)
    grammar = Choices(["aac"], TOKENS).follow([END])
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="any further: no token of the model can come"):
            grammar.allowed(History([1, 5], 0))


@pytest.fixture(scope="module")
def pair() -> LLM:
    return LLM(dtype="float32")


@pytest.mark.parametrize("depth", [0, 5])
@pytest.mark.slow
def test_a_hundred_thousand_choices(pair, depth):
    texts = [f"item {i:05} größe 🙂" for i in range(100_000)]
    params = SamplingParams(structured_outputs={"choice": texts}, max_tokens=60, seed=3, speculative_tokens=depth, n=2)
    begun = time.process_time()
    outputs = pair.generate(["a = "], params)[0].outputs
    assert time.process_time() - begun < 10
    assert all(o.text in texts and o.finish_reason == "stop" for o in outputs)
    plain = SamplingParams(structured_outputs={"choice": texts}, max_tokens=60, seed=3, speculative_tokens=0, n=2)
    assert [o.text for o in outputs] == [o.text for o in pair.generate(["a = "], plain)[0].outputs]


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
