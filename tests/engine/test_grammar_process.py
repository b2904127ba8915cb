"""Grammars that take too much: they end their own request, and no other."""

import os
import signal
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher  # noqa: F401  # the processes need it

from foretoken.core.errors import InvalidRequest
from foretoken.engine.grammar_process import GrammarLimits, GrammarServer
from foretoken.engine.matching import GrammarVocabulary, LocalGrammar

if os.name != "posix":
    pytest.skip("needs fork", allow_module_level=True)

VOCABULARY = GrammarVocabulary([*(bytes([i]) for i in range(256)), *(b"x" * i for i in range(2, 9)), b"<[end]>"], [263])
X = ord("x")
LIMITS = GrammarLimits(compile_seconds=0.3, mask_seconds=0.2, text_seconds=0.4, token_seconds=0.01)
SLOW_TO_COMPILE = {"json": {"type": "integer", "multipleOf": 1234567}}
SLOW_TO_FOLLOW = {"grammar": "start: a\na: " + " | ".join(["a a"] * 20) + ' | "x"'}
DEEP = {"grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(20_000)) + '\nr20000: "b"'}


@pytest.fixture(scope="module")
def server() -> Iterator[GrammarServer]:
    made = GrammarServer(lambda: VOCABULARY, LIMITS)
    yield made
    made.close()


@pytest.mark.parametrize("wanted", [SLOW_TO_COMPILE, DEEP], ids=["slow", "overflows the stack"])
@pytest.mark.slow
def test_grammars_beyond_time_and_memory_are_refused(server, wanted):
    with pytest.raises(InvalidRequest, match=r"cannot be compiled within 0.3 s and 512 MiB, or are nested too deeply"):
        server.compile(wanted)
    assert server.compile({"regex": "ab"}).follower().allowed(()) is not None


def test_a_grammar_that_is_wrong_is_refused_in_llguidances_words(server):
    with pytest.raises(InvalidRequest, match="unknown name"):
        server.compile({"grammar": "start: nothing"})


def test_masks_are_those_of_a_grammar_in_this_process(server):
    wanted = {"regex": "(x{3}|ab)+"}
    here, there = LocalGrammar(VOCABULARY.load(), wanted).follower(), server.compile(wanted).follower()
    for tokens, path in ([], ()), ([X], ()), ([X], (X,)), ([X], (X, 7)), ([X, X], (X, 97)), ([97, 7], (98,)):
        for each in (here, there):
            each.reset()
            each.extend(tokens)
        assert here.allowed(path) == there.allowed(path)


def test_a_text_that_takes_too_long_ends_alone(server):
    """Other texts of the same grammar go on."""
    grammar = server.compile(SLOW_TO_FOLLOW)
    slow, other = grammar.follower(), grammar.follower()
    assert other.allowed(()) is not None
    slow.extend([X] * 60)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"any further: it takes more than 0.2 s"):
            slow.allowed(())
    other.extend([X])
    assert other.allowed(()) is not None and grammar.follower().allowed((X,)) is not None


def test_many_cheap_steps_may_not_add_up(server):
    """Each stays below the limit of one step."""
    follower = server.compile(SLOW_TO_FOLLOW).follower()

    def go_on() -> None:
        for _ in range(100):
            follower.allowed(())
            follower.extend([X])

    with pytest.raises(InvalidRequest, match=r"0.01 s on average"):
        go_on()


def test_a_process_that_died_is_started_again(server):
    grammar = server.compile({"regex": "ab"})
    assert grammar.alive
    os.kill(server.process.pid, signal.SIGKILL)
    os.waitpid(server.process.pid, 0)
    again = server.compile({"regex": "ab"})
    assert again.alive and grammar.alive and again.follower().allowed(()) == grammar.follower().allowed(())
