"""Structured outputs: masks along drafted trees, and what is refused."""

import builtins
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from pydantic import BaseModel, SecretStr

from foretoken import LLM, SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.engine import matching
from foretoken.engine.matching import GrammarVocabulary, LocalGrammar, MatcherFollower, lark_of
from foretoken.engine.requests import RequestBuilder
from foretoken.engine.structured import Grammars, IsolatedGrammars, MatcherGrammar

END = 0
EXTRA = 40  # ids of the model behind the tokenizer's
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "json, any space": {"json": json.dumps(PERSON), "whitespace": True},
    "any json": {"json": True},
    "object": {"json_object": True},
    "regex": {"regex": r"(ab|cd)+-\d{2}"},
    "choice": {"choice": ["return value", "reset", 'größe 🙂\n"x\\']},
    "lark": {"grammar": 'start: "a" b\nb: "(" b ")" | /[xyz]{2}/'},
    "gbnf": {"grammar": 'root ::= "a" b\nb ::= "(" b ")" | [xyz]+'},
}


@pytest.fixture(scope="module")
def pair() -> LLM:
    return LLM(dtype="float32")


@pytest.fixture(scope="module", params=[Grammars, IsolatedGrammars, "wide"])
def grammars(request, pair) -> Iterator[Grammars]:
    if request.param == "wide":
        tokenizer = request.getfixturevalue("wide_tokenizer")
        yield Grammars(tokenizer, len(tokenizer) + EXTRA)
        return
    made = request.param(pair.tokenizer, len(pair.tokenizer) + EXTRA)
    yield made
    made.close()


def ids(mask: torch.Tensor | None) -> list[int]:
    assert mask is not None
    result: list[int] = mask.nonzero().flatten().tolist()
    return result


@pytest.fixture(scope="module")
def local(pair) -> Grammars:
    return Grammars(pair.tokenizer, len(pair.tokenizer) + EXTRA)


@pytest.fixture(scope="module")
def reference(grammars) -> Grammars:
    """Grammars of the same vocabulary as ``grammars``, in this process."""
    return Grammars(grammars.tokenizer, len(grammars.tokenizer) + EXTRA)


def fresh(grammars: Grammars, wanted: dict[str, Any], text: list[int]) -> torch.Tensor | None:
    """The mask of a matcher that has seen nothing before."""
    return grammars.new(wanted, [END]).allowed(History(text, 0))


# masks


def allows(grammars: Grammars, kind: str, text: str) -> bool:
    """Whether ``text``, spelled character by character, may come and end."""
    grammar = grammars.new(KINDS[kind], [END])
    tokens = [token for char in text for token in grammars.tokenizer.encode(char, add_special_tokens=False)]
    return all(token in ids(grammar.allowed(History(tokens[:i], 0))) for i, token in enumerate([*tokens, END]))


@pytest.mark.parametrize(
    "kind, good, bad",
    [
        ("json", '{"name": "ü", "tags": ["a", "b"]}', '{"name":"ü","tags":["a"]}'),
        ("json", '{"name": "", "tags": ["b"]}', '{"name": "", "tags": []}'),
        ("json, any space", '{ "name":"x",\n\n"tags" : ["a"]}', '{"name": "x", "tags": ["c"]}'),
        ("any json", '[1, null, {"a": 2.5e3}]', "[1, nul]"),
        ("object", '{"a": [1, {}]}', "[1]"),
        ("regex", "abcdab-07", "abc-07"),
        ("choice", 'größe 🙂\n"x\\', "return"),
        ("lark", "a((xy))", "a((xy)"),
        ("gbnf", "a(xyzzy)", "b"),
    ],
)
@pytest.mark.slow
def test_texts_of_a_grammar_are_allowed_and_others_are_not(grammars, kind, good, bad):
    assert allows(grammars, kind, good)
    assert not allows(grammars, kind, bad)


class Collected(BaseModel):
    """Types whose JSON schemas have keywords and formats that llguidance refuses."""

    numbers: set[int]
    words: frozenset[str]
    folder: Path
    secret: SecretStr
    data: bytes
    pattern: re.Pattern[str]


