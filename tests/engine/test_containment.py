"""A failure in one request's own work ends that request alone; the others' texts are what they would have been."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine import loop, sequence
from foretoken.engine.loop import Engine
from foretoken.engine.requests import Assembler
from foretoken.engine.sequence import OutputOptions
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.per_request import FallbackProposer
from foretoken.verify import choose

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=2.0)
VICTIM, LENGTH = 1, 14  # the request that fails, and its prompt's length: the others' are other ones


class Failure(Exception):
    """An unexpected error."""


class FailingLaw(SamplingLaw):
    """Fails once two tokens are there, also in the draft."""

    needs_history = True

    def choose(self, logits, histories, noise):  # type: ignore[no-untyped-def]
        return -1

    def probs(self, logits, histories):  # type: ignore[no-untyped-def]
        if any(history.generated >= 2 for history in histories):
            raise Failure("law")
        return super().probs(logits, histories)


class FailingText(Length):
    """Fails in a step with the third token or a later one, where text is decoded and stop strings are looked for."""

    def read(self, token: int) -> str | None:
        if self.tokens_left < 8:
            raise Failure("text")
        return super().read(token)


def failing(function: Callable[..., Any], where: Callable[..., bool]) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        if where(*args):
            raise Failure(function.__name__)
        return function(*args)

    return fail


def texts(fault: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[int]], Engine]:
    """Three requests, the second with a fault. Returns tokens of the finished ones."""

    def of_victim(context: Context, *args: Any) -> bool:
        return context.id == VICTIM and context.generated >= 2

    def in_verdict(draft: Any, probs: Any, stream: Any) -> Any:
        if fault == "verdict" and victim.generated >= 2 and stream == victim.streams.shared(victim.generated):
            raise Failure("verdict")
        return choose(draft.law, Exactness.TRAJECTORY)(draft, probs, stream)

    proposer = FallbackProposer(DraftModel(TARGET.perturbed(0.3)))
    engine = Engine(TARGET, proposer, Fixed(3), rule=lambda *_: in_verdict, ahead=ahead)
    for i in range(3):
        prompt = [(7 * j + i) % 6 for j in range(LENGTH + i)]
        law = FailingLaw() if (i, fault) == (VICTIM, "law") else SamplingLaw()
        context = Context(i, prompt, len(prompt), law, Streams(i), Exactness.TRAJECTORY)
        stopping = (FailingText if (i, fault) == (VICTIM, "text") else Length)(10)
        if i == VICTIM:
            victim = context
        counted: dict[str, Any] = {fault: 2} if fault in ("logprobs", "prompt_logprobs") and i == VICTIM else {}
        engine.add(context, stopping, OutputOptions(**counted, explain=fault == "explain"))
    if fault == "explain":
        monkeypatch.setattr(sequence, "explain", failing(sequence.explain, of_victim))
    if fault == "logprobs":
        monkeypatch.setattr(sequence, "token_logprobs", failing(sequence.token_logprobs, lambda *args: True))
    if fault == "prompt_logprobs":
        monkeypatch.setattr(
            loop,
            "record_prompt_logprobs",
            failing(loop.record_prompt_logprobs, lambda one, _: one.context.id == VICTIM),
        )
    while engine.busy:
        engine.step()
        engine.check_integrity()
    return {i: one.context.tokens for i, one in engine.finished.items() if one.error is None}, engine


@pytest.mark.parametrize("fault", ["law", "verdict", "text", "explain", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_failure_ends_its_own_request_alone(fault, ahead, monkeypatch):
    with monkeypatch.context() as patch:
        expected, _ = texts("none", ahead, patch)
    with monkeypatch.context() as patch:
        result, engine = texts(fault, ahead, patch)
    assert len(expected) == 3
    assert result == {i: tokens for i, tokens in expected.items() if i != VICTIM}
    failed = engine.finished[VICTIM]
    assert isinstance(failed.error, Failure) and failed.finish_reason == "error"
    assert failed.context.tokens == expected[VICTIM][: len(failed.context.tokens)]
    assert engine.proposer.failures == 0, "a request's own failure was held against the proposer"  # type: ignore[attr-defined]


def test_nothing_is_observed_of_a_step_in_which_every_sequence_failed():
    seen: list[int] = []

    class Observing(DraftModel):
        def observe(self, contexts, observations):  # type: ignore[no-untyped-def]
            seen.append(len(contexts))
            super().observe(contexts, observations)

    engine = Engine(TARGET, Observing(TARGET.perturbed(0.3)), Fixed(3))
    engine.add(Context(0, [1, 2], 2, FailingLaw(), Streams(0)), Length(10))
    while engine.busy:
        engine.step()
    assert engine.take(0).error is not None
    assert seen and all(seen)


def test_step_or_raise_raises_what_ended_a_sequence():
    engine = Engine(TARGET, DraftModel(TARGET.perturbed(0.3)), Fixed(3))
    engine.add(Context(0, [1, 2], 2, FailingLaw(), Streams(0)), Length(10))
    with pytest.raises(Failure, match="law"):
        list(iter(engine.step_or_raise, []))


def test_a_contradiction_at_a_rejected_node_is_explained_and_hurts_nobody(tiny_pair):
    """A prediction leads to a node where structured output and bad words together forbid every token."""
    llm = LLM(tiny_pair.target, speculative_config={"method": "prediction"}, dtype="float32")
    bias = {token: 20.0 for text in ("n", "no") for token in llm.tokenizer.encode(text, add_special_tokens=False)}
    odd = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        explain=True,
        prediction="zq7",
        logit_bias=bias,
        speculative_tokens=4,
        structured_outputs={"choice": ["zq7", "no"]},
        bad_words=["7", "q7", "zq7"],
    )
    plain = SamplingParams(max_tokens=8, temperature=0.0)
    alone = llm.generate("import os", plain)[0].outputs[0].token_ids
    assembler = Assembler(llm.engine, llm.tokenizer)
    built = [llm.requests.build("x =", odd), llm.requests.build("import os", plain)]
    for request, contexts in built:
        assembler.add(request, contexts)
    outputs = {}
    while llm.engine.busy:
        for step in llm.engine.step():
            piece = assembler.piece(step)
            if piece.explained is not None:
                assert not any(torch.tensor(piece.explained.p).isnan())
            if piece.output is not None:
                outputs[piece.request_id] = piece.output
    assert outputs[built[0][0].id].text == "no"
    assert outputs[built[1][0].id].token_ids == alone


@pytest.mark.parametrize("tokens", [0, 4])
def test_text_before_an_error_is_streamed(tiny_pair, tokens):
    """Greedy, drafted and plain: the same pieces of text, then the same error."""
    llm = LLM(tiny_pair.target, speculative_config={"method": "prediction"}, dtype="float32")
    usual = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    text = llm.generate("for i in", usual)[0].outputs[0]
    ids = list(text.token_ids)
    request, contexts = llm.requests.build(
        "for i in", SamplingParams(max_tokens=12, temperature=0.0, prediction=ids, speculative_tokens=tokens)
    )
    context = contexts[0]
    assert len(set(ids[:5])) == 5, "the text repeats itself, so the law would forbid all earlier"
    forbidden = tuple((ids[4], token) for token in range(llm.target.vocab_size))
    context.law = SamplingLaw(temperature=0.0, bad_words=forbidden)
    assembler = Assembler(llm.engine, llm.tokenizer)
    assembler.add(request, contexts)
    emitted: list[int] = []

    def run() -> None:
        while llm.engine.busy:
            for step in llm.engine.step():
                emitted.extend(assembler.piece(step).token_ids)

    with pytest.raises(InvalidRequest, match="together forbid every token"):
        run()
    assert emitted == ids[:5]
