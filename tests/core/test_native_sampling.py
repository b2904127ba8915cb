"""The sampling kernels compared with torch and numpy on the same numbers."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core import streams
from foretoken.core.context import Context
from foretoken.core.distributions import NodeDistributions
from foretoken.core.draft import Draft, Sampled
from foretoken.core.errors import NoTokenAllowed
from foretoken.core.native import cpu
from foretoken.core.native import sampling as native
from foretoken.core.native.status import KernelArgumentError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import PrivateStream, Purpose, SharedStream, Streams
from foretoken.core.verdict import Verdict
from foretoken.propose.suffix import Suffix, SuffixConfig
from foretoken.propose.tree import kernel_candidates, likeliest, racing
from foretoken.verify import block, residual

KERNELS = native.kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels here")
VOCABULARIES = (2, 3, 17, 511, 513, 4096, 5000, 40_000, 151_936)
FILTERS = tuple(itertools.product((1.0, 0.6, 1.9), (0.0, 0.02), (0, 1, 50), (1.0, 0.9)))


def made(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Logits with ties in row 1 and something forbidden in row 0."""
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    logits[1] = (2 * logits[1]).round() / 2
    logits[0, vocabulary // 2] = -math.inf
    return logits


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_rows_are_those_of_torch(vocabulary: int) -> None:
    logits = made(3, vocabulary)
    for temperature, min_p, top_k, top_p in FILTERS:
        law = SamplingLaw(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        result, wanted = law.probs(logits, ()), law.probs(logits.double(), ())
        assert torch.allclose(result.sum(-1), torch.ones(3), atol=1e-5)
        far = (result - wanted).abs() > 1e-6 + 1e-4 * wanted
        # Where rounding decides whether the last of a nucleus is in it, both are right: its mass alone tells.
        for row in far.any(-1).nonzero()[:, 0].tolist():
            assert top_p < 1.0 and ((result[row] > 0) != (wanted[row] > 0)).any()
            whole = replace(law, top_p=1.0).probs(logits[row : row + 1].double(), ())[0]
            ordered = whole.sort(descending=True).values.cumsum(-1)
            counts = [int((each[row] > 0).sum()) for each in (result, wanted)]
            assert all(abs(float(ordered[count - 1]) - top_p) < 1e-5 for count in range(min(counts), max(counts)))


@pytest.mark.parametrize("vocabulary", [513, 151_936])
def test_a_wide_nucleus_has_the_likeliest_tokens_and_the_lowest_ids_on_ties(vocabulary: int) -> None:
    row = (20 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))).round() / 1000
    probs = SamplingLaw(top_p=0.7).probs(row[None], ())[0]
    ordered = row.sort(descending=True, stable=True).indices
    count = int((probs > 0).sum())
    assert count > 256 and (probs[ordered[:count]] > 0).all()
    before = row.double().softmax(-1)[ordered].cumsum(-1)
    assert before[count - 2] < 0.7 + 1e-6 and before[count - 1] > 0.7 - 1e-6
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("vocabulary", [3, 5000])
@pytest.mark.parametrize("top_k", [2**31, 2**32 + 1, 2**64 + 1, -(2**32) + 1, -1])
def test_no_top_k_wraps(vocabulary: int, top_k: int) -> None:
    """Beyond the vocabulary it leaves all tokens, and below 1 it is no filter."""
    logits = made(3, vocabulary)
    for top_p in (1.0, 0.9):
        law = SamplingLaw(top_k=top_k, top_p=top_p)
        assert torch.equal(law.probs(logits, ()), replace(law, top_k=0).probs(logits, ()))
        assert law.chances(logits, (), [0, 1, 2]) == replace(law, top_k=0).chances(logits, (), [0, 1, 2])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_single_probabilities_equal_those_of_rows(vocabulary: int) -> None:
    logits = made(4, vocabulary)
    for number, (temperature, min_p, top_k, top_p) in enumerate(FILTERS):
        law = SamplingLaw(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        tokens = [(number * 7919 + row) % vocabulary for row in range(3)] + [int(logits[3].argmax())]
        rows = law.probs(logits, ())
        assert law.chances(logits, (), tokens) == rows[range(4), tokens].tolist()
        assert (
            list(NodeDistributions(law, logits, pytest.fail).chances((1, 2), tokens[1:3]))
            == rows[[1, 2], tokens[1:3]].tolist()
        )


@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.8}, {"top_k": 40}, {"min_p": 0.01, "temperature": 0.7}])
@pytest.mark.slow
def test_bits_depend_on_the_row_alone(parameters: dict[str, float]) -> None:
    law = SamplingLaw(**parameters)  # type: ignore[arg-type]
    wide = torch.empty(9, 151_968)
    wide[:, :151_936] = made(9, 151_936)
    logits = wide[:, :151_936]
    threads = torch.get_num_threads()
    together = law.probs(logits, ())
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(law.probs(logits, ()), together)
            for row in range(9):
                assert torch.equal(law.probs(logits[row : row + 1].clone(), ())[0], together[row])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 3}])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution_is_nan(parameters: dict[str, float], broken: float) -> None:
    logits = made(2, 5000)
    if broken == -math.inf:
        logits[1] = broken
    else:
        logits[1, 4321] = broken
    rows = SamplingLaw(**parameters).probs(logits, ())  # type: ignore[arg-type]
    assert rows[0].isfinite().all() and rows[1].isnan().all()
    for stream in (Streams(1).private(Purpose.VERIFY, 0), Streams(1).shared(0)):
        with pytest.raises(ValueError, match="cannot draw"):
            stream.categorical(rows[1], 0)


