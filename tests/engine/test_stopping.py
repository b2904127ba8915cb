"""Stop rules, and text from tokens."""

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from foretoken.engine.stopping import Detokenizer, TextStopping

relaxed = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(stopping: TextStopping, ids: list[int]) -> tuple[int, list[str]]:
    """Tokens consumed until the end, and the pieces given out on the way."""
    given_out = []
    for count, token in enumerate(ids, start=1):
        ended = stopping.push(token)
        reason = stopping.read(token)
        assert reason is not None or ended is None
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
def test_streamed_text_is_never_retracted(tokenizer: Any, text: str, stop: str) -> None:
    stopping = make(tokenizer, stops=(stop,))
    _, given_out = run(stopping, tokenizer.encode(text, add_special_tokens=False))
    if stopping.finish_reason:
        assert "".join(given_out) == stopping.text == text[: text.index(stop)]
    else:
        assert stop not in text
        assert text.startswith("".join(given_out))


def first_stop(text: str, known: int, stops: list[str]) -> tuple[int, str] | None:
    """The stop string that begins first, the shortest of several, among those that end after ``known`` characters."""
    for at in range(len(text)):
        for stop in sorted(stops, key=len):
            if text.startswith(stop, at) and at + len(stop) > known:
                return at, stop
    return None


def one_token_at_a_time(
    tokenizer: Any, ids: list[int], stops: list[str], min_tokens: int, max_tokens: int, include_stop: bool
) -> tuple[str, str | None, str | None]:
    """Text, finish reason and stop reason by definition: after each token the whole text is searched."""
    detokenizer, text = Detokenizer(tokenizer, []), ""
    for count, token in enumerate(ids, start=1):
        known = len(text)
        text += detokenizer.push(token)
        if count == max_tokens:
            text += detokenizer.flush()
        if count >= min_tokens and (hit := first_stop(text, known, stops)):
            at, stop = hit
            return text[: at + len(stop) * include_stop], "stop", stop
        if count == max_tokens:
            return text, "length", None
    return text, None, None


@settings(relaxed, max_examples=300)
@given(data=st.data())
@pytest.mark.slow
def test_streamed_and_final_text_are_equal_however_tokens_come(tokenizer: Any, data: st.DataObject) -> None:
    """Stops of several lengths, ``min_tokens``, kept stops, ends inside a character, and blocks of any size."""
    words = st.sampled_from(["a", "b", "ab", "aba", " a", "é", "€", "🙂"])
    text = "".join(data.draw(st.lists(words, min_size=1, max_size=24)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    stops = data.draw(st.lists(st.text("ab €\N{REPLACEMENT CHARACTER}", min_size=1, max_size=5), max_size=4))
    max_tokens = data.draw(st.integers(1, len(ids)))
    min_tokens = data.draw(st.integers(0, max_tokens))
    include_stop = data.draw(st.booleans())
    blocks = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    expected = one_token_at_a_time(tokenizer, ids, stops, min_tokens, max_tokens, include_stop)

    options = {"max_tokens": max_tokens, "min_tokens": min_tokens, "include_stop": include_stop}
    stopping = make(tokenizer, stops=stops, **options)
    given_out, at, blocks_left = "", 0, itertools.cycle(blocks)
    while stopping.finish_reason is None:
        block = ids[at : at + next(blocks_left)]
        ends = (count for count, token in enumerate(block, 1) if stopping.push(token) is not None)
        block = block[: next(ends, len(block))]
        at += len(block)
        next((token for token in block if stopping.read(token) is not None), None)
        given_out += stopping.take()
        assert stopping.text.startswith(given_out)
    assert given_out == stopping.text
    assert (stopping.text, stopping.finish_reason, stopping.stop_reason) == expected


def test_a_stop_before_min_tokens_does_not_cut_what_was_streamed(tokenizer: Any) -> None:
    ids = tokenizer.encode(" x.f(x)", add_special_tokens=False) + tokenizer.encode(
        "\n\nclass", add_special_tokens=False
    )
    stopping = make(tokenizer, stops=("(", "\n\nclass Name:"), min_tokens=len(ids), max_tokens=len(ids))
    _, given_out = run(stopping, ids)
    assert "".join(given_out) == stopping.text == " x.f(x)\n\nclass"


def test_a_stop_before_an_unfinished_character_is_found_at_the_end(tokenizer: Any) -> None:
    """The token of "b " and of half a character keeps its text back until the character is finished."""

    class Decoder:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return b"".join([b"a", b"b \xe2"][token] for token in token_ids).decode(errors="replace")

    for end in ({"max_tokens": 2}, {"stop_ids": (9,)}):
        stopping = TextStopping(Detokenizer(Decoder(), []), **{"max_tokens": 5, "stops": ("b",), **end})  # type: ignore
        _, given_out = run(stopping, [0, 1, 9])
        assert "".join(given_out) == stopping.text == "a"
        assert (stopping.finish_reason, stopping.stop_reason) == ("stop", "b")


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


def test_length_and_tokens_left(tokenizer: Any) -> None:
    stopping = make(tokenizer, max_tokens=3)
    assert stopping.tokens_left == 3
    assert run(stopping, [50] * 9)[0] == 3
    assert (stopping.finish_reason, stopping.tokens_left) == ("length", 0)


def test_stop_strings_wait_for_min_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("a", add_special_tokens=False)
    stopping = make(tokenizer, stops=("a",), min_tokens=3)
    assert run(stopping, ids * 5)[0] == 3


hundred_examples = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def pieces(tokenizer: Any, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@hundred_examples
@given(text=st.text(max_size=60))
@example(text="<|endoftext|>")
@pytest.mark.slow
def test_pieces_join_to_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = "".join(pieces(tokenizer, ids, prompt=tokenizer.encode("def f")))
    assert got == tokenizer.decode(ids, skip_special_tokens=True)


@hundred_examples
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


def test_alarms_end_the_text_as_the_request_says(tokenizer: Any) -> None:
    stopping = make(tokenizer, acceptance_stop=("repetition",), min_tokens=2)
    stopping.read(5)
    assert stopping.alarmed("repetition") is None  # min_tokens
    stopping.read(6)
    assert stopping.alarmed("none_accepted") is None
    assert stopping.alarmed("repetition") == stopping.finish_reason == "repetition"
