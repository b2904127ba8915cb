"""The toy model fulfils the contract, and its distribution can be computed by hand."""

import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.toy import ToyModel

from .trees import repeating

TREE = repeating((-1, 0, -1, 2, 2), 1)  # 1, 2 below it, 2, and 2 and 3 below that


def test_the_distribution_depends_on_the_last_tokens_only() -> None:
    toy = ToyModel(vocab_size=5, order=2, seed=3)
    assert torch.equal(toy.probs([0, 1, 2]), toy.probs([4, 4, 1, 2]))
    assert not torch.equal(toy.probs([0, 1, 2]), toy.probs([0, 2, 2]))
    assert toy.probs([0, 1]).dtype == torch.float64
    assert toy.probs([0, 1]).sum() == pytest.approx(1, abs=1e-15)
    assert torch.equal(toy.probs([1, 2]), ToyModel(5, 2, 3).probs([1, 2]))
    assert not torch.equal(toy.probs([1, 2]), ToyModel(5, 2, 4).probs([1, 2]))


def test_order_zero_ignores_history() -> None:
    toy = ToyModel(vocab_size=3, order=0)
    assert torch.equal(toy.probs([1]), toy.probs([2, 0, 1]))


def test_sharpness_scales_the_logits() -> None:
    assert torch.allclose(ToyModel(4, sharpness=0).probs([1]), torch.full((4,), 0.25, dtype=torch.float64))
    assert ToyModel(4, sharpness=200).probs([1]).max() > 0.999


def test_perturbed_is_near_when_weak_and_itself_at_zero() -> None:
    toy = ToyModel(vocab_size=6, order=1, seed=1, sharpness=2)
    distances = [float((toy.probs([2]) - toy.perturbed(s).probs([2])).abs().sum() / 2) for s in (0, 0.1, 0.5, 1)]
    assert distances[0] == 0
    assert distances == sorted(distances)
    twice = toy.perturbed(0.2).perturbed(0.2)
    assert 0 < float((twice.probs([2]) - toy.probs([2])).abs().sum() / 2) < distances[2]
    with pytest.raises(InvalidRequest, match="strength"):
        toy.perturbed(1.5)


def test_scores_are_the_distributions_at_every_node() -> None:
    toy = ToyModel(vocab_size=5, order=3)
    handles = [toy.open([1, 2]), toy.open([3])]
    scores = toy.score(handles, [TREE, Draft.chain([0, 4])], taps=(0, 2))
    assert [s.logits.shape for s in scores] == [(6, 5), (3, 5)]
    assert torch.equal(scores[0].logits[0].softmax(-1), toy.probs([1, 2]))
    assert torch.equal(scores[0].logits[4].softmax(-1), toy.probs([1, 2, 2, 2]))
    assert torch.equal(scores[1].logits[2].softmax(-1), toy.probs([3, 0, 4]))
    assert scores[0].first == 0 and scores[0].taps[2].shape == (7, toy.hidden_size)
    assert torch.equal(scores[0].taps[2][0], toy.hidden([1], 2))
    assert torch.equal(scores[0].taps[2][5], toy.hidden([1, 2, 2, 2], 2))
    assert not torch.equal(scores[0].taps[0], scores[0].taps[2])


def test_cache_bookkeeping_follows_the_contract() -> None:
    toy = ToyModel(vocab_size=5)
    handle = toy.open([1, 2, 3])
    assert handle.pending == [1, 2, 3]
    toy.score([handle], [Draft.chain([4])])
    (grown,) = toy.score([handle], [Draft.chain([4, 0])])
    assert grown.logits.shape[0] == 1
    toy.commit([handle], [[4, 2]])
    assert (handle.cached, handle.pending, handle.nodes) == (4, [2], [])
    toy.score([handle], [TREE])
    toy.commit([handle], [[2, 3, 1]])
    assert handle.cached == 7
    toy.commit([handle], [[0, 1]])
    assert handle.pending == [1, 0, 1]
    (scores,) = toy.score([handle], [Draft.empty()])
    assert scores.logits.shape[0] == 1
    (again,) = toy.score([handle], [Draft.empty()])
    assert torch.equal(again.logits, scores.logits)


def test_slots_are_reused_and_wrong_calls_refused() -> None:
    toy = ToyModel(vocab_size=5, max_length=4)
    first, second = toy.open([1]), toy.open([1, 2])
    assert (first.slot, second.slot) == (0, 1)
    toy.close(first)
    toy.close(first)
    assert toy.open([2]).slot == 0
    with pytest.raises(ValueError, match="closed"):
        toy.score([first], [Draft.empty()])
    with pytest.raises(InvalidRequest, match="reaches 5"):
        toy.score([second], [Draft.chain([1, 1, 1])])
    with pytest.raises(InvalidRequest, match="empty"):
        toy.open([])
    with pytest.raises(InvalidRequest):
        ToyModel(vocab_size=0)
