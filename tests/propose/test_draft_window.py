"""Drafters whose attention sees the newest tokens alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import blocks, tiny
from tests.models.plain import text
from tests.models.tiny import ARCHITECTURES, only_runner

from foretoken import LLM, SamplingParams
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.heads.block import read_block
from foretoken.models.heads.block_net import BlockNet
from foretoken.models.heads.eagle import EagleNet, read_eagle
from foretoken.models.loading import load_model
from foretoken.propose.early_exit import EarlyExitConfig, SelfQuantizedConfig
from foretoken.propose.mtp import AssistantGrowth

PROMPTS = ["def greet(name):\n    return", "import os\n" * 20, "x"]


@pytest.mark.parametrize("runner", ["compiled", "torch"])
def test_a_window_is_that_of_a_model_trained_with_it(runner: str, tmp_path: Path) -> None:
    ARCHITECTURES["mistral"].build().save_pretrained(tmp_path / "six")
    config = json.loads((tmp_path / "six" / "config.json").read_text())
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    (tmp_path / "whole" / "model.safetensors").symlink_to(tmp_path / "six" / "model.safetensors")
    logits = []
    with only_runner(runner):
        for name, window in (("six", None), ("whole", 6), ("six", 9), ("whole", None)):
            model = load_model(tmp_path / name, "float32", "cpu", attention_window=window)
            logits.append(model.score([model.open(text(40, 2))], [Draft.chain(text(5, 1))])[0].logits)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert not torch.allclose(logits[0], logits[3])


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_the_window_of_a_head_is_that_of_its_configuration(kind: str, tmp_path: Path) -> None:
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 4, "is_causal": False}
    rows, embedding, raw = [], torch.randn(101, 64), torch.randn(20, 3 * 64)
    for name, window, settings in (("own", None, windows), ("given", 4, {}), ("none", None, {})):
        net: EagleNet | BlockNet
        if kind == "eagle":
            eagle = read_eagle(tiny.save(tmp_path / name, *tiny.eagle3(**settings)))
            net = EagleNet(eagle, embedding, torch.float32, torch.device("cpu"), 64, window=window).like(eagle)
        else:
            block = read_block(tiny.save(tmp_path / name, *blocks.dflash(layers=1, taps=(0, 1, 2), **settings)))
            unembed = lambda x: x.float() @ embedding.T  # noqa: E731
            net = BlockNet(block, embedding, torch.float32, torch.device("cpu"), 64, unembed, window=window)
        handle = net.open(list(range(21)))
        net.extend(handle, list(range(1, 21)), net.features(raw))
        rows.append(net.catch_up([handle])[0])
    assert torch.equal(rows[0], rows[1]) and not torch.allclose(rows[0], rows[2])


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "dflash", "jetspec", "dspark"])
def test_texts_are_those_of_plain_decoding(method: str, tiny_pair: Any, tmp_path: Path) -> None:
    plain = LLM(tiny_pair.target, dtype="float32", speculative_config={"method": "none"})
    vocab, model = plain.target.vocab_size, tiny_pair.draft
    if method != "draft_model":
        written = tiny.eagle3(vocab=vocab) if method == "eagle3" else getattr(blocks, method)(vocab=vocab)
        model = tiny.save(tmp_path / "head", *written)
    config = {"method": method, "model": str(model), "num_speculative_tokens": 4, "draft_window": 5}
    llm = LLM(tiny_pair.target, dtype="float32", speculative_config=config)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=5, ignore_eos=True)
        outputs = [o.outputs[0] for o in llm.generate(PROMPTS, params)]
        assert [o.token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain.generate(PROMPTS, params)]
        assert all(o.stats.drafted for o in outputs)


def test_drafters_without_a_cache_of_their_own_refuse_a_window(tiny_pair: Any) -> None:
    for config in (AssistantGrowth, EarlyExitConfig, SelfQuantizedConfig):
        with pytest.raises(InvalidRequest, match="no draft_window"):
            config(draft_window=9)
    with pytest.raises(InvalidRequest, match="native decoder"):
        load_model(tiny_pair.draft, backend="hf", attention_window=9)