@pytest.mark.parametrize("vocabulary", [1, 5, 4096, 4097, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_is_that_of_the_summed_weights(vocabulary: int, dtype: torch.dtype) -> None:
    assert KERNELS is not None
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(vocabulary, generator=generator, dtype=dtype) ** 20
    weights[torch.rand(vocabulary, generator=generator) < 0.3] = 0.0
    weights[vocabulary // 2] = 1.0
    summed = weights.double().cumsum(-1)
    numbers = [*torch.rand(200, generator=generator, dtype=torch.float64).tolist(), 2.0**-53, 1 - 2.0**-53]
    for u in numbers:
        token, total = KERNELS.draw(weights, u)
        assert weights[token] > 0 and total == pytest.approx(float(summed[-1]))
        assert float(summed[token]) >= u * total * (1 - 1e-12)
        assert token == 0 or float(summed[token - 1]) <= u * total * (1 + 1e-12)
    assert KERNELS.draw(torch.zeros(vocabulary, dtype=dtype), 0.5) == (-1, 0.0)


@pytest.mark.parametrize("vocabulary", [2, 9, 4096, 40_000, 151_936])
def test_a_race_is_that_of_all_exponentials(vocabulary: int) -> None:
    assert KERNELS is not None
    for key in range(60):
        logits = 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(key))
        for top_k in (0, 1, 30):
            weights = SamplingLaw(top_k=top_k).probs(logits[None], ())[0]
            mixed = streams.stream_key(key, Purpose.SHARED, 5)
            wanted = int((weights.double() / streams.exponentials(mixed, vocabulary)).argmax())
            assert KERNELS.race(weights, mixed) == KERNELS.race(weights.double(), mixed) == wanted
            assert streams.race_winner(weights.numpy(), mixed) == wanted


def test_the_lowest_of_equal_scores_wins_and_zeros_never() -> None:
    weights = torch.zeros(50_000)
    weights[41_000] = 1e-30
    assert all(Streams(seed).shared(3).categorical(weights, 2) == 41_000 for seed in range(20))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("vocabulary", [3, 4097, 151_936])
def test_the_excess_is_that_of_torch(vocabulary: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = SamplingLaw().probs(made(2, vocabulary), ())
    p = p.double() if wide else p
    rest, mass = residual.excess(p, q, 0.8)
    monkeypatch.setattr(native, "for_weights", lambda *weights: None)
    counterpart, its_mass = residual.excess(p, q, 0.8)
    assert torch.equal(rest, counterpart) and mass == pytest.approx(its_mass, rel=1e-12)


@pytest.mark.parametrize("vocabulary", [3, 511, 5000, 40_000])
@pytest.mark.parametrize("races", [False, True])
def test_the_leaders_of_rows_are_those_of_torch(vocabulary: int, races: bool) -> None:
    assert KERNELS is not None
    logits = made(4, vocabulary)
    logits[1] = logits[1].argsort().argsort() * 1e-3  # torch chooses among equal ones
    stream = SharedStream(3, 5)
    for temperature, min_p, top_k, top_p in FILTERS:
        law = SamplingLaw(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        found = kernel_candidates(law, logits, 5, stream if races else None)
        probs = law.probs(logits, ())
        expected = [
            racing(probs[i : i + 1], 5, stream, i) if races else likeliest(probs[i : i + 1], 5) for i in range(4)
        ]
        assert found is not None
        scores, ids = torch.cat([e.scores for e in expected]), torch.cat([e.ids for e in expected])
        torch.testing.assert_close(found.scores.double(), scores.double(), rtol=1e-5, atol=1e-5)
        assert torch.equal(found.ids[scores > -torch.inf], ids[scores > -torch.inf])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_likeliest_token_is_the_first_of_the_largest(vocabulary: int) -> None:
    assert KERNELS is not None
    rows = made(9, vocabulary)
    rows[2], rows[3], rows[4] = -math.inf, 0.0, -0.0
    rows[3, vocabulary // 2] = -0.0
    rows[5, vocabulary - 1], rows[6, 0], rows[7, vocabulary // 2] = math.inf, math.nan, math.nan
    rows[8] = torch.arange(vocabulary)
    expected = [int(row.argmax()) if not row.isnan().any() and row.amax().isfinite() else -1 for row in rows]
    assert KERNELS.best(rows) == SamplingLaw(temperature=0.0).best(rows, [()] * 9) == expected  # type: ignore[list-item]
    assert expected[2:8] == [-1, 0, 0, -1, -1, -1] and expected[8] == vocabulary - 1
    wide = torch.cat([rows, torch.full((9, 3), 99.0)], dim=-1)  # padding behind the vocabulary
    assert KERNELS.best(wide[:, :vocabulary]) == expected


def test_arguments_out_of_range_are_refused() -> None:
    assert KERNELS is not None
    logits, kept = made(2, 17), SamplingLaw().kept
    for tokens in ([0, 17], [-1, 3], [2**40, 3]):
        with pytest.raises(KernelArgumentError, match=r"token -?\d+ of row \d is outside the vocabulary of 17 tokens"):
            KERNELS.chances(logits, tokens, kept)
    assert len(KERNELS.chances(logits, [0, 16], kept)) == 2
    for u in (-0.1, 1.5, math.nan):
        with pytest.raises(KernelArgumentError, match="from 0 to 1"):
            KERNELS.draw(torch.ones(17), u)
    with pytest.raises(KernelArgumentError, match="rows of 0 tokens"):
        KERNELS.race(torch.ones(0), 1)
    overlapping = logits.as_strided((2, 17), (9, 1))
    with pytest.raises(KernelArgumentError, match="2 rows of 17 tokens, 9 apart"):
        KERNELS.rows(overlapping, kept)


def test_torch_is_the_fallback_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, law = made(3, 5000), SamplingLaw(temperature=0.8, top_k=20, top_p=0.95)
    compiled, chances = law.probs(logits, ()), law.chances(logits, (), [1, 2, 3])
    monkeypatch.setattr(native, "kernels", lambda: None)
    assert torch.allclose(law.probs(logits, ()), compiled, atol=1e-6)
    assert law.chances(logits, (), [1, 2, 3]) == pytest.approx(chances, abs=1e-6)
    tokens = [Streams(4).private(Purpose.VERIFY, i).categorical(compiled[0], 0) for i in range(50)]
    monkeypatch.undo()
    assert tokens == [Streams(4).private(Purpose.VERIFY, i).categorical(compiled[0], 0) for i in range(50)]


@pytest.mark.slow
def test_levels_give_the_same_draws_and_nearly_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = made(3, 40_000)
    results = {}
    for level in cpu.available():
        monkeypatch.setenv(cpu.VARIABLE, level.name)
        kernels = native.kernels()
        assert kernels is not None
        laws = [SamplingLaw(), SamplingLaw(temperature=0.7, top_p=0.9), SamplingLaw(top_k=40), SamplingLaw(min_p=0.01)]
        rows = [law.probs(logits, ()) for law in laws]
        weights = torch.rand(40_000, generator=torch.Generator().manual_seed(1))
        races = [kernels.race(weights, streams.stream_key(key, Purpose.SHARED, 5)) for key in range(50)]
        draws = [kernels.draw(weights, u / 50) for u in range(50)]
        results[level.name] = rows, races, draws
    best, *others = results.values()
    for rows, races, draws in others:
        assert (races, draws) == best[1:]
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-9) for one, other in zip(rows, best[0], strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.4}, {"top_k": 2, "temperature": 1.6}, {"top_p": 0.6}, {"min_p": 0.1}]
)
@pytest.mark.parametrize("vocabulary", [2, 17, 300, 5000])
def test_the_kernels_verify_chains_as_block_verification_does(vocabulary: int, options: dict[str, Any]) -> None:
    law, numbers, lengths = SamplingLaw(**options), torch.Generator().manual_seed(vocabulary), Counter[int]()
    for turn in range(60):
        n = 1 + turn % 5
        logits = 2 * torch.randn(n + 1, vocabulary, generator=numbers)
        near = torch.randn(n, vocabulary, generator=numbers) * (0.0, 0.1, 1.0, 3.0)[turn % 4]
        q = (logits[:n] + near).softmax(-1)
        if turn % 3 == 0:  # tokens that are never drafted
            q = q * (torch.rand(n, vocabulary, generator=numbers) > 0.5) + 1e-12
            q /= q.sum(-1, keepdim=True)
        if turn % 13 == 0:
            logits[turn % (n + 1)] = torch.nan
        draft = Draft.chain(torch.multinomial(q, 1, generator=numbers)[:, 0], Sampled(q))
        verdicts: list[object] = []
        for compiled in (True, False):
            rows = NodeDistributions(law, logits, lambda row: pytest.fail("no history is needed"))
            with pytest.MonkeyPatch.context() as patch:
                if not compiled:
                    patch.setattr(rows, "verify_chain", lambda *arguments: None)
                try:
                    verdicts.append(block.verify(draft, rows, PrivateStream(turn * 2**50)))
                except NoTokenAllowed as end:
                    verdicts.append(end.row)
        assert verdicts[0] == verdicts[1]
        lengths[len(verdicts[0].path) if isinstance(verdicts[0], Verdict) else -1] += 1
    assert len(lengths) > 2


PERIODIC = st.builds(
    lambda period, length, changes: [changes.get(i, period[i % len(period)]) for i in range(length)],
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.integers(1, 400),
    st.dictionaries(st.integers(0, 399), st.integers(0, 9), max_size=4),
)


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=300) | PERIODIC,
    budget=st.integers(1, 40),
    depth=st.sampled_from([1, 4, 24, 64]),
    factor=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    top_k=st.integers(1, 4),
)
def test_text_to_copy_is_that_of_the_search_in_python(tokens, budget, depth, factor, min_prob, top_k):
    config = SuffixConfig(depth, 0, factor, min_prob, top_k=top_k)
    drafts: list[Draft] = []
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(native, "kernels", lambda: None)
            drafts += Suffix(config).propose([Context(0, tokens, 1, SamplingLaw(), Streams(0))], [budget])
    assert drafts[0] == drafts[1]