def test_pydantics_sets_and_paths_are_followed(grammars):
    good = {"numbers": [1, 2], "words": ["a"], "folder": "/tmp", "secret": "s", "data": "b", "pattern": "x+"}
    text = json.dumps(good)
    Collected.model_validate_json(text)
    mask = fresh(grammars, {"json": Collected.model_json_schema()}, spelled(grammars, text))
    assert END in ids(mask)
    mask = fresh(grammars, {"json": Collected.model_json_schema()}, spelled(grammars, '{"numbers": ["'))
    assert mask is None or not mask.any()


def test_formats_that_are_no_annotations_are_those_of_llguidance(local):
    named = [
        "path",
        "file-path",
        "binary",
        "password",
        "regex",
        "json-pointer",
        "uri-reference",
        "ipv4network",
        "uuid4",
    ]
    for format in (*matching.FORMATS, *named):
        restricted = 'start: %json {"type": "string", "format": "' + format + '"}'
        known = not LLMatcher(local.vocabulary.load(), restricted, log_level=0).is_error()
        assert known == (format in matching.FORMATS), format
        assert fresh(local, {"json": {"type": "string", "format": format}}, []) is not None


def test_data_in_a_schema_is_left_as_it_is(local):
    value = {"format": "path", "uniqueItems": True}
    schema = {"properties": {"format": {"const": value}}, "required": ["format"], "additionalProperties": False}
    given = json.dumps(schema)
    assert END in ids(fresh(local, {"json": schema}, spelled(local, json.dumps({"format": value}))))
    assert json.dumps(schema) == given


def test_every_tokenization_is_allowed(grammars):
    """Also where the text is forced and the tokenizer would have one token for it."""
    whole = grammars.tokenizer.encode("def f", add_special_tokens=False)
    mask = ids(grammars.new({"choice": ["def f"]}, [END]).allowed(History([], 0)))
    assert {grammars.tokenizer.decode([token]) for token in mask} >= {"d", "de", "def"} and whole[0] in mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_mask_is_what_the_matcher_accepts(grammars, kind):
    """Token by token: a mask forbids nothing that could be consumed."""
    probe, text = grammars.new(KINDS[kind], [END]), list[int]()
    wanted = (
        KINDS[kind] if kind != "choice" else {"grammar": "start: " + " | ".join(map(json.dumps, KINDS[kind]["choice"]))}
    )
    oracle = LLMatcher(grammars.vocabulary.load(), lark_of(wanted), log_level=0)
    for _ in range(4):
        mask = [t for t in ids(probe.allowed(History(text, 0))) if t != END]
        assert mask == [t for t in range(1, len(grammars.tokenizer)) if oracle.validate_tokens([t])]
        text += mask[-1:]
        if mask:
            assert oracle.consume_tokens(mask[-1:])


def test_padding_and_special_tokens_never_come(grammars):
    mask = grammars.new({"regex": "(?s:.*)"}, [END]).allowed(History([], 0))
    assert mask.shape == (len(grammars.tokenizer) + EXTRA,) and not mask[-EXTRA:].any()
    assert mask[END], "the empty text is complete"
    assert not grammars.new({"regex": "(?s:.+)"}, [END]).allowed(History([], 0))[END]


def test_only_ends_after_the_last_token(grammars):
    text = grammars.tokenizer.encode("ab", add_special_tokens=False)
    grammar = grammars.new({"regex": "ab"}, [END, 7, 9])
    assert ids(grammar.allowed(History(text, 0))) == [END, 7, 9]
    assert grammar.allowed(History(text, 0, (END, 5))) is None


def test_a_stop_id_comes_only_where_the_text_is_complete(grammars):
    """Even if the grammar itself would take it."""
    brace, letter = (grammars.tokenizer.encode(c, add_special_tokens=False)[0] for c in "}a")
    grammar = grammars.new({"regex": "[a}]{2}"}, [brace])
    assert brace not in ids(grammar.allowed(History([], 0)))
    assert ids(grammar.allowed(History([letter, letter], 0))) == [brace]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_masks_of_any_tree_in_any_order(grammars, reference, kind, data):
    """Committed and drafted tokens as a random run asks for them, some paths refused, against fresh matchers."""
    grammar = grammars.new(KINDS[kind], [END])
    tokens = [1, 2, 3]
    for _ in range(data.draw(st.integers(1, 3))):
        paths: list[tuple[int, ...]] = [()]
        for _ in range(data.draw(st.integers(1, 5))):
            path = data.draw(st.sampled_from(paths))
            mask = grammar.allowed(History(tokens, 3, path))
            own = fresh(reference, KINDS[kind], [*tokens[3:], *path])
            assert (mask is None) == (own is None) and (mask is None or torch.equal(mask, own))
            stray = mask is None or data.draw(st.integers(0, 9)) == 0
            choices = [5, 77, 300] if stray else [t for t in ids(mask) if t != END] or [END]
            paths.append((*path, choices[data.draw(st.integers(0, len(choices) - 1))]))
        keep = [p for p in paths if p and END not in p and grammar.allowed(History(tokens, 3, p)) is not None]
        tokens += data.draw(st.sampled_from(keep)) if keep else ()


