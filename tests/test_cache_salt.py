"""``SamplingParams.cache_salt`` from end to end: a request finds nothing of another salt's requests."""

from typing import Any

import pytest

from foretoken import LLM, ForetokenError, SamplingParams
from foretoken.control.acceptance import Rates
from foretoken.core.draft import Draft

LONG = "class Ünïcode:\n    x = 1  # größe 🙂\n" * 12
SECRET = "def greet(name):\n    return '日本語 17 i * i'\n"
METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix"},
    "recycling": {"method": "recycling", "top_k": 1},
    "mixture": {"method": "mixture", "members": [{"method": "suffix"}, {"method": "recycling", "top_k": 1}]},
}


def open_llm(pair: Any, config: dict[str, Any], **options: Any) -> LLM:
    config = {**config, "num_speculative_tokens": 8, "control": "fixed"}
    return LLM(pair.target, speculative_config=config, dtype="float32", **options)


def stream(llm: LLM, prompt: str, salt: str | None, wanted: str | None = None) -> tuple[list[int], list[Draft]]:
    """Returns the output, and the drafts of every step for it."""
    structured = None if wanted is None else {"choice": [wanted]}
    params = SamplingParams(
        max_tokens=60,
        temperature=0,
        explain=True,
        structured_outputs=structured,
        cache_salt=salt,
        ignore_eos=wanted is None,
    )
    pieces = list(llm.stream(prompt, params))
    assert all(piece.explained is not None and len(piece.explained.p) == len(piece.step.draft) for piece in pieces)
    return [token for piece in pieces for token in piece.token_ids], [piece.step.draft for piece in pieces]


def paths(drafts: list[Draft], length: int) -> set[tuple[int, ...]]:
    """Every run of ``length`` tokens that a draft held."""
    every = [[d.ids[node] for node in d.path(end)] for d in drafts for end in range(len(d))]
    return {tuple(path[-length:]) for path in every if len(path) >= length}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_no_round_shows_the_text_of_another_salt(tiny_pair: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The order of a mixture's nodes follows rates that are learned over all requests; here they stay as they begin.
    monkeypatch.setattr(Rates, "add", lambda *_: None)
    llm = open_llm(tiny_pair, METHODS[name])
    prompt = "name = "
    secret, _ = stream(llm, prompt, "a", SECRET)
    pieces = {tuple(secret[i : i + 3]) for i in range(len(secret) - 2)}
    _, same = stream(llm, prompt, "a")
    assert paths(same, 3) & pieces, "the control: within a salt the text is drafted"
    alone = open_llm(tiny_pair, METHODS[name])
    for salt in ("b", None):
        text, drafts = stream(llm, prompt, salt)
        assert not paths(drafts, 3) & pieces
        plain, expected = stream(alone, prompt, salt)
        assert text == plain
        assert [(d.ids, d.parents) for d in drafts] == [(d.ids, d.parents) for d in expected]


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, "a")])
def test_cached_tokens_tell_nothing_of_another_salts_prompts(tiny_pair: Any, salts: tuple[str | None, ...]) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", enable_prefix_caching=True)

    def cached(salt: str | None) -> int:
        return llm.generate(LONG, SamplingParams(max_tokens=4, temperature=0, cache_salt=salt))[0].stats.cached

    first, second = salts
    assert cached(first) == 0
    if not cached(first):
        pytest.skip("no compiled kernels here")
    hits = llm.engine.usage.prefix_hits
    assert cached(second) == 0 and llm.engine.usage.prefix_hits == hits
    assert cached(second) >= 64 and llm.engine.usage.prefix_hits > hits


@pytest.mark.parametrize("salt", ["", "x" * 1025, 7, b"a"])
def test_a_salt_that_is_none_is_refused(salt: Any) -> None:
    with pytest.raises(ForetokenError, match="cache_salt must be a string of 1 to 1024 characters"):
        SamplingParams(cache_salt=salt)
