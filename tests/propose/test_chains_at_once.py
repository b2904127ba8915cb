"""A draft model drafts the same chains at once and level by level, whatever shares the step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.models.plain import text
from tests.models.tiny import ARCHITECTURES, VOCAB, only_runner

from foretoken.core.context import ChainEnd, Context, Exactness
from foretoken.core.draft import Draft, PointMass
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Model, Scores
from foretoken.models.loading import load_model
from foretoken.propose.base import Observation
from foretoken.propose.draft_model import PREFILL_CHUNK, DraftModel, DraftModelConfig

GREEDY = SamplingLaw(temperature=0.0)
FILTERED = SamplingLaw(temperature=0.7, min_p=0.01, top_k=30, top_p=0.95)
Request = tuple[SamplingLaw, Exactness, tuple[float, ...]]  # the last: the least probability of a token, by depth
PLAIN: list[Request] = [
    (GREEDY, Exactness.DISTRIBUTION, (0.05, 0.1, 0.2)),
    (GREEDY, Exactness.TRAJECTORY, ()),
    (SamplingLaw(), Exactness.DISTRIBUTION, ()),
    (SamplingLaw(), Exactness.TRAJECTORY, ()),
    (FILTERED, Exactness.DISTRIBUTION, (0.2,)),
    (FILTERED, Exactness.TRAJECTORY, ()),
]
ADJUSTED: list[Request] = [
    (replace(GREEDY, logit_bias=((7, 100.0),)), Exactness.DISTRIBUTION, (0.1,)),
    (replace(GREEDY, repetition_penalty=1.3), Exactness.DISTRIBUTION, (0.3,)),
    (SamplingLaw(frequency_penalty=0.5), Exactness.DISTRIBUTION, ()),
    (replace(FILTERED, presence_penalty=2.0, min_tokens=8, end_ids=(3, 9)), Exactness.TRAJECTORY, ()),
    (SamplingLaw(allowed_ids=tuple(range(0, VOCAB, 3)), bad_words=((6,), (12,))), Exactness.DISTRIBUTION, ()),
]
WORDS: Request = (SamplingLaw(bad_words=((6, 7),)), Exactness.DISTRIBUTION, ())  # a look at every token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    ARCHITECTURES["llama"].build().save_pretrained(folder)
    with only_runner("compiled"):
        return load_model(folder, "float32", "cpu", "native")


def ended(minimum: Sequence[float]) -> ChainEnd | None:
    """The end of a chain, if claims come true at other rates."""
    return ChainEnd((0.1, 0.5), (0.0, 0.1, 0.4), (0.8, 0.7, 0.6), minimum) if minimum else None


def drafts(
    model: Model, config: DraftModelConfig, requests: Sequence[Request], vocab: int = VOCAB, rounds: int = 12
) -> list[Draft]:
    """Drafts of requests, whose tokens the target accepts up to a varying depth."""
    proposer = DraftModel(model, config, vocab)
    contexts = [
        Context(i, text(9 + i, i), 9 + i, law, Streams(i), exactness, end=ended(minimum))
        for i, (law, exactness, minimum) in enumerate(requests)
    ]
    found: list[Draft] = []
    for turn in range(rounds):
        with torch.inference_mode():
            some = proposer.propose(contexts, [2 + (turn + 3 * i) % 6 for i in range(len(contexts))])
        found += some
        observed = []
        for i, (context, draft) in enumerate(zip(contexts, some, strict=True)):
            accepted = min(len(draft), (turn + i) % 4)
            tokens, position = (*draft.ids[:accepted], 3 + turn), context.generated
            context.tokens.extend(tokens)
            verdict, timings = Verdict(tuple(range(accepted)), tokens[-1]), Timings(0.0, 0.0, 0.0, 0.0, len(requests))
            step = StepOutput(context.id, position, draft, verdict, tokens, timings, budget=6)
            observed.append(Observation(step, Scores(torch.zeros(len(draft) + 1, vocab))))
        proposer.observe(contexts, observed)
    for context in contexts:
        proposer.forget(context)
    return found


CASES: dict[str, tuple[DraftModelConfig, list[Request], int, bool]] = {
    "chains": (DraftModelConfig(), PLAIN, VOCAB, True),
    "of two tokens": (DraftModelConfig(num_steps=2), PLAIN, VOCAB, True),
    "a temperature of its own": (DraftModelConfig(draft_temperature=0.5), PLAIN, VOCAB, True),
    "the likeliest, whatever the request": (DraftModelConfig(draft_temperature=0.0), PLAIN, VOCAB, True),
    "drawn chains in place of trees": (DraftModelConfig("ranked"), [PLAIN[2], PLAIN[4]], VOCAB, True),
    "chains beside trees": (DraftModelConfig("ranked"), PLAIN[:3], VOCAB, True),
    "trees below a temperature": (DraftModelConfig("top_k", 3), [PLAIN[0], PLAIN[2]], VOCAB, True),
    "trees of a smaller vocabulary": (DraftModelConfig("ranked"), PLAIN[:2], VOCAB - 10, True),
    "trees with the target's noise": (DraftModelConfig("ranked"), PLAIN, VOCAB, True),
    "trees of filtered tokens": (DraftModelConfig("top_k", 3), PLAIN, VOCAB, True),
    "sampled trees": (DraftModelConfig("sampled"), PLAIN, VOCAB, True),
    "trees with a sampled sibling": (DraftModelConfig("greedy_multi", top_k=3), PLAIN, VOCAB, True),
    "requests with penalties and biases": (DraftModelConfig(), [*PLAIN, *ADJUSTED], VOCAB, True),
    "their trees": (DraftModelConfig("ranked"), ADJUSTED, VOCAB, True),
    "their sampled trees": (DraftModelConfig("sampled"), ADJUSTED, VOCAB, True),
    "a request with words of several tokens": (DraftModelConfig(), [*PLAIN, WORDS], VOCAB, False),
    "penalties and a smaller target vocabulary": (DraftModelConfig(), ADJUSTED[:4], VOCAB - 10, True),
    "a smaller target vocabulary": (DraftModelConfig(), PLAIN, VOCAB - 10, True),
    "a larger target vocabulary": (DraftModelConfig(), PLAIN, VOCAB + 10, True),
    "penalties and a larger target vocabulary": (DraftModelConfig(), ADJUSTED, VOCAB + 10, True),
    "filtered trees of a larger target vocabulary": (DraftModelConfig("top_k", 3), PLAIN[::2], VOCAB + 10, True),
    "trees with the target's noise, of a larger vocabulary": (DraftModelConfig("ranked"), ADJUSTED, VOCAB + 10, True),
    "sampled trees of a larger target vocabulary": (DraftModelConfig("sampled"), [*PLAIN, *ADJUSTED], VOCAB + 10, True),
    "a rule that looks at every token": (DraftModelConfig(draft_stop="margin"), PLAIN, VOCAB, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_drafts_are_those_of_levels(case: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    config, requests, vocab, at_once = CASES[case]
    calls: list[int] = []
    chains = model.chains
    monkeypatch.setattr(model, "chains", lambda handles, *rest: (calls.append(len(handles)), chains(handles, *rest))[1])
    found = drafts(model, config, requests, vocab)
    assert calls == ([len(requests)] * 12 if at_once else [])
    monkeypatch.setattr(type(model), "drafts_chains", False)
    expected = drafts(model, config, requests, vocab)
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.parents, one.levels) == (other.ids, other.parents, other.levels)
        assert type(one.law) is type(other.law)
        if not isinstance(one.law, PointMass) and not isinstance(other.law, PointMass):
            assert torch.equal(one.law.probs, other.law.probs)


def test_a_sequence_at_the_end_of_the_window_does_not_shorten_the_others(model: Model) -> None:
    proposer = DraftModel(model)
    lengths = (model.max_length - 1, 10)
    contexts = [Context(i, text(n, i), n, GREEDY, Streams(i)) for i, n in enumerate(lengths)]
    with torch.inference_mode():
        for _ in range(lengths[0] // PREFILL_CHUNK + 1):
            drafted = proposer.propose(contexts, [1, 8])
    assert [len(draft) for draft in drafted] == [1, 8]
