"""``foretoken convert`` and the heads that ``widen`` takes along."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file
from tests.models.heads import blocks, tiny

from foretoken.models.heads.files import ends_of


def _tensors(folder):
    return load_file(folder / "model.safetensors")


def test_there_and_back(run, tmp_path):
    source = tiny.save(tmp_path / "a", *tiny.eagle3())
    assert run("convert", str(source), str(tmp_path / "b"), "--to", "speculators").code == 0
    result = run("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "sglang")
    assert result.code == 0
    assert result.out.endswith("tensors for sglang\n")
    before, after = _tensors(source), _tensors(tmp_path / "c")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "vllm", "--force").code == 0


def test_a_shared_vocabulary_head_is_written_out(run, tiny_pair, tmp_path):
    embedding = _tensors(tiny_pair.target)["model.embed_tokens.weight"]
    source = tiny.save(tmp_path / "a", *tiny.medusa(vocab=embedding.shape[0]))
    result = run("convert", str(source), str(tmp_path / "b"), "--to", "medusa")
    assert result.code == 1
    assert "--target" in result.err
    assert not (tmp_path / "b").exists()
    assert (
        run("convert", str(source), str(tmp_path / "b"), "--to", "medusa", "--target", str(tiny_pair.target)).code == 0
    )
    written = _tensors(tmp_path / "b")
    tied = json.loads((tiny_pair.target / "config.json").read_text())["tie_word_embeddings"]
    head = embedding if tied else _tensors(tiny_pair.target)["lm_head.weight"]
    assert torch.equal(written["2.1.weight"], head)


def test_block_drafters_change_their_layout(run, tiny_pair, tmp_path):
    embedding = _tensors(tiny_pair.target)["model.embed_tokens.weight"]
    source = tiny.save(tmp_path / "a", *blocks.dflash(vocab=embedding.shape[0]))
    refused = run("convert", str(source), str(tmp_path / "b"), "--to", "speculators")
    assert refused.code == 1 and "--target" in refused.err
    there = ("--to", "speculators", "--target", str(tiny_pair.target))
    assert run("convert", str(source), str(tmp_path / "b"), *there).code == 0
    assert run("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "vllm").code == 0
    before, after = _tensors(source), _tensors(tmp_path / "c")
    assert after.keys() - before.keys() == {"lm_head.weight"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 100, "target_layer_ids": [0, 1]}


def test_the_ends_of_multimodal_targets_are_found(run, tiny_pair, tmp_path):
    """Their language model's names have another prefix."""
    before = _tensors(tiny_pair.target)
    text = json.loads((tiny_pair.target / "config.json").read_text())
    tensors = {f"model.language_model.{name.removeprefix('model.')}": t for name, t in before.items()}
    config = {"model_type": "llava", "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    target = tiny.save(tmp_path / "target", config, tensors)
    embedding = before["model.embed_tokens.weight"]
    layer = {"mtp.fc.weight": torch.ones(64, 128)}
    source = tiny.save(tmp_path / "mtp", {"tie_word_embeddings": True}, layer)
    result = run("convert", str(source), str(tmp_path / "out"), "--to", "vllm", "--target", str(target))
    assert result.code == 0, result.err
    assert torch.equal(_tensors(tmp_path / "out")["model.embed_tokens.weight"], embedding)
    weights, name, _ = ends_of(target)
    assert torch.equal(weights[name], embedding)
    tiny.save(tmp_path / "none", config, layer)
    result = run("convert", str(source), str(tmp_path / "b"), "--to", "vllm", "--target", str(tmp_path / "none"))
    assert result.code == 1 and "has no embedding" in result.err


def test_refusals_are_one_line(run, tmp_path):
    source = tiny.save(tmp_path / "a", *tiny.blockwise())
    for args, message in {
        (str(source), str(tmp_path / "b"), "--to", "vllm"): "no other engine",
        (str(source), str(tmp_path / "b"), "--to", "onnx"): "sglang, vllm, speculators, medusa, original",
        (str(source), str(source), "--to", "vllm"): "same folder",
        (str(tmp_path / "none"), str(tmp_path / "b"), "--to", "vllm"): "does not exist",
    }.items():
        result = run("convert", *args)
        assert (result.code, result.out) == (1, "")
        assert message in result.err
        assert result.err.count("\n") == 1
        assert not (tmp_path / "b").exists()


def test_a_model_is_no_heads(run, tiny_pair, tmp_path):
    for force in ((), ("--force",)):
        result = run("convert", str(tiny_pair.target), str(tmp_path / "b"), "--to", "vllm", *force)
        assert result.code == 1 and not (tmp_path / "b").exists()
        assert f"{tiny_pair.target} is a model, and convert writes EAGLE" in result.err
        assert "foretoken quantize" in result.err and "num_heads" not in result.err


def test_scale_up_takes_heads_along(run, tiny_pair, tmp_path):
    head = tiny.save(tmp_path / "head", *tiny.blockwise())
    sizes = ["--hidden", "128", "--intermediate", "96", "--layers", "3", "--heads", "8", "--kv-heads", "2"]
    result = run("widen", str(tiny_pair.target), str(tmp_path / "wide"), *sizes, "--head", str(head))
    assert result.code == 0, result.err
    assert _tensors(tmp_path / "wide" / "heads" / "blockwise")["heads.0.up.weight"].shape == (24, 128)
