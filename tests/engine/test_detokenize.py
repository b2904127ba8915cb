from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from foretoken.engine.detokenize import Detokenizer

relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pieces(tokenizer: Any, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@relaxed
@given(text=st.text(max_size=60))
@example(text="<|endoftext|>")
def test_pieces_join_to_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = "".join(pieces(tokenizer, ids, prompt=tokenizer.encode("def f")))
    assert got == tokenizer.decode(ids, skip_special_tokens=True)


@relaxed
@given(ids=st.lists(st.integers(0, 399), max_size=40))
def test_any_tokens_join_to_what_the_tokenizer_says(tokenizer: Any, ids: list[int]) -> None:
    ids = [token % len(tokenizer) for token in ids]
    got = "".join(pieces(tokenizer, ids, prompt=[]))
    assert got == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["🙂", "größe", "日本語", "a🙃b"])
def test_no_piece_ends_inside_a_character(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(tokenizer, ids, prompt=[])
    assert "".join(got) == text
    assert not any("�" in piece for piece in got)


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer.encode("𝒳", add_special_tokens=False)[:-1]
    assert len(ids) > 1
    got = pieces(tokenizer, ids, prompt=[])
    assert set(got[:-1]) == {""}
    assert got[-1] == tokenizer.decode(ids)
