"""From sampling parameters to contexts: predictions, bad words and random numbers."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.streams import MAX_SEED, MIN_SEED, Purpose, SeedDomain, Streams, derived_seed
from foretoken.engine.footprint import split_kv_memory
from foretoken.engine.requests import RequestBuilder
from foretoken.models.toy import ToyModel
from foretoken.params import SamplingParams
from foretoken.propose.base import Proposer


@pytest.fixture
def builder(tokenizer) -> RequestBuilder:
    return RequestBuilder(tokenizer, len(tokenizer), [], seed=0)


def test_a_prediction_reaches_every_context(builder, tokenizer):
    text = "größe 5 €\n"
    _, contexts = builder.build("a", SamplingParams(prediction=text, n=2))
    assert [c.prediction for c in contexts] == [tuple(tokenizer.encode(text, add_special_tokens=False))] * 2
    _, contexts = builder.build("a", SamplingParams(prediction=[1, 2, 3]))
    assert contexts[0].prediction == (1, 2, 3)


@pytest.mark.parametrize("nothing", [None, "", []])
def test_no_prediction(builder, nothing):
    assert builder.build("a", SamplingParams(prediction=nothing))[1][0].prediction == ()


@pytest.mark.parametrize("wrong", [[1, -1], [10**9], [1.5], [True]])
def test_a_prediction_of_wrong_ids_is_refused(builder, wrong):
    with pytest.raises(InvalidRequest, match="a prediction of token ids holds"):
        builder.build("a", SamplingParams(prediction=wrong))


# A tokenizer with more tokens than the model


@pytest.fixture
def smaller(tokenizer) -> RequestBuilder:
    """The builder for a model that lacks the tokenizer's last tokens, the one that spells " return" among them."""
    size = tokenizer.encode(" return", add_special_tokens=False)[-1]
    assert size > 256
    return RequestBuilder(tokenizer, size, [tokenizer.eos_token_id, size + 1], seed=0)


@pytest.mark.parametrize("prompt", ["x return", {"prompt": " return"}])
def test_a_prompt_with_tokens_that_the_model_lacks_is_refused(smaller, prompt):
    with pytest.raises(InvalidRequest, match=r"the prompt has token \d+ of the tokenizer, and the model's vocabulary"):
        smaller.build(prompt, SamplingParams())


def test_a_prediction_with_tokens_that_the_model_lacks_is_refused(smaller):
    with pytest.raises(InvalidRequest, match=r"the prediction has token \d+ of the tokenizer"):
        smaller.build("x", SamplingParams(prediction="x return"))


def test_tokens_that_the_model_lacks_need_not_be_forbidden(smaller, tokenizer):
    law = smaller.build("x", SamplingParams(bad_words=["return", "x"], min_tokens=2))[1][0].law
    words = [tokenizer.encode(word, add_special_tokens=False) for word in ("return", " return", "x", " x")]
    size = max(words[1])
    assert law.bad_words == tuple(tuple(word) for word in words if max(word) < size)
    assert law.end_ids == (tokenizer.eos_token_id,)
    assert float(law.probs(torch.zeros(1, size), [History([65], 1)]).sum()) == pytest.approx(1.0)


# Seeds

Number = tuple[float, float]
relaxed = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def numbers(context: Context) -> list[Number]:
    """Two uniform numbers of each purpose at each of four positions, and two of the noise that they share."""
    streams = context.streams
    result = []
    for position in range(4):
        for purpose in (Purpose.DRAFT, Purpose.VERIFY):
            stream = streams.private(purpose, position)
            result.append((stream.uniform(0).value, stream.uniform(1).value))  # type: ignore[attr-defined]
        first, second = streams.shared(position).race(torch.ones(2), 0).tolist()  # type: ignore[attr-defined]
        result.append((first, second))
    return result


def seeded(tokenizer, llm_seed: int, *requests: SamplingParams) -> list[Context]:
    """The contexts of these requests to one engine, in order."""
    builder = RequestBuilder(tokenizer, len(tokenizer), [], seed=llm_seed)
    return [context for params in requests for context in builder.build("a", params)[1]]


def test_completions_of_a_seed_and_requests_without_one_share_no_random_numbers(tokenizer):
    unseeded = seeded(tokenizer, 0, *[SamplingParams()] * 4)
    several = seeded(tokenizer, 0, SamplingParams(n=4, seed=0))
    drawn = [number for context in (*unseeded, *several) for number in numbers(context)]
    assert len(drawn) == len(set(drawn)) == 8 * 12


def test_no_two_sequences_share_an_address(tokenizer):
    """User seeds, completions of one request, requests, engines, replicas, purposes and positions: all of them."""
    engines = [*range(-2, 4)] + [
        derived_seed(SeedDomain.REPLICA, seed, name) for seed in range(3) for name in ("0", "1")
    ]
    contexts = [
        context for seed in engines for context in seeded(tokenizer, seed, *[SamplingParams()] * 4, SamplingParams(n=4))
    ]
    contexts += seeded(tokenizer, 0, *(SamplingParams(n=4, seed=seed) for seed in range(-4, 5)))
    drawn = [number for context in contexts for number in numbers(context)]
    assert len(drawn) == len(set(drawn)) == (12 * 8 + 9 * 4) * 12


