from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.engine.detokenize import Detokenizer
from foretoken.engine.stopping import TextStopping

relaxed = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(stopping: TextStopping, ids: list[int]) -> tuple[int, list[str]]:
    """Tokens consumed until the end, and the pieces given out on the way."""
    given_out = []
    for count, token in enumerate(ids, start=1):
        reason = stopping.push(token)
        given_out.append(stopping.take())
        if reason is not None:
            return count, given_out
    return len(ids), given_out


def make(tokenizer: Any, **options: Any) -> TextStopping:
    return TextStopping(Detokenizer(tokenizer, []), **{"max_tokens": 1000, **options})


def test_a_stop_string_that_straddles_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("for i in range(10):\n    print(i)", add_special_tokens=False)
    stop = "nge(1"
    assert stop not in [tokenizer.decode([i]) for i in ids]
    stopping = make(tokenizer, stops=(stop,))
    _, given_out = run(stopping, ids)
    assert (stopping.text, stopping.finish_reason, stopping.stop_reason) == ("for i in ra", "stop", stop)
    assert "".join(given_out) == "for i in ra"


def test_the_stop_string_can_be_kept(tokenizer: Any) -> None:
    stopping = make(tokenizer, stops=("ra",), include_stop=True)
    run(stopping, tokenizer.encode("for i in range(10)", add_special_tokens=False))
    assert stopping.text == "for i in ra"


@relaxed
@given(text=st.text(alphabet="abcdef \n", max_size=40), stop=st.text(alphabet="abcdef ", min_size=1, max_size=4))
def test_nothing_given_out_is_ever_taken_back(tokenizer: Any, text: str, stop: str) -> None:
    stopping = make(tokenizer, stops=(stop,))
    _, given_out = run(stopping, tokenizer.encode(text, add_special_tokens=False))
    if stopping.finish_reason:
        assert "".join(given_out) == stopping.text == text[: text.index(stop)]
    else:
        assert stop not in text
        assert text.startswith("".join(given_out))


def test_eos_ends_without_showing(tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    stopping = make(tokenizer, eos_ids=(eos,))
    ids = tokenizer.encode("abc", add_special_tokens=False)
    assert run(stopping, [*ids, eos, *ids])[0] == len(ids) + 1
    assert (stopping.text, stopping.finish_reason, stopping.stop_reason) == ("abc", "stop", None)


def test_a_stop_id_is_named(tokenizer: Any) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False)
    stopping = make(tokenizer, stop_ids=(ids[-1],))
    run(stopping, ids)
    assert (stopping.finish_reason, stopping.stop_reason) == ("stop", ids[-1])


def test_length_and_room(tokenizer: Any) -> None:
    stopping = make(tokenizer, max_tokens=3)
    assert stopping.room == 3
    assert run(stopping, [50] * 9)[0] == 3
    assert (stopping.finish_reason, stopping.room) == ("length", 0)


def test_stop_strings_wait_for_min_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("a", add_special_tokens=False)
    stopping = make(tokenizer, stops=("a",), min_tokens=3)
    assert run(stopping, ids * 5)[0] == 3
