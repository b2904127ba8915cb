"""MTP layers on our runtime equal those of transformers' modules, in every layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.gguf_converter import convert
from tests.models.heads.mtp_files import MTP_FAMILIES, MtpReference
from tests.models.plain import text
from tests.models.test_native import needs_kernels
from tests.models.tiny import only_runner
from tests.models.trees import repeating

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.heads.loading import load_mtp
from foretoken.models.heads.mtp import has_mtp
from foretoken.models.loading import load_model

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
RECURRENT = ("qwen3.5", "qwen3-next", "qwen3.5-experts")


@pytest.mark.parametrize("runner", ["compiled", "torch"])
@pytest.mark.parametrize("name", MTP_FAMILIES)
@torch.no_grad()
@pytest.mark.slow
def test_logits_equal_the_reference(name: str, runner: str, tmp_path: Path) -> None:
    reference = MtpReference(MTP_FAMILIES[name])
    folder = reference.save(tmp_path)
    with only_runner("compiled" if name in RECURRENT else runner):
        target = load_model(folder, "float32", "cpu", "native")
    with only_runner(runner):
        loaded = load_mtp(target, None, None, folder, True, True)
    assert has_mtp(folder) and loaded.taps == (target.num_layers,)
    tokens = text(20, 3)
    hidden = reference(tokens[:-1]).hidden_states[-1][0]
    (scores,) = target.score([target.open(tokens[:-1])], [Draft.empty()], loaded.taps)
    torch.testing.assert_close(scores.taps[target.num_layers], hidden, **CLOSE)
    logits, after, before = reference.layer(0, tokens[1:], hidden)
    net = loaded.net
    torch.testing.assert_close(net.teacher_forced(tokens[1:], net.features(hidden)), logits, **CLOSE)
    tree = repeating((-1, -1, 0))
    for chained in (True, False):  # children of the newest token, then a child of the first of them
        net.normed = chained
        handle = net.open()
        net.extend(handle, tokens[1:], net.features(hidden))
        torch.testing.assert_close(net.catch_up([handle])[0], logits[-1:], **CLOSE)
        states = after if chained else before
        (children,) = net.grow([handle], [Draft(tree.ids[:2], tree.parents[:2])])
        (grandchild,) = net.grow([handle], [tree])
        for node in range(2):
            expected, *_ = reference.layer(0, [*tokens[1:], tree.ids[node]], torch.cat([hidden, states[-1:]]))
            torch.testing.assert_close(children[node], expected[-1], **CLOSE)
        _, *own = reference.layer(0, [*tokens[1:], tree.ids[0]], torch.cat([hidden, states[-1:]]))
        deeper = torch.cat([hidden, states[-1:], own[not chained][-1:]])
        expected, *_ = reference.layer(0, [*tokens[1:], tree.ids[0], tree.ids[2]], deeper)
        torch.testing.assert_close(grandchild[0], expected[-1], **CLOSE)
        net.close(handle)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
@torch.no_grad()
def test_transformers_mtp_loads_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    """Names and logits are those of ``generate(use_mtp=True)``."""
    import transformers
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    reference = MtpReference(MTP_FAMILIES[name])
    folder = reference.save(tmp_path)
    main = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{main.config.num_hidden_layers}.*"]  # by its number
    theirs = MtpModel.from_pretrained(main)
    tokens = text(12, 5)
    hidden = main(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
    positions = torch.arange(1, len(tokens))[None]
    cache = MtpCache(config=main.config.get_mtp_config())
    states = theirs.forward_layer(0, hidden, positions, cache, input_ids=torch.tensor([tokens[1:]]))
    target = load_model(folder, "float32", "cpu", "native")
    net = load_mtp(target, None, None, folder, True, True).net
    torch.testing.assert_close(net.teacher_forced(tokens[1:], hidden[0]), main.lm_head(states)[0], **CLOSE)


def test_a_checkpoint_without_mtp_layers_is_refused(tmp_path: Path) -> None:
    folder = MTP_FAMILIES["mimo"].target.save(tmp_path)
    target = load_model(folder, "float32", "cpu")
    assert not has_mtp(folder)
    with pytest.raises(InvalidRequest, match="foretoken train mtp"):
        load_mtp(target, None, None, folder)
    with pytest.raises(ModelLoadError, match=r"no multi-token-prediction layers.*mtp\.fc\.weight"):
        load_mtp(target, None, folder, folder)


pytestmark = needs_kernels

ARCHITECTURES = {
    "qwen3.5": "qwen35",
    "qwen3.5-experts": "qwen35moe",
    "glm4-moe": "glm4moe",
    "glm4-moe-lite": "deepseek2",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_file_s_layer_drafts_as_the_checkpoint_s(name: str, tmp_path: Path) -> None:
    family = MTP_FAMILIES[name]
    if name == "glm4-moe-lite":  # a file says how many layers are dense, which come first
        settings = {**family.target.config, "mlp_layer_types": ["dense", "sparse"]}
        family = replace(family, target=replace(family.target, config=settings))
    reference = MtpReference(family)
    folder = reference.save(tmp_path / "checkpoint")
    config = {**family.target.config, **reference.target.config.to_dict()}
    file = convert(folder, config, ARCHITECTURES[name], tmp_path / "model.gguf", next_layers=1)
    assert has_mtp(file)
    target = load_model(file, "float32", "cpu")
    assert target.num_layers == len(reference.target.model.layers)
    tokens = text(20, 3)
    hidden = reference(tokens[:-1]).hidden_states[-1][0]
    expected, *_ = reference.layer(0, tokens[1:], hidden)
    net = load_mtp(target, None, None, file, True, True).net
    ours = net.teacher_forced(tokens[1:], net.features(hidden))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