def test_masks_do_not_depend_on_the_paths_asked_for_before(local):
    """A matcher of llguidance 1.9.1 that was rolled back from "((z" let "))" follow "a(xyz"."""
    compiled = LocalGrammar(local.vocabulary.load(), KINDS["gbnf"])
    used, own = compiled.follower(), compiled.follower()
    for follower in (used, own):
        follower.extend([65, 8])  # "a("
    used.allowed((1378, 90))
    assert used.allowed((1584, 90)) == own.allowed((1584, 90))


def test_masks_are_computed_once_a_step(local):
    calls = []

    class Counted(MatcherFollower):
        def allowed(self, path):
            calls.append(path)
            return super().allowed(path)

    vocabulary = local.vocabulary
    compiled = LLMatcher(vocabulary.load(), lark_of(KINDS["json"]), log_level=0)
    grammar = MatcherGrammar(Counted(compiled), len(local.tokenizer) + EXTRA, vocabulary.end, [END])
    tokens = [1]
    first = ids(grammar.allowed(History(tokens, 1)))[0]
    for _ in range(3):
        grammar.allowed(History(tokens, 1))
        grammar.allowed(History(tokens, 1, (first,)))
    assert len(calls) == 2
    tokens.append(first)
    grammar.allowed(History(tokens, 1))
    assert len(calls) == 3


def test_a_restarted_text_gets_new_masks(grammars):
    """Another list of tokens is another text, as is one that got shorter."""
    grammar = grammars.new(KINDS["lark"], [END])
    start = grammar.allowed(History([], 0))
    after = grammar.allowed(History([ids(start)[0]], 0))
    assert not torch.equal(start, after)
    assert torch.equal(grammar.allowed(History([9, 9], 2)), start)
    assert torch.equal(grammar.allowed(History([ids(start)[0]], 0)), after)


@pytest.mark.parametrize("wanted", [{"choice": ["compiled", "once"]}, {"regex": "compiled|once"}], ids=str)
def test_compiled_grammars_are_cached(grammars, wanted):
    compiled = grammars.compile(wanted)
    assert grammars.compile(dict(wanted)) is compiled
    assert grammars.new(wanted, [END]).allowed(History([], 0)) is not None


def test_equal_spellings_are_both_allowed():
    """Sentencepiece has bytes beside letters."""
    tokenizer = GrammarVocabulary([b"a", b"b", b"a", b"<[end]>"], [3]).load()
    mask = LocalGrammar(tokenizer, {"grammar": 'start: "ab"'}).follower().allowed(())
    assert mask is not None and mask[0] == 0b101


# limits


def spelled(grammars: Grammars, text: str) -> list[int]:
    """``text`` in tokens, character by character."""
    return [token for char in text for token in grammars.tokenizer.encode(char, add_special_tokens=False)]


@pytest.mark.slow
def test_many_alternatives_are_followed_to_their_end(grammars):
    """They are more than llguidance takes by default, whose error must not be taken for a refusal."""
    each = [
        {
            "type": "object",
            "properties": {f"k{i}": {"type": "integer"}},
            "required": [f"k{i}"],
            "additionalProperties": False,
        }
        for i in range(3_000)
    ]
    grammar, text = grammars.new({"json": {"anyOf": each}}, [END]), spelled(grammars, '{"k2999": 12}')
    for i, token in enumerate([*text, END]):
        assert token in ids(grammar.allowed(History(text[:i], 0)))