@relaxed
@given(
    user_seeds=st.sets(st.integers(MIN_SEED, MAX_SEED) | st.integers(-3, 3), min_size=1, max_size=4),
    engine_seeds=st.sets(st.integers(MIN_SEED, MAX_SEED) | st.integers(-3, 3), min_size=1, max_size=4),
    n=st.integers(1, 4),
    requests=st.integers(1, 4),
)
def test_sequences_of_any_seeds_have_streams_of_their_own(tokenizer, user_seeds, engine_seeds, n, requests):
    contexts = seeded(tokenizer, 0, *(SamplingParams(n=n, seed=seed) for seed in user_seeds))
    for seed in engine_seeds:
        contexts += seeded(tokenizer, seed, *[SamplingParams(n=n)] * requests)
    assert len({context.streams for context in contexts}) == len(contexts)


@pytest.mark.parametrize("seed", [0, 7, -1, MIN_SEED, MAX_SEED])
def test_the_first_completion_of_a_seed_depends_on_the_seed_alone(tokenizer, seed):
    alone = seeded(tokenizer, 1, SamplingParams(seed=seed))[0]
    first, *_ = seeded(tokenizer, 2, SamplingParams(), SamplingParams(n=3, seed=seed))[1:]
    assert alone.streams == first.streams == Streams(seed)


def test_threads_that_build_at_once_share_no_number(builder, monkeypatch):
    """A server tokenizes long texts beside short ones."""

    def yielding(seed: int) -> Streams:
        time.sleep(0.0005)  # another thread continues in the middle of a request
        return Streams(seed)

    def build(i: int) -> list[tuple[int, int, int]]:
        made = [builder.build("for i in", SamplingParams(n=3)) for _ in range(10)]
        return [(request.id, context.id, context.streams.seed) for request, contexts in made for context in contexts]

    monkeypatch.setattr("foretoken.engine.requests.Streams", yielding)
    with ThreadPoolExecutor(4) as pool:
        made = [each for part in pool.map(build, range(4)) for each in part]
    requests, contexts, seeds = ({each[i] for each in made} for i in range(3))
    assert (len(requests), len(contexts), len(seeds)) == (40, 120, 120)


# Bad words


def test_bad_words_are_tokenized_at_the_start_of_a_text_and_after_a_space(builder, tokenizer):
    words = ["return", " größe", "🙂 b", *(f"word{i}" for i in range(3_000))]
    _, contexts = builder.build("a", SamplingParams(bad_words=words, n=2))
    each = [tokenizer.encode(v, add_special_tokens=False) for w in words for v in (w.strip(), " " + w.strip())]
    assert contexts[0].law.bad_words == tuple(dict.fromkeys(map(tuple, each)))
    assert contexts[1].law.bad_words is contexts[0].law.bad_words


@pytest.mark.parametrize(
    "words, said",
    [
        (["a", " "], "empty or blank, got ' '"),
        (["ab cd " * 600], "which has .* tokens; at most 512 are taken"),
        (["a"] * 100_001, "holds 100001 words of 100001 characters; at most 100000 words"),
        (["a" * 2**24 + "a"], "16777217 characters; at most 100000 words of 16777216"),
    ],
    ids=["blank", "long", "many", "large"],
)
def test_bad_words_are_refused(builder, words, said):
    with pytest.raises(InvalidRequest, match=said):
        builder.build("a", SamplingParams(bad_words=words))


class Sized(ToyModel):
    """A target whose tokens take 30 bytes each."""

    kept: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return 30

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        self.kept = max_bytes
        return True


class Drafting(Proposer):
    """A proposer whose tokens take 10 bytes each."""

    kept: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return 10

    def enable_prefix_cache(self, max_bytes: int) -> None:
        self.kept = max_bytes


def test_tokens_are_counted_in_the_target_and_in_the_draft() -> None:
    target, proposer = Sized(max_length=50), Drafting()
    assert split_kv_memory(target, proposer, 4000, prefixes=False, max_sequences=4) == 100
    assert (target.kept, proposer.kept) == (None, None)
    assert split_kv_memory(target, Proposer(), 3000, prefixes=False, max_sequences=4) == 100
    with pytest.raises(InvalidRequest, match="holds 50 tokens and a sequence may have 50"):
        split_kv_memory(target, proposer, 2000, prefixes=False, max_sequences=4)


def test_prefixes_are_kept_in_both_by_what_their_tokens_take() -> None:
    target, proposer = Sized(max_length=50), Drafting()
    split_kv_memory(target, proposer, 4000, prefixes=True, max_sequences=4)
    assert (target.kept, proposer.kept) == (3000, 1000)
    assert split_kv_memory(target, proposer, None, prefixes=True, max_sequences=2) is None
    assert (target.kept, proposer.kept) == (3000, 1000)  # two sequences of 50 tokens
