"""Random numbers: equal for equal addresses, independent for different ones, with the right distributions."""

import math
from collections import Counter
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from foretoken.core import streams as module
from foretoken.core.streams import (
    MAX_DERIVED_SEED,
    MAX_SEED,
    MIN_SEED,
    Purpose,
    SeedDomain,
    SharedStream,
    Streams,
    derived_seed,
    exponentials,
    random_seed_from,
)

# Seeds are fixed, so a test that passes once passes always; the bound only says how unlucky a seed may be.
LEAST = 1e-3
FLAT = torch.ones(8)
DRAWS = 3000


def private(seed: int = 0, purpose: Purpose = Purpose.VERIFY, position: int = 0, index: int = 0) -> int:
    return Streams(seed).private(purpose, position).categorical(FLAT, index)


def coin(seed: int = 0, purpose: Purpose = Purpose.VERIFY, position: int = 0, index: int = 0) -> int:
    return int(Streams(seed).private(purpose, position).bernoulli(0.5, index))


def shared(seed: int = 0, position: int = 0, index: int = 0) -> int:
    return Streams(seed).shared(position).categorical(FLAT, index)


ALONG: dict[str, Callable[[int], int]] = {
    "seeds": lambda i: private(seed=i),
    "positions": lambda i: private(position=i),
    "indices": lambda i: private(index=i),
    "shared, seeds": lambda i: shared(seed=i),
    "shared, positions": lambda i: shared(position=i),
    "shared, indices": lambda i: shared(index=i),
}


@pytest.mark.parametrize("along", ALONG)
def test_draws_are_uniform(along):
    counts = Counter(ALONG[along](i) for i in range(DRAWS))
    assert stats.chisquare([counts[k] for k in range(8)]).pvalue > LEAST


