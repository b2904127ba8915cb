"""Assistants of Gemma 4 compute what transformers' module computes from the target's keys and values."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.dense import module
from tests.models.plain import text
from tests.models.tiny import only_runner

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.decoder import Decoder
from foretoken.models.heads.assistant import AssistantHandle, AssistantNet
from foretoken.models.heads.loading import load_assistant
from foretoken.models.loading import load_model

from .assistant_files import CHANGES, saved_assistant

pytestmark = pytest.mark.slow

TREE = Draft.tree([9, 8, 7, 6, 5], (-1, -1, 0, 0, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("target")
    built = module("gemma4", **CHANGES)
    built.save_pretrained(folder)
    return folder, built


@pytest.fixture(scope="module")
def model(target: tuple[Path, Any]) -> Decoder:
    with only_runner("compiled"):
        loaded = load_model(target[0], "float32", "cpu", "native")
    assert isinstance(loaded, Decoder)
    return loaded


class Reference:
    """transformers' target and assistant after some tokens, in float64: states are fed back, and rounding with them."""

    def __init__(self, target: Any, assistant: Any, tokens: list[int]) -> None:
        self.target, self.assistant = copy.deepcopy(target).double(), copy.deepcopy(assistant).double()
        self.place = len(tokens)
        with torch.no_grad():
            output = self.target.model(
                torch.tensor([tokens]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
            )
        self.state, self.shared = output.last_hidden_state[:, -1:], output.shared_kv_states

    def step(self, token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits [V] and the next hidden state."""
        embedded = self.target.model.embed_tokens(torch.tensor([[token]]))
        with torch.no_grad():
            output = self.assistant(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                position_ids=torch.tensor([[self.place]]),
                shared_kv_states=dict(self.shared),
            )
        return output.logits[0, -1], output.last_hidden_state


def begun(net: AssistantNet, model: Decoder, tokens: list[int], newest: int) -> AssistantHandle:
    """A sequence of the net after the target has computed ``tokens`` and emitted ``newest``."""
    own = model.open(tokens)
    (scores,) = model.score([own], [Draft.empty()], (model.num_layers,))
    model.commit([own], [[newest]])
    handle = net.open()
    handle.slot, handle.place = scores.slot, len(tokens)
    net.extend(handle, [*tokens[1:], newest], scores.taps[model.num_layers])
    return handle


@pytest.mark.parametrize("clusters", [False, True])
def test_logits_of_trees_are_those_of_transformers(clusters, target, model, tmp_path):
    """In a ragged batch, with texts shorter and longer than the window, and longer than a page of the cache."""
    assistant = saved_assistant(tmp_path, clusters)
    net = load_assistant(model, tmp_path, target[0])
    texts = [text(length, 50 + length) for length in (3, 5, 6, 7, 8, 20, 80)]
    handles = [begun(net, model, tokens, 11 + i) for i, tokens in enumerate(texts)]
    first = net.catch_up(handles)
    levels = [net.grow(handles, [Draft(TREE.ids[:n], TREE.parents[:n])] * len(handles)) for n in (2, 4, 5)]
    grown = [torch.cat(rows) for rows in zip(*levels, strict=True)]
    for i, tokens in enumerate(texts):
        reference = Reference(target[1], assistant, tokens)
        expected, state = reference.step(11 + i, reference.state)
        assert (first[i][0] - expected).abs().max() < 1e-4
        states = {-1: state}
        for node, parent in enumerate(TREE.parents):
            expected, states[node] = reference.step(TREE.ids[node], states[parent])
            assert (grown[i][node] - expected).abs().max() < 1e-4, (i, node)


def test_rows_do_not_depend_on_what_shares_their_pass(target: tuple[Path, Any], model: Decoder, tmp_path: Path) -> None:
    saved_assistant(tmp_path, clusters=False)
    net = load_assistant(model, tmp_path, target[0])
    handles = [begun(net, model, text(length, length), 11) for length in (4, 30, 70)]
    together = net.catch_up(handles)
    again = [begun(net, model, text(length, length), 11) for length in (4, 30, 70)]
    for handle, logits in zip(again, together, strict=True):
        assert torch.equal(net.catch_up([handle])[0], logits)


def test_assistants_of_other_targets_are_refused(target: tuple[Path, Any], model: Decoder, tmp_path: Path) -> None:
    saved_assistant(tmp_path / "heads", clusters=False, head_dim=32)
    with pytest.raises(ModelLoadError, match="trained on"):
        load_assistant(model, tmp_path / "heads", target[0])
    saved_assistant(tmp_path / "vocabulary", clusters=False, vocab_size=200)
    with pytest.raises(ModelLoadError, match="vocabulary"):
        load_assistant(model, tmp_path / "vocabulary", target[0])
    with pytest.raises(ModelLoadError, match="gemma4_assistant"):
        load_assistant(model, target[0], target[0])


def test_a_target_without_kernels_lends_nothing(target: tuple[Path, Any], tmp_path: Path) -> None:
    saved_assistant(tmp_path, clusters=False)
    with only_runner("torch"):
        slow = load_model(target[0], "float32", "cpu", "native")
    with pytest.raises(InvalidRequest, match="compiled kernels"):
        load_assistant(slow, tmp_path, target[0])