def test_an_error_of_llguidance_ends_the_text_where_it_occurs(pair, monkeypatch):
    """It is no refusal, after which anything could come; other nodes are verified as before."""
    monkeypatch.setitem(matching.LIMITS, "max_items_in_row", 20)
    alternatives = " | ".join(f'"k" /[0-{i % 9 + 1}]+/ "{i}"' for i in range(40))
    grammars = Grammars(pair.tokenizer, pair.target.vocab_size)
    grammar = grammars.new({"grammar": f'start: "ok" | "x" a\na: {alternatives}'}, [END])
    o, k, x = spelled(grammars, "okx")
    tokens = [1]
    before = grammar.allowed(History(tokens, 1, (o,)))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"cannot be followed any further: .*items"):
            grammar.allowed(History(tokens, 1, (x,)))
        with pytest.raises(InvalidRequest, match="cannot be followed any further"):
            grammar.allowed(History(tokens, 1, (x, k)))
    tokens.append(o)
    assert torch.equal(grammar.allowed(History(tokens, 1)), before)
    assert ids(grammar.allowed(History(tokens, 1, (k,)))) == [END]
    with pytest.raises(InvalidRequest, match="cannot be followed any further"):
        grammar.allowed(History([1, x], 1))


# refusals


@pytest.mark.parametrize(
    "wanted, said",
    [
        ("{}", "must be a mapping with one of json, json_object, regex, choice, grammar"),
        ({}, "got nothing"),
        ({"jsonschema": {}}, r"must have one of json, .* got \['jsonschema'\]"),
        ({"json": {}, "regex": "a"}, r"got \['json', 'regex'\]"),
        ({"json": 3}, r"structured_outputs\['json'\] must be a JSON schema"),
        ({"json_object": False}, r"\['json_object'\] must be True"),
        ({"regex": ""}, r"\['regex'\] must be a pattern"),
        ({"choice": []}, r"\['choice'\] must be a list of texts"),
        ({"choice": "yes"}, r"\['choice'\] must be a list of texts"),
        ({"choice": [1]}, r"\['choice'\] must be a list of texts"),
        ({"grammar": " "}, r"\['grammar'\] must be a grammar"),
        ({"regex": "a", "whitespace": True}, "goes with 'json' or 'json_object'"),
        ({"json": {}, "whitespace": 1}, "is True or False"),
    ],
)
def test_parameter_is_refused(wanted, said):
    with pytest.raises(InvalidRequest, match=said):
        SamplingParams(structured_outputs=wanted)


def test_ignore_eos_is_refused():
    with pytest.raises(InvalidRequest, match="ignore_eos has no meaning beside them"):
        SamplingParams(structured_outputs={"json": {}}, ignore_eos=True)


@pytest.mark.parametrize(
    "wanted, said",
    [
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": "{"}, "is not JSON"),
        ({"json": {"enum": {1, 2}}}, "is not JSON"),
        ({"json": "[" * 100_000}, "is not JSON"),
        ({"json": '{"enum": ["\\ud800"]}'}, "is no Unicode"),
        ({"choice": ["\ud800"]}, "is no Unicode"),
        ({"regex": "\ud800"}, "is no Unicode"),
        ({"grammar": 'start: "\ud800"'}, "is no Unicode"),
        ({"json": "[1]"}, r"an object or true, got \[1\]"),
        ({"json": False}, "got false"),
        ({"json": {"type": "strin"}}, "Invalid type: strin$"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": "root ::= ("}, "is neither Lark nor GBNF"),
        ({"regex": r"[^\x00-\U0010FFFF]"}, "no token of the model can come"),
    ],
)
def test_grammar_is_refused(grammars, wanted, said):
    with pytest.raises(InvalidRequest, match=said):
        grammars.new(wanted, [END])


def test_a_model_without_an_end_needs_stop_token_ids(tokenizer):
    builder = RequestBuilder(tokenizer, len(tokenizer), [], seed=0)
    with pytest.raises(InvalidRequest, match="names no end-of-text token"):
        builder.build("a", SamplingParams(structured_outputs={"regex": "b"}))
    builder.build("a", SamplingParams(structured_outputs={"regex": "b"}, stop_token_ids=[3]))


def test_llguidance_is_named_where_it_is_missing(grammars, monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match=re.escape("pip install 'foretoken[serve]'")):
        grammars.new({"regex": "a"}, [END])


def test_every_completion_follows_a_grammar_of_its_own(pair):
    builder = RequestBuilder(pair.tokenizer, pair.target.vocab_size, [END], seed=0)
    _, contexts = builder.build("a", SamplingParams(structured_outputs={"json": {}}, n=3))
    assert len({id(context.law.grammar) for context in contexts}) == 3
