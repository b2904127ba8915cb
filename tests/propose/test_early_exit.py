import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.test_graphs import InTorch, Recorder
from tests.models.trees import repeating

from foretoken import LLM
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.decoder import Decoder
from foretoken.models.early_exit import EarlyExit, Exit
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.loading import load_model
from foretoken.models.runners.cuda import layout
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.propose.base import BuildContext
from foretoken.propose.early_exit import EarlyExitConfig, build

PROMPT = [5, 9, 40, 7, 300, 12]


@pytest.fixture(params=["native", "torch", "graphs"])
def target(request: Any, tiny_pair: Any, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setenv("FORETOKEN_NATIVE", str(int(request.param == "native")))
    model = load_model(tiny_pair.target, dtype="float32", device="cpu")
    assert isinstance(model, Decoder)
    if request.param == "graphs":  # as on CUDA, with a stand-in for its graphs
        monkeypatch.setattr(layout, "attention_kernels", lambda: InTorch)
        source = Source(open_weights(tiny_pair.target), model.architecture, model.dtype)
        model.runner = CudaRunner(
            model.architecture, Layers(source), read_ends(source), model.dtype, model.device, capture=Recorder
        )
    return model


def trained(folder: Path, hidden: int = 64, layer: int = 2, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            "norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            "adapter.weight": 0.05 * torch.randn(hidden, hidden, generator=generator),
        },
        folder / "model.safetensors",
    )
    values = {"model_type": "foretoken_early_exit", "exit_layer": layer, "hidden_size": hidden, **config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def workshop(target: Any, model: Path | None = None) -> BuildContext:
    return BuildContext(target, None, None, model, lambda path: target, lambda config: None)  # type: ignore[arg-type, return-value]


def rows(model: Decoder, tokens: list[int], draft: Draft, taps: tuple[int, ...] = ()) -> Any:
    handle = model.open(tokens)
    scores = model.score([handle], [draft], taps)[0]
    model.close(handle)
    return scores


def test_the_first_layers_are_the_targets(target: Decoder, tmp_path: Path) -> None:
    """Norm and head over the input of the layer that is skipped; the same with a trained norm and adapter."""
    draft = repeating((-1, 0, -1), 8)
    states = rows(target, PROMPT, draft, (2, 3)).taps
    loaded = Exit.load(trained(tmp_path / "exit"))
    assert loaded.norm is not None and loaded.adapter is not None
    normed = torch.nn.functional.rms_norm(states[2].float(), (64,), loaded.norm, target.architecture.eps)
    expected = target.unembed(normed + normed @ loaded.adapter.T)
    result = rows(EarlyExit(target, loaded), PROMPT, draft, (1,))
    assert torch.allclose(result.logits, expected[-4:], atol=1e-4)
    assert list(result.taps) == [1]
    plain = rows(EarlyExit(target, Exit(2)), PROMPT, draft, (2,))
    assert torch.allclose(plain.logits, target.unembed(plain.taps[2])[-4:], atol=1e-4)


@pytest.mark.slow
def test_the_target_is_left_as_it_was(target: Decoder) -> None:
    """Two models over one set of weights, each with slots and positions of its own."""
    text = [i % 300 for i in range(1, 400)]
    before = rows(target, text, Draft.empty()).logits
    view = EarlyExit(target, Exit(1))
    held = view.open(text)
    first = view.score([held], [Draft.empty()])[0].logits
    long = rows(target, text * 2 if target.max_length > 900 else text + [3] * 60, Draft.empty()).logits
    assert long.shape == before.shape
    assert torch.equal(rows(target, text, Draft.empty()).logits, before)
    view.commit([held], [[7]])
    again = rows(view, [*text, 7], Draft.empty()).logits
    assert torch.equal(view.score([held], [Draft.empty()])[0].logits, again)
    assert not torch.equal(first, again)


def test_a_view_outlives_its_target(tiny_pair: Any) -> None:
    model = load_model(tiny_pair.target, dtype="float32", device="cpu")
    assert isinstance(model, Decoder)
    view = EarlyExit(model, Exit(2))
    expected = rows(view, PROMPT, Draft.empty()).logits
    del model
    assert torch.equal(rows(view, PROMPT, Draft.empty()).logits, expected)


def test_int8_layers_are_shared_too(tiny_pair: Any) -> None:
    model = load_model(tiny_pair.target, dtype="float32", device="cpu", quantization="int8")
    assert isinstance(model, Decoder)
    assert torch.isfinite(rows(EarlyExit(model, Exit(1)), PROMPT, Draft.empty()).logits).all()


def test_one_text_with_a_trained_exit(tiny_pair: Any, tmp_path: Path) -> None:
    from foretoken import SamplingParams

    params = SamplingParams(max_tokens=20, temperature=0.9, seed=4, ignore_eos=True)
    config = {"method": "early_exit", "model": str(trained(tmp_path / "exit")), "tree": "top_k"}
    llms = [LLM(tiny_pair.target, speculative_config=c, dtype="float32") for c in ({"method": "none"}, config)]
    texts = [[o.outputs[0].token_ids for o in llm.generate(["def f", "x ="], params)] for llm in llms]
    assert texts[0] == texts[1]
    assert llms[1].engine.proposer.name == "early_exit"


def test_the_default_exit_is_half_way(tiny_pair: Any, tmp_path: Path) -> None:
    model = load_model(tiny_pair.target, dtype="float32", device="cpu")
    assert build(EarlyExitConfig(), workshop(model)).model.num_layers == 1
    assert build(EarlyExitConfig(exit_layer=2), workshop(model)).model.num_layers == 2
    assert build(EarlyExitConfig(), workshop(model, trained(tmp_path / "exit"))).model.num_layers == 2


@pytest.fixture(scope="module")
def model(tiny_pair: Any) -> Any:
    return load_model(tiny_pair.target, dtype="float32", device="cpu")


@pytest.mark.parametrize("layer", [3, 9])
def test_an_exit_layer_that_the_target_lacks_is_refused(model: Any, layer: int) -> None:
    with pytest.raises(InvalidRequest, match="exit_layer must be from 1 to 2"):
        build(EarlyExitConfig(exit_layer=layer), workshop(model))


@pytest.mark.parametrize("name", ["exit_layer", "top_k"])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be an integer"):
        EarlyExitConfig(**{name: 0})


def test_a_trained_exit_is_for_its_own_layer(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="was trained for 2; leave it out"):
        build(EarlyExitConfig(exit_layer=1), workshop(model, trained(tmp_path / "exit")))


def test_a_trained_exit_has_the_targets_hidden_size(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a hidden size of 32 and the target's is 64"):
        build(EarlyExitConfig(), workshop(model, trained(tmp_path / "narrow", hidden=32)))


def test_a_checkpoint_of_another_kind_is_no_trained_exit(model: Any, tiny_pair: Any) -> None:
    with pytest.raises(ModelLoadError, match="is no trained exit"):
        build(EarlyExitConfig(), workshop(model, tiny_pair.draft))


def test_tensors_of_another_shape_than_the_configuration_says_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"lacks a tensor 'norm\.weight' of shape"):
        build(EarlyExitConfig(), workshop(model, trained(tmp_path / "wrong", hidden=64, hidden_size=32)))


def test_a_damaged_file_of_a_trained_exit_is_refused(model: Any, tmp_path: Path) -> None:
    cut = trained(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    with pytest.raises(ModelLoadError):
        build(EarlyExitConfig(), workshop(model, cut.parent))


def test_a_model_of_transformers_has_no_early_exit(tiny_pair: Any) -> None:
    with pytest.raises(InvalidRequest, match="use another method"):
        LLM(tiny_pair.target, speculative_config={"method": "early_exit"}, dtype="float32", backend="hf")