PAIRS: dict[str, Callable[[int], tuple[int, int]]] = {
    "draft, verify": lambda i: (private(position=i, purpose=Purpose.DRAFT), private(position=i)),
    "this seed, the next": lambda i: (private(seed=2 * i), private(seed=2 * i + 1)),
    "this position, the next": lambda i: (private(position=2 * i), private(position=2 * i + 1)),
    "this index, the next": lambda i: (private(position=i), private(position=i, index=1)),
    "index of one, position of the other": lambda i: (private(index=i), private(position=i)),
    "accept, residual": lambda i: (coin(position=i), private(position=i)),
    "two accept tests": lambda i: (coin(position=i), coin(position=i, index=1)),
    "accept, the drafted token": lambda i: (coin(position=i), private(position=i, purpose=Purpose.DRAFT)),
    "private, shared": lambda i: (private(position=i), shared(position=i)),
    "shared: this position, the next": lambda i: (shared(position=2 * i), shared(position=2 * i + 1)),
    "shared: this seed, the next": lambda i: (shared(seed=2 * i), shared(seed=2 * i + 1)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_different_addresses_are_independent(pair):
    table = np.zeros((8, 8), dtype=int)
    for i in range(DRAWS):
        table[PAIRS[pair](i)] += 1
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    assert stats.chi2_contingency(table).pvalue > LEAST


def test_exponentials_are_standard_and_unrelated():
    noise = exponentials(123, 20_000)
    assert stats.kstest(noise.numpy(), "expon").pvalue > LEAST
    assert abs(stats.spearmanr(noise[:-1], noise[1:]).statistic) < 0.03
    other = exponentials(124, 20_000)
    assert abs(stats.spearmanr(noise, other).statistic) < 0.03


def test_one_token_over_many_positions_is_exponential():
    noise = torch.stack([SharedStream(5, t).race(torch.ones(4), 0) for t in range(4000)]).reciprocal()
    for token in range(4):
        assert stats.kstest(noise[:, token].numpy(), "expon").pvalue > LEAST


LAW = torch.tensor([0.5, 0.0, 0.25, 0.15, 0.1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["private", "race"])
def test_categorical_draws_have_the_given_distribution(kind, dtype):
    weights = LAW.to(dtype) * 3  # need not be normalized
    of = (lambda i: Streams(i).private(Purpose.DRAFT, 3)) if kind == "private" else (lambda i: Streams(i).shared(3))
    counts = Counter(of(i).categorical(weights, 1) for i in range(DRAWS))
    assert counts[1] == 0
    possible = [i for i in range(5) if LAW[i] > 0]
    observed, expected = [counts[i] for i in possible], [DRAWS * float(LAW[i]) for i in possible]
    assert stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue > LEAST


def test_bernoulli_draws_have_the_given_probability():
    hits = sum(Streams(i).private(Purpose.VERIFY, 0).bernoulli(0.3, 0) for i in range(DRAWS))
    assert stats.binomtest(hits, DRAWS, 0.3).pvalue > LEAST


def test_the_race_is_the_gumbel_maximum():
    for position in range(50):
        weights = torch.rand(30, dtype=torch.float64)
        key = module.stream_key(7, Purpose.SHARED, position)
        gumbel = -exponentials(key, 30).log()
        assert Streams(7).shared(position).categorical(weights, 0) == int((weights.log() + gumbel).argmax())


def test_same_address_same_number_in_any_order():
    addresses = [
        (purpose, position, index)
        for purpose in (Purpose.DRAFT, Purpose.VERIFY)
        for position in range(5)
        for index in range(5)
    ]
    forward = {a: private(9, *a) for a in addresses}
    backward = {a: private(9, *a) for a in reversed(addresses)}
    assert forward == backward
    stream = Streams(9).private(Purpose.VERIFY, 2)
    assert [stream.categorical(FLAT, 4), stream.categorical(FLAT, 4)] == [forward[Purpose.VERIFY, 2, 4]] * 2


def test_shared_noise_is_addressed_by_where_the_token_goes():
    weights = torch.rand(50)
    for position in range(4):
        for index in range(4):
            direct = Streams(1).shared(position + index).race(weights, 0)
            assert torch.equal(Streams(1).shared(position).race(weights, index), direct)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary():
    """Bit for bit, so that a draft with a smaller or padded vocabulary shares it."""
    large = exponentials(77, 4099)
    for size in (1, 7, 8, 63, 1000, 4096):
        assert torch.equal(exponentials(77, size), large[:size])


def test_scalar_and_vector_hash_agree():
    for key in (0, 1, 2**63, 2**64 - 1, module.stream_key(3, Purpose.SHARED, 10)):
        vector = exponentials(key, 100)
        for i in range(100):
            bits = module.splitmix(key + (i + 1) * module.GOLDEN) >> 12
            assert float(vector[i]) == pytest.approx(-math.log((bits + 0.5) * 2.0**-52), rel=1e-14)


def test_all_seeds_differ():
    edges = [
        *range(-5, 6),
        MIN_SEED,
        MAX_SEED,
        2**127,
        2**127 + 5,
        2**127 + 2**64,
        2**127 + 2**64 + 5,
        MAX_DERIVED_SEED,
    ]
    private_draws = {tuple(private(seed, index=i) for i in range(20)) for seed in edges}
    shared_draws = {tuple(shared(seed, index=i) for i in range(20)) for seed in edges}
    assert len(private_draws) == len(shared_draws) == len(edges)


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_the_extreme_numbers_are_inside_the_open_interval(bits):
    with mock.patch.object(module, "splitmix", return_value=bits):
        stream = Streams(0).private(Purpose.VERIFY, 0)
        assert stream.bernoulli(1.0, 0)
        assert not stream.bernoulli(0.0, 0)
        assert stream.categorical(torch.tensor([0.0, 0.3, 0.7, 0.0]), 0) == (2 if bits else 1)
    u = ((bits >> 12) + 0.5) * 2.0**-52
    assert 0.0 < u < 1.0


def test_a_distribution_without_mass_is_an_error():
    for stream in (Streams(0).private(Purpose.VERIFY, 0), Streams(0).shared(0)):
        for weights in (torch.zeros(3), torch.full((3,), torch.nan)):
            with pytest.raises(ValueError, match="cannot draw"):
                stream.categorical(weights, 0)


def test_shared_noise_refuses_bernoulli_draws():
    with pytest.raises(TypeError, match="categorical draws only"):
        Streams(0).shared(0).bernoulli(0.5, 0)


def test_hashes_differ():
    seeds = {random_seed_from(seed, request) for seed in range(30) for request in range(30)}
    assert len(seeds) == 900
    assert random_seed_from(1, 23) != random_seed_from(12, 3)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_derived_seeds_differ_and_are_never_a_users():
    parts = [(a, b) for a in range(-3, 4) for b in range(4)] + [
        (3,),
        (),
        (12, 3),
        (1, 23),
        ("12", 3),
        ("1, 2",),
        (1, 2, 3),
    ]
    seeds = [derived_seed(domain, *part) for domain in SeedDomain for part in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(MAX_SEED < 2**127 <= seed <= MAX_DERIVED_SEED for seed in seeds)
    assert derived_seed(SeedDomain.REPLICA, 3, "größe \ud800") == derived_seed(SeedDomain.REPLICA, 3, "größe \ud800")


# The race over large vocabularies, where only tokens that can win are given noise

WEIGHTS: dict[str, Callable[[int], torch.Tensor]] = {
    "flat": lambda size: torch.ones(size),
    "peaked": lambda size: (4 * torch.randn(size, generator=torch.Generator().manual_seed(size))).softmax(-1),
    "a long tail": lambda size: torch.arange(1, size + 1).double().pow(-1.2).flip(0),
    "half of it": lambda size: (torch.arange(size) % 2).float(),
    "a few": lambda size: (torch.arange(size) % 97 == 5).double() * 1e-30,
    "one": lambda size: (torch.arange(size) == size - 1).float(),
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("size, seeds", [(6, 300), (300, 300), (20_000, 60)])
def test_the_winner_is_that_of_the_whole_race(weights, size, seeds):
    law = WEIGHTS[weights](size)
    with mock.patch.object(module, "_SMALL", 0):
        for seed in range(seeds):
            stream = Streams(seed).shared(2)
            assert stream.categorical(law, 1) == int(stream.race(law, 1).argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_at_the_bound_can_win(dtype):
    """Its weight over the bound equals the best score so far, and its id is lower: it wins the tie."""
    noise = np.array([module.EARLY, 0.5 * module.EARLY])
    early = (np.array([1]), noise[1:])
    weights = torch.tensor([2.0, 1.0], dtype=dtype)
    with (
        mock.patch.object(module, "_SMALL", 0),
        mock.patch.object(module, "early_exponentials", return_value=early),
        mock.patch.object(module, "_exponentials", side_effect=lambda key, ids: noise[ids]),
    ):
        assert SharedStream(0, 0).categorical(weights, 0) == 0


def test_early_exponentials_are_all_that_lie_under_the_bound():
    for key in range(20):
        noise = exponentials(key, 20_000).numpy()
        ids, values = module.early_exponentials(key, 20_000)
        assert np.array_equal(values, noise[ids])
        assert set(np.flatnonzero(noise < module.EARLY)) <= set(ids.tolist())
        assert ids.size < 2 * 20_000 * module.EARLY


@pytest.mark.parametrize("small", [0, 100])
def test_a_race_without_mass_is_an_error_at_any_size(small):
    with mock.patch.object(module, "_SMALL", small):
        for weights in (torch.zeros(50), torch.full((50,), torch.nan)):
            with pytest.raises(ValueError, match="cannot draw"):
                Streams(0).shared(0).categorical(weights, 0)


def test_cached_noise_cannot_be_changed_from_outside():
    key = module.stream_key(3, Purpose.SHARED, 4)
    before = Streams(3).shared(4).categorical(FLAT, 0)
    exponentials(key, 8).fill_(1.0)
    Streams(3).shared(4).race(FLAT, 0).zero_()
    assert Streams(3).shared(4).categorical(FLAT, 0) == before
